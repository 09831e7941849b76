"""Hardware of vendors that the core does not know: whose platform it is, and what is wrong with one, by name."""

import importlib
import sys
import zipfile
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from tokenspeed_kernel import kernel_identity
from tokenspeed_kernel import platform as platforms
from tokenspeed_kernel.platform import PlatformError, PlatformInfo, current_platform, known_kinds
from tokenspeed_kernel.plugins import GROUP, PATH_VARIABLE, PluginError, find_plugins, load_into, plugins_at
from tokenspeed_kernel.plugins.discovery import PLATFORMS_GROUP, FoundPlugin
from tokenspeed_kernel.registry import KernelRegistry, RegistrationError, use_registry
from tokenspeed_kernel.vendor_platforms import VendorPlatform, claimed, kinds_of_devices


def info(vendor: str) -> PlatformInfo:
    return PlatformInfo(vendor=vendor, machine="x86_64", isa="a1", cores=2, memory_bytes=1 << 30)


def platform(vendor: str, kind: str = "cpu", found: bool = True) -> VendorPlatform:
    return VendorPlatform(vendor=vendor, kind=kind, detect=lambda: info(vendor) if found else None)


def with_platforms(*platforms: VendorPlatform) -> KernelRegistry:
    registry = KernelRegistry()
    for one in platforms:
        registry.add_platform(one)
    return registry


def test_a_vendor_whose_hardware_is_here_is_the_platform_and_one_whose_is_not_changes_nothing():
    before = current_platform()
    with use_registry(with_platforms(platform("acme"), platform("zeta", found=False))):
        assert current_platform() == info("acme") and current_platform().key == "acme-a1"
    with use_registry(with_platforms(platform("zeta", found=False))):
        assert current_platform() == before
    assert current_platform() == before


def test_devices_of_a_kind_of_its_own_count_where_nobody_said_what_to_compute_on(monkeypatch):
    monkeypatch.setattr(platforms, "_is_selected", False)  # by an engine in this process
    with use_registry(with_platforms(platform("acme", kind="acmechip"))):
        assert current_platform().vendor == "acme"
        assert known_kinds() == ("cpu", "cuda", "npu", "acmechip")
        monkeypatch.setenv("TOKENSPEED_KERNEL_DEVICE", "cpu")
        assert current_platform().vendor == "cpu"


def test_two_that_claim_the_same_devices_are_refused_by_name():
    with pytest.raises(PlatformError, match="acme and zeta both say that this machine's devices are theirs"):
        claimed([platform("zeta"), platform("acme")], "cpu")
    assert claimed([platform("zeta", kind="zetachip"), platform("acme")], "cpu") == info("acme")
    assert kinds_of_devices([platform("zeta", kind="zetachip")])[-1] == "zetachip"


@pytest.mark.parametrize(
    ("vendor", "kind", "says"),
    [
        ("nvidia", "cpu", "vendor 'nvidia' is known already"),
        ("Acme", "cpu", "vendor 'Acme' of a platform must be a lower-case word"),
        ("acme", "acme:0", "kind 'acme:0' of a platform must be a lower-case word"),
    ],
)
def test_names_that_cannot_be(vendor, kind, says):
    with pytest.raises(PlatformError, match=says):
        platform(vendor, kind)


def test_a_name_is_taken_once_and_a_registry_that_is_copied_keeps_what_it_has():
    registry = with_platforms(platform("acme"))
    with pytest.raises(RegistrationError, match="platform name 'acme' is taken"):
        registry.add_platform(platform("acme"))
    twin = registry.copy()
    twin.add_platform(platform("zeta"))
    assert [one.vendor for one in registry.platforms()] == ["acme"]
    registry.adopt(twin)
    assert [one.vendor for one in registry.platforms()] == ["acme", "zeta"]


def broken() -> PlatformInfo:
    raise OSError("the driver hangs")


BROKEN = VendorPlatform(vendor="acme", kind="cpu", detect=broken)
ANOTHERS = VendorPlatform(vendor="acme", kind="cpu", detect=lambda: info("zeta"))
NO_PLATFORM = "a string"
SOUND = platform("acme")


def nothing() -> None:
    """A plugin without kernels."""


def refuses() -> None:
    raise ImportError("no compiler")


def point(name: str, group: str = PLATFORMS_GROUP) -> FoundPlugin:
    return FoundPlugin(EntryPoint("acme", f"{__name__}:{name}", group), "acme-chip 1")


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or importlib.import_module(__name__))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("BROKEN", "cannot say whether it is here: OSError\\('the driver hangs'\\)"),
        ("ANOTHERS", "platform 'acme' found hardware of 'zeta'"),
        ("NO_PLATFORM", "must be a VendorPlatform\\(vendor='acme'"),
    ],
)
def test_a_broken_platform_stops_the_start_by_name_and_leaves_nothing(name, says):
    registry = KernelRegistry()
    with pytest.raises(PluginError, match=f"kernel plugin 'acme' \\(from acme-chip 1\\) failed to load: .*{says}"):
        load_into(registry, [point(name)])
    assert registry.platforms() == []


def test_the_platform_of_an_optional_plugin_goes_with_it(monkeypatch):
    monkeypatch.setenv("TOKENSPEED_KERNEL_OPTIONAL_PLUGINS", "acme")
    registry = KernelRegistry()
    (outcome,) = load_into(registry, [point("SOUND"), point("refuses", GROUP)])
    assert outcome.name == "acme" and "no compiler" in str(outcome.error)
    assert registry.platforms() == []
    (outcome,) = load_into(registry, [point("SOUND"), point("nothing", GROUP)])
    assert outcome.error is None and registry.platforms() == [SOUND]


def make_wheel(place: Path, content: str = "def register():\n    pass\n") -> Path:
    wheel = place / "acme_wheel-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("acme_wheel/__init__.py", content)
        archive.writestr("acme_wheel-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: acme-wheel\nVersion: 1\n")
        archive.writestr("acme_wheel-1.dist-info/entry_points.txt", f"[{GROUP}]\nacme = acme_wheel:register\n")
    return wheel


def test_a_wheel_on_the_plugin_path_is_found_once_also_where_it_is_on_sys_path_already(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    wheel = str(make_wheel(tmp_path))
    monkeypatch.setenv(PATH_VARIABLE, wheel)
    plugins_at(wheel)  # as --register does, before all plugins are looked for
    assert [plugin.origin for plugin in find_plugins() if plugin.name == "acme"] == [wheel]


def test_a_change_of_bytecode_or_of_a_wheel_changes_the_digest(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(make_wheel(tmp_path))])
    monkeypatch.delitem(sys.modules, "acme_wheel", raising=False)
    importlib.import_module("acme_wheel")
    first = kernel_identity.package_digest("acme_wheel")
    make_wheel(tmp_path, "changed = 1\n")
    kernel_identity.package_digest.cache_clear()
    assert kernel_identity.package_digest("acme_wheel") != first
    folder = tmp_path / "acme_bytecode"
    folder.mkdir()
    (folder / "__init__.pyc").write_bytes(b"one")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "kernels.cpython-311.pyc").write_bytes(b"a cache of a source")
    assert kernel_identity._code_at(folder) == [folder / "__init__.pyc"]
