"""The one door for kernels from other packages: entry points of the group ``tokenspeed_kernel.plugins``."""

from tokenspeed_kernel.plugins.discovery import (
    GROUP,
    PATH_VARIABLE,
    FoundPlugin,
    PluginError,
    find_plugins,
    plugins_at,
)
from tokenspeed_kernel.plugins.loading import (
    OPTIONAL_VARIABLE,
    LoadedPlugin,
    load_into,
    load_platforms,
    load_plugins,
)

__all__ = [
    "GROUP",
    "OPTIONAL_VARIABLE",
    "PATH_VARIABLE",
    "FoundPlugin",
    "LoadedPlugin",
    "PluginError",
    "find_plugins",
    "load_into",
    "load_platforms",
    "load_plugins",
    "plugins_at",
]
