"""Loads plugins: once a process, platforms first, then in the order of their names, strictly.

A plugin is a callable without arguments that registers kernels. One that fails stops the start, with its name, unless
TOKENSPEED_KERNEL_OPTIONAL_PLUGINS (names, comma-separated) lists it; then the platform of its name goes with it.
"""

import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenspeed_kernel.plugins.discovery import PLATFORMS_GROUP, FoundPlugin, PluginError, find_plugins
from tokenspeed_kernel.registry import KernelRegistry, active_registry, global_registry, registering_from, use_registry
from tokenspeed_kernel.vendor_platforms import VendorPlatform, detected

OPTIONAL_VARIABLE = "TOKENSPEED_KERNEL_OPTIONAL_PLUGINS"

logger = logging.getLogger("tokenspeed_kernel")


@dataclass(frozen=True)
class LoadedPlugin:
    """The outcome of one plugin.

    Attributes:
        name: of its entry point.
        origin: distribution and version, or the path it came from.
        error: why it was left out, for an optional plugin that failed; else None.
    """

    name: str
    origin: str
    error: str | None = None


def optional_names() -> frozenset[str]:
    """The plugins that the operator allows to fail."""
    return frozenset(name.strip() for name in os.environ.get(OPTIONAL_VARIABLE, "").split(",") if name.strip())


def load_one(plugin: FoundPlugin, registry: KernelRegistry) -> None:
    """Imports the plugin and lets it register in ``registry``: all its kernels, or none where it fails. A platform is
    added, and whether it is here is asked.

    Raises PluginError, with the cause chained, for whatever goes wrong.
    """
    trial = registry.copy()
    try:
        loaded: Any = plugin.entry_point.load()
        if plugin.is_platform:
            _add_platform(trial, plugin.name, loaded)
        else:
            with use_registry(trial), registering_from(plugin.origin):
                loaded()
    except Exception as error:
        raise PluginError(
            f"kernel plugin {plugin.name!r} (from {plugin.origin}) failed to load: {type(error).__name__}: {error}. "
            f"Mend or uninstall it, or start without it: {OPTIONAL_VARIABLE}={plugin.name}"
        ) from error
    registry.adopt(trial)


def _add_platform(registry: KernelRegistry, name: str, platform: Any) -> None:
    if not isinstance(platform, VendorPlatform) or platform.vendor != name:
        raise TypeError(f"an entry point {name} of {PLATFORMS_GROUP} must be a VendorPlatform(vendor={name!r}, ...)")
    registry.add_platform(platform)
    detected(platform)


def load_into(registry: KernelRegistry, plugins: Sequence[FoundPlugin]) -> list[LoadedPlugin]:
    """Loads each plugin; an optional one that fails is logged and left out. Raises PluginError for any other."""
    optional = optional_names()
    loaded = []
    for plugin in plugins:
        try:
            load_one(plugin, registry)
        except PluginError as error:
            if plugin.name not in optional:
                raise
            logger.warning("optional %s", error)
            registry.drop_platform(plugin.name)
            loaded.append(LoadedPlugin(plugin.name, plugin.origin, str(error)))
        else:
            loaded += [] if plugin.is_platform else [LoadedPlugin(plugin.name, plugin.origin)]
    return loaded


class _Loader:
    """Remembers what the one load of this process did, platforms first and plugins behind them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: list[FoundPlugin] | None = None
        self._outcome: list[LoadedPlugin] = []
        self._failure: PluginError | None = None

    def load(self, *, platforms_only: bool = False) -> list[LoadedPlugin]:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            try:
                if self._waiting is None:
                    self._waiting = find_plugins()
                due = [plugin for plugin in self._waiting if plugin.is_platform or not platforms_only]
                self._waiting = [plugin for plugin in self._waiting if plugin not in due]
                self._outcome += load_into(global_registry(), due)
            except PluginError as error:
                self._failure = error
                raise
            return list(self._outcome)


_loader = _Loader()


def load_platforms() -> None:
    """Loads what says which hardware is here, and no kernel: before a process says what it computes on. Raises what
    ``load_plugins`` does."""
    _loader.load(platforms_only=True)


def load_plugins() -> list[LoadedPlugin]:
    """Loads every plugin into the process's registry, once; later calls return (or raise) what the first did."""
    return _loader.load()


def loaded_registry() -> KernelRegistry:
    """The active registry, with the plugins loaded first where it is the process's own.

    Raises PluginError where a plugin that is not optional fails.
    """
    registry = active_registry()
    if registry is global_registry():
        _loader.load()
    return registry
