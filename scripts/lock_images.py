"""Makes the lock files of the images: every third party they install, pinned and with its hashes.

usage: python -m scripts.lock_images [--check | --upgrade] [VENDOR ...]

For each vendor the requirements of the distributions that its image holds are resolved for its Python and all its
platforms, which must agree. images/common/build.lock holds what our own wheels are built with. A lock that is there is
kept as far as it fits; --upgrade asks for the newest instead. --check writes nothing and exits 1 where a lock differs.
Needs uv (``make setup-lint`` brings it) and a package index.
"""

import argparse
import difflib
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from scripts.image_facts import ROOT, VENDORS, folders
from scripts.third_party import LOCAL, merged, name_of, requirements

MACHINES = {"linux/amd64": "x86_64-manylinux_2_31", "linux/arm64": "aarch64-manylinux_2_31"}


@dataclass(frozen=True, kw_only=True)
class LockJob:
    """One lock to make. ``constraints`` is None where nothing but the requirements binds."""

    lock: Path
    python: str
    platforms: tuple[str, ...]
    requirements: tuple[str, ...]
    constraints: Path | None = None
    exclude: tuple[str, ...] = ()

    @property
    def header(self) -> str:
        """The lock's first line."""
        where = ", ".join(self.platforms)
        return (
            f'# Made by "make locks" for Python {self.python} on {where}; edit pyproject.toml or images/locks.toml.\n'
        )


class LockError(RuntimeError):
    """A lock that cannot be made; the message says what to do."""


def vendor_requirements(vendor: str, root: Path = ROOT) -> list[str]:
    """What a vendor's image wants from a package index, merged and sorted, one requirement a line.

    The base's optional dependencies of the vendor's name, and of what an operator may turn on without building an image
    of his own (the dashboard, traces), are part of it; our own names are not.
    """
    found: list[str] = []
    for folder in folders(vendor, root):
        project = tomllib.loads((root / folder / "pyproject.toml").read_text())["project"]
        extras = project.get("optional-dependencies", {})
        found += project.get("dependencies", [])
        found += [line for extra in (vendor, "tui", "otel") for line in extras.get(extra, [])]
    settings = tomllib.loads((root / "images" / "locks.toml").read_text())[vendor]
    found += settings["also"]
    left_out = set(settings["exclude"])
    return merged([line for line in found if not name_of(line).startswith(LOCAL) and name_of(line) not in left_out])


def jobs(root: Path = ROOT) -> dict[str, LockJob]:
    """All locks, by vendor; "build" is the one of the build tools."""
    bases = tomllib.loads((root / "images" / "bases.toml").read_text())
    settings = tomllib.loads((root / "images" / "locks.toml").read_text())
    found = {
        vendor: LockJob(
            lock=root / "images" / vendor / "requirements.lock",
            python=bases[vendor]["python"],
            platforms=tuple(bases[vendor]["platforms"]),
            requirements=tuple(vendor_requirements(vendor, root)),
            constraints=root / "images" / vendor / "constraints.txt",
            exclude=tuple(settings[vendor]["exclude"]),
        )
        for vendor in VENDORS
    }
    found["build"] = LockJob(
        lock=root / "images" / "common" / "build.lock",
        python=min((base["python"] for base in bases.values()), key=lambda text: tuple(map(int, text.split(".")))),
        platforms=tuple(MACHINES),
        requirements=tuple(requirements("build", root)),
    )
    return found


def resolve(job: LockJob, uv: str, *, upgrade: bool = False) -> str:
    """The lock's text by today's index, for all platforms; raises LockError where it cannot be had or they differ."""
    texts = {platform: _resolve_for(job, platform, uv, upgrade=upgrade) for platform in job.platforms}
    first, *others = texts
    for other in others:
        if texts[other] != texts[first]:
            difference = "\n".join(_difference(texts[first], texts[other], first, other))
            raise LockError(f"{_name(job.lock)}: {first} and {other} want different packages:\n{difference}")
    return job.header + texts[first]


def _resolve_for(job: LockJob, platform: str, uv: str, *, upgrade: bool) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "requirements.in").write_text("".join(f"{line}\n" for line in job.requirements))
        (folder / "excludes.txt").write_text("".join(f"{line}\n" for line in job.exclude))
        if job.lock.is_file():
            shutil.copy(job.lock, folder / "new.lock")  # uv keeps what fits of the file it is to write
        if job.constraints is not None:
            shutil.copy(job.constraints, folder / "constraints.txt")
        command = [
            uv, "pip", "compile", "requirements.in", "--quiet", "--no-header", "--generate-hashes",
            "--only-binary", ":all:", "--python-version", job.python, "--python-platform", MACHINES[platform],
            "--excludes", "excludes.txt", *(["--constraints", "constraints.txt"] if job.constraints else []),
            "--output-file", "new.lock", *(["--upgrade"] if upgrade else []),
        ]  # fmt: skip
        environment = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, check=False)
        if done.returncode != 0:
            raise LockError(f"{_name(job.lock)}: cannot be resolved for {platform}:\n{done.stderr.strip()}")
        return (folder / "new.lock").read_text()


def _difference(before: str, after: str, old: str, new: str) -> list[str]:
    """The changed pins, without the hashes."""
    lines = [[line for line in text.splitlines() if "--hash" not in line] for text in (before, after)]
    return list(difflib.unified_diff(lines[0], lines[1], old, new, lineterm="", n=0))


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


def find_uv() -> str:
    """The uv beside this Python, or that on the PATH; raises LockError with the line that brings it."""
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.is_file() else shutil.which("uv")
    if found is None:
        raise LockError('uv is not here: "make setup-lint" installs it')
    return found


def main() -> int:
    """Makes or checks the locks; 0 where all is well, 1 where a lock differs or cannot be made, 2 for a wrong use."""
    parser = argparse.ArgumentParser(prog="lock_images", description="Makes or checks the lock files of the images.")
    parser.add_argument("vendors", nargs="*", metavar="VENDOR", help=f"{', '.join((*VENDORS, 'build'))}; none: all")
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 where a lock differs")
    parser.add_argument("--upgrade", action="store_true", help="take the newest that fits")
    arguments = parser.parse_args()
    known = jobs()
    unknown = [vendor for vendor in arguments.vendors if vendor not in known]
    if unknown:
        parser.error(f"unknown vendor {unknown[0]!r}; known: {', '.join(known)}")
    differs = False
    try:
        uv = find_uv()
        for vendor in arguments.vendors or list(known):
            job = known[vendor]
            before = job.lock.read_text() if job.lock.is_file() else ""
            after = resolve(job, uv, upgrade=arguments.upgrade)
            state = "unchanged" if after == before else "differs" if arguments.check else "written"
            print(f"locks: {_name(job.lock)}: {state}", flush=True)
            differs |= after != before
            if arguments.check and after != before:
                print("\n".join(_difference(before, after, "as it is", "as it would be")))
            elif after != before:
                job.lock.write_text(after)
    except LockError as error:
        print(f"locks: {error}", file=sys.stderr)
        return 1
    if arguments.check and differs:
        print('locks: "make locks" writes them anew', file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
