"""What ``doctor`` finds: one thing looked at, and the line that mends it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Attributes:
        level: "fail" keeps a model from running, "warn" costs something, "ok" is well.
        what: that was looked at, and the figures.
        mend: the line that helps; "" where all is well.
    """

    level: Literal["ok", "warn", "fail"]
    what: str
    mend: str = ""
