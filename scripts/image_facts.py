"""Facts about this checkout that images and locks are made from. Runs on a bare Python 3.11, also inside a build.

usage: image_facts.py folders VENDOR | recipes FOLDER | version
"""

import hashlib
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent if "__file__" in globals() else Path.cwd()
VENDORS = ("cpu", "nvidia", "amd", "npu")
_EVERYWHERE = ("scheduler", "kernel-backends/core", "kernel-backends/cpu", "tui", ".")
_OF_VENDOR = {
    "cpu": (),
    "nvidia": ("kernel-backends/triton", "kernel-backends/mla", "kernel-backends/nvidia"),
    "amd": ("kernel-backends/triton", "kernel-backends/amd"),
    "npu": ("kernel-backends/npu",),
}


def folders(vendor: str, root: Path = ROOT) -> list[str]:
    """The folders of the distributions that a vendor's image holds, relative to ``root``.

    A vendor's kernels are left out where this checkout does not have them. Raises SystemExit for an unknown vendor.
    """
    if vendor not in _OF_VENDOR:
        raise SystemExit(f"image_facts.py: unknown vendor {vendor!r}; known: {', '.join(VENDORS)}")
    return [name for name in (*_OF_VENDOR[vendor], *_EVERYWHERE) if (root / name / "pyproject.toml").is_file()]


def recipes_hash(folder: Path) -> str:
    """A short hash over all recipes and hardware files below ``folder``: the label by which two images' sets compare.

    Raises SystemExit where there are none.
    """
    files = sorted(folder.rglob("*.yaml"), key=lambda path: path.relative_to(folder).as_posix())
    if not files:
        raise SystemExit(f"image_facts.py: there are no recipes below {folder}")
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def version(root: Path = ROOT) -> str:
    """The version of the base distribution: the engine's."""
    found = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    assert isinstance(found, str)
    return found


def main(arguments: list[str]) -> None:
    """Prints one fact; raises SystemExit with the usage."""
    match arguments:
        case ["folders", vendor]:
            print("\n".join(folders(vendor)))
        case ["recipes", folder]:
            print(recipes_hash(Path(folder)))
        case ["version"]:
            print(version())
        case _:
            raise SystemExit("usage: image_facts.py folders VENDOR | recipes FOLDER | version")


if __name__ == "__main__":
    main(sys.argv[1:])
