"""The version that runs."""

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "tokenspeed-appliance"


def own_version() -> str:
    """Returns the version of this distribution; "unknown" where it runs without being installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"
