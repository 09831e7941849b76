"""Where downloads, records and measurements are kept."""

import os
from pathlib import Path

CACHE_VARIABLE = "TOKENSPEED_CACHE"


def cache_directory() -> Path:
    """Where downloads are kept: TOKENSPEED_CACHE, else the user's cache directory."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("tokenspeed"))
