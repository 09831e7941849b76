"""Finds plugins: installed entry points, and what lies on the plugin path.

A plugin is an entry point of the group ``tokenspeed_kernel.plugins``. TOKENSPEED_KERNEL_PLUGIN_PATH (separated as in
PATH) adds plugins that are not installed: source folders, unpacked distributions and pure-Python wheels.
"""

import os
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from importlib.metadata import EntryPoint, distributions, entry_points
from itertools import pairwise
from pathlib import Path

GROUP = "tokenspeed_kernel.plugins"
PATH_VARIABLE = "TOKENSPEED_KERNEL_PLUGIN_PATH"

_NATIVE_SUFFIXES = (".so", ".pyd", ".dylib")


class PluginError(RuntimeError):
    """A plugin that could not be found or loaded; the message names it."""


@dataclass(frozen=True)
class FoundPlugin:
    """An entry point, and the distribution and version (or the path) it was found in."""

    entry_point: EntryPoint
    origin: str

    @property
    def name(self) -> str:
        return self.entry_point.name


def _installed() -> list[FoundPlugin]:
    found = []
    for entry_point in entry_points(group=GROUP):
        distribution = entry_point.dist
        origin = entry_point.value if distribution is None else f"{distribution.name} {distribution.version}"
        found.append(FoundPlugin(entry_point, origin))
    return found


def _from_source(folder: Path) -> tuple[Path, list[EntryPoint]]:
    """The folder to import from, and the entry points that its pyproject.toml declares."""
    project_file = folder / "pyproject.toml"
    try:
        project = tomllib.loads(project_file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise PluginError(f"{project_file} is not valid TOML: {error}") from error
    declared = project.get("project", {}).get("entry-points", {}).get(GROUP, {})
    points = [EntryPoint(name, value, GROUP) for name, value in declared.items()]
    return (folder / "src" if (folder / "src").is_dir() else folder), points


def _from_metadata(path: Path) -> list[EntryPoint]:
    return [
        point
        for distribution in distributions(path=[str(path)])
        for point in distribution.entry_points.select(group=GROUP)
    ]


def _refuse_native(wheel: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
    except zipfile.BadZipFile as error:
        raise PluginError(f"{wheel} is not a wheel: {error}") from error
    native = [name for name in names if name.endswith(_NATIVE_SUFFIXES)]
    if native:
        raise PluginError(
            f"{wheel} holds native code ({native[0]}) and cannot run from a path; install it: pip install {wheel}"
        )


def plugins_at(path: str) -> list[FoundPlugin]:
    """The plugins at ``path``, which joins the end of sys.path so that it shadows nothing.

    Raises PluginError where there is nothing, or nothing that declares an entry point of the group.
    """
    place = Path(path).expanduser().resolve()
    if place.is_file() and place.suffix == ".whl":
        _refuse_native(place)
        root, points = place, _from_metadata(place)
    elif place.is_dir():
        is_source = (place / "pyproject.toml").is_file()
        root, points = _from_source(place) if is_source else (place, _from_metadata(place))
    else:
        raise PluginError(f"no kernel plugin at {path}: give a folder or a .whl file")
    if not points:
        raise PluginError(
            f"{place} declares no kernel plugin; its pyproject.toml needs\n"
            f'[project.entry-points."{GROUP}"]\nname = "module:register"'
        )
    if str(root) not in sys.path:
        sys.path.append(str(root))
    return [FoundPlugin(point, str(place)) for point in points]


def find_plugins() -> list[FoundPlugin]:
    """Every plugin, installed or on the plugin path, by name. Raises PluginError where two share a name."""
    found = _installed()
    for path in filter(None, os.environ.get(PATH_VARIABLE, "").split(os.pathsep)):
        found.extend(plugins_at(path))
    found.sort(key=lambda plugin: plugin.name)
    for one, other in pairwise(found):
        if one.name == other.name:
            raise PluginError(
                f"two kernel plugins are called {one.name!r}: from {one.origin} and from {other.origin}; "
                f"uninstall one of them or take it off {PATH_VARIABLE}"
            )
    return found
