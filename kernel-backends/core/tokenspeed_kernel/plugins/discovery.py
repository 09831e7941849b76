"""Finds plugins: installed entry points, and what lies on the plugin path.

A plugin is an entry point of the group ``tokenspeed_kernel.plugins``, whose object registers kernels; one of the group
``tokenspeed_kernel.platforms`` is hardware of a vendor's own (vendor_platforms.py). TOKENSPEED_KERNEL_PLUGIN_PATH
(separated as in PATH) adds plugins that are not installed: source folders, unpacked distributions and pure-Python
wheels.
"""

import os
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, distributions
from itertools import pairwise
from pathlib import Path

GROUP = "tokenspeed_kernel.plugins"
PLATFORMS_GROUP = "tokenspeed_kernel.platforms"
GROUPS = (PLATFORMS_GROUP, GROUP)
"""In the order in which they are loaded."""

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

    @property
    def is_platform(self) -> bool:
        return self.entry_point.group == PLATFORMS_GROUP

    @property
    def place(self) -> tuple[int, str]:
        """Where it stands in the order of loading: platforms first, each group by name."""
        return GROUPS.index(self.entry_point.group), self.name


_joined: set[str] = set()
"""Places that ``plugins_at`` put on sys.path. What lies there is found by its path, and must not be found again as if
it were installed."""


def _installed() -> list[FoundPlugin]:
    found: dict[str, list[FoundPlugin]] = {}
    for distribution in distributions(path=[place for place in sys.path if place not in _joined]):
        origin = f"{distribution.name} {distribution.version}"
        points = _points_of(distribution)
        # The first of a name on sys.path is the one that is imported.
        found.setdefault(distribution.name.lower(), [FoundPlugin(point, origin) for point in points])
    return [plugin for plugins in found.values() for plugin in plugins]


def _points_of(distribution: Distribution) -> list[EntryPoint]:
    return [point for group in GROUPS for point in distribution.entry_points.select(group=group)]


def _from_source(folder: Path) -> tuple[Path, list[EntryPoint]]:
    """The folder to import from, and the entry points that its pyproject.toml declares."""
    project_file = folder / "pyproject.toml"
    try:
        project = tomllib.loads(project_file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise PluginError(f"{project_file} is not valid TOML: {error}") from error
    declared = project.get("project", {}).get("entry-points", {})
    points = [EntryPoint(name, value, group) for group in GROUPS for name, value in declared.get(group, {}).items()]
    return (folder / "src" if (folder / "src").is_dir() else folder), points


def _from_metadata(path: Path) -> list[EntryPoint]:
    return [point for distribution in distributions(path=[str(path)]) for point in _points_of(distribution)]


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
    if all(point.group == PLATFORMS_GROUP for point in points):
        raise PluginError(
            f"{place} declares no kernel plugin; its pyproject.toml needs\n"
            f'[project.entry-points."{GROUP}"]\nname = "module:register"'
        )
    if str(root) not in sys.path:
        sys.path.append(str(root))
        _joined.add(str(root))
    return [FoundPlugin(point, str(place)) for point in points]


def find_plugins() -> list[FoundPlugin]:
    """Every plugin, installed or on the plugin path, in the order of loading. Raises PluginError where two share a
    name."""
    found = _installed()
    for path in filter(None, os.environ.get(PATH_VARIABLE, "").split(os.pathsep)):
        found.extend(plugins_at(path))
    found.sort(key=lambda plugin: plugin.place)
    for one, other in pairwise(found):
        if one.place == other.place:
            raise PluginError(
                f"two kernel plugins are called {one.name!r}: from {one.origin} and from {other.origin}; "
                f"uninstall one of them or take it off {PATH_VARIABLE}"
            )
    return found
