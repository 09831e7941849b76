"""Hardware that this package does not know: how a vendor's package says that it is here.

An entry point of the group ``tokenspeed_kernel.platforms`` is a ``VendorPlatform``. All of them are known before the
first kernel is registered, so that whatever a plugin ships is looked up under the right platform. docs/add-a-vendor.md
is the whole way.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from tokenspeed_kernel.platform import DEVICES, PlatformError, PlatformInfo

KNOWN_VENDORS = frozenset({"cpu", "nvidia", "amd", "npu"})


@dataclass(frozen=True, kw_only=True)
class VendorPlatform:
    """A vendor's hardware.

    Attributes:
        vendor: what ``CapabilityRequirement.vendors`` and keys of measurements call it; also the name of its entry
            point.
        kind: what PyTorch calls its devices, as in ``torch.device(kind, 0)``: a backend of the vendor's own, or one
            that there is, "cpu" for hardware that computes on the host's memory.
        detect: the platform, its ``vendor`` the same, or None where there is no such device here. Asked once a process.
    """

    vendor: str
    kind: str
    detect: Callable[[], PlatformInfo | None]

    def __post_init__(self) -> None:
        for label, value in (("vendor", self.vendor), ("kind", self.kind)):
            if not value.isidentifier() or value != value.lower():
                raise PlatformError(f"{label} {value!r} of a platform must be a lower-case word")
        if self.vendor in KNOWN_VENDORS:
            raise PlatformError(f"vendor {self.vendor!r} is known already; give yours a name of its own")


@cache
def detected(platform: VendorPlatform) -> PlatformInfo | None:
    """What ``platform`` finds. Raises PlatformError where that is another vendor's, or where it raises itself."""
    try:
        found = platform.detect()
    except Exception as error:
        raise PlatformError(f"platform {platform.vendor!r} cannot say whether it is here: {error!r}") from error
    if found is not None and found.vendor != platform.vendor:
        raise PlatformError(f"platform {platform.vendor!r} found hardware of {found.vendor!r}; both must be the same")
    return found


def claimed(platforms: Iterable[VendorPlatform], kind: str | None) -> PlatformInfo | None:
    """The platform that devices of ``kind``, of any where it is None, are; None where no vendor says so. Raises
    PlatformError where two do."""
    asked = [platform for platform in platforms if kind in (None, platform.kind)]
    found = [info for platform in asked if (info := detected(platform)) is not None]
    if len(found) > 1:
        names = " and ".join(sorted(info.vendor for info in found))
        raise PlatformError(f"{names} both say that this machine's devices are theirs; uninstall one")
    return found[0] if found else None


def kinds_of_devices(platforms: Iterable[VendorPlatform]) -> tuple[str, ...]:
    """The kinds that there may be: those that this package knows, then vendors' own."""
    return tuple(dict.fromkeys((*DEVICES, *(platform.kind for platform in platforms))))
