"""Prints what the local distributions need from the package index, as a requirements file.

usage: third_party.py build | run | web | test | dev

The distributions of this checkout (tokenspeed-appliance and its kin) are left out whatever asks for them: they are
installed from their folders, and the index must never be asked for their names. Runs on a bare Python 3.11.
"""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCAL = "tokenspeed-appliance"
GROUPS = ("build", "run", "web", "test", "dev")
EXTRAS_OF_A_RUN = ("cpu", "tui")
BUILD_PROGRAMS = ("cmake>=3.25,<5", "editables>=0.5,<1", "ninja>=1.11,<2")
"""Beside the declared build backends: the programs that the native builds call, so that a bare machine needs only
a compiler, and what hatchling's editable installs import."""


def local_projects(root: Path = ROOT) -> list[Path]:
    """The pyproject.toml files of this checkout's distributions."""
    patterns = ("pyproject.toml", "scheduler/pyproject.toml", "tui/pyproject.toml", "kernel-backends/*/pyproject.toml")
    return sorted(path for pattern in patterns for path in root.glob(pattern))


def requirements(group: str, root: Path = ROOT) -> list[str]:
    """The third-party requirements of a group, sorted, one a line; raises SystemExit for an unknown group."""
    if group not in GROUPS:
        raise SystemExit(f"third_party.py: unknown group {group!r}; known: {', '.join(GROUPS)}")
    found: list[str] = list(BUILD_PROGRAMS) if group == "build" else []
    for path in local_projects(root):
        project = tomllib.loads(path.read_text())
        found += _of_project(project, group)
    return merged([line for line in found if not name_of(line).startswith(LOCAL)])


def merged(lines: list[str]) -> list[str]:
    """One line a distribution: the version bounds of all its lines together."""
    bounds: dict[tuple[str, str, str], list[str]] = {}
    for line in lines:
        requirement, _, marker = line.partition(";")
        match = re.fullmatch(r"\s*([A-Za-z0-9._-]+)\s*(\[[^\]]*\])?\s*(.*)", requirement.strip())
        if match is None:
            raise SystemExit(f"third_party.py: cannot read the requirement {line!r}")
        known = bounds.setdefault((name_of(line), match[2] or "", marker.strip()), [])
        known += [bound.strip() for bound in match[3].split(",") if bound.strip() and bound.strip() not in known]
    return [
        name + extras + ",".join(sorted(limits)) + (f"; {marker}" if marker else "")
        for (name, extras, marker), limits in sorted(bounds.items())
    ]


def _of_project(project: dict[str, Any], group: str) -> list[str]:
    if group == "build":
        return list(project["build-system"]["requires"])
    extras = project["project"].get("optional-dependencies", {})
    if group == "run":
        wanted = [line for extra in EXTRAS_OF_A_RUN for line in extras.get(extra, [])]
        return [*project["project"].get("dependencies", []), *wanted]
    return list(extras.get(group, []))


def name_of(line: str) -> str:
    """The distribution that a requirement names, in its normal form; empty for a line that names none."""
    found = re.match(r"\s*[A-Za-z0-9._-]+", line)
    return re.sub(r"[-_.]+", "-", found[0].strip()).lower() if found else ""


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(f"usage: third_party.py {' | '.join(GROUPS)}")
    print("\n".join(requirements(sys.argv[1])))
