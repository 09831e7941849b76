"""A user without a passwd entry and without HOME, as containers have: what looks for a home folder still finds one."""

import os
import pwd
import tempfile
from pathlib import Path

UMASK_VARIABLE = "TOKENSPEED_UMASK"
"""Octal, as the shell's umask. The images say 002, so that what one uid puts into a cache volume another may change."""


def settle_umask() -> None:
    """Applies TOKENSPEED_UMASK where it is set and is one; what it is not is left to the system."""
    text = os.environ.get(UMASK_VARIABLE, "")
    if text and len(text) <= 4 and set(text) <= set("01234567"):
        os.umask(int(text, 8))


def settle_home() -> None:
    """Sets HOME and USER where nothing says them: a folder of this user's own in the temporary one, and the uid.

    Libraries that the engine loads ask for both, and fail or write to a folder called "~" where there are none.
    """
    uid = os.getuid()
    try:
        pwd.getpwuid(uid)
        return
    except KeyError:
        pass
    os.environ.setdefault("USER", str(uid))
    if os.environ.get("HOME"):
        return
    home = Path(tempfile.gettempdir()) / f"tokenspeed-{uid}"
    try:
        home.mkdir(mode=0o700, exist_ok=True)
        own = home.stat().st_uid == uid and not home.is_symlink()
    except OSError:
        own = False
    os.environ["HOME"] = str(home) if own else tempfile.mkdtemp(prefix="tokenspeed-")
