"""What a part finds, and the document that all of it becomes."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

FORMAT = 1
"""Of the document; one of another number is refused."""

Status = Literal["passed", "failed", "crashed", "out of time", "left out", "not here"]
"""Of a part: "left out" for want of time, "not here" where the platform has nothing of the kind."""

WRONG: frozenset[Status] = frozenset({"failed", "crashed", "out of time"})


class NotHere(Exception):
    """A part that this platform has nothing for; the message says what is missing."""


@dataclass(frozen=True)
class Figure:
    """One measured figure.

    Attributes:
        what: of which shapes.
        value, unit: such as 3.1 and "TB/s".
        share: of ``ceiling``; None where there is none to compare with.
        ceiling: what the share is of, such as "copy ceiling".
    """

    what: str
    value: float
    unit: str
    share: float | None = None
    ceiling: str = ""


@dataclass(frozen=True)
class KernelOutcome:
    """What the numeric cases said of one kernel.

    Attributes:
        status: "right", "wrong", "crashed", "not verified" (no case fits it) or "not reached".
        error: the worst error as a share of its bound; None where none was found out.
        details: what is wrong, for people.
        record: what selection would keep of it; see tokenspeed_kernel.records.
    """

    kernel: str
    operation: str
    status: str
    cases: int = 0
    error: float | None = None
    details: tuple[str, ...] = ()
    record: dict[str, Any] | None = None


@dataclass
class PartResult:
    """What one part found.

    Attributes:
        name: of the part.
        status, reason: how it ended, and why where it did not pass.
        seconds: wall time.
        checks: what was found right, a line each.
        problems: what was not.
        figures: what was measured.
        kernels: of the numerics.
        ceilings: what the machine reaches at most, for the parts behind: "copy" bytes a second, "products" operations.
    """

    name: str
    status: Status = "passed"
    reason: str = ""
    seconds: float = 0.0
    checks: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    kernels: list[KernelOutcome] = field(default_factory=list)
    ceilings: dict[str, float] = field(default_factory=dict)

    def settle(self) -> "PartResult":
        """Makes a part that passed, but has problems or wrong kernels, a failed one; returns itself."""
        wrong = [kernel for kernel in self.kernels if kernel.status in ("wrong", "crashed", "not verified")]
        if self.status == "passed" and (self.problems or wrong):
            self.status = "failed"
            self.reason = self.problems[0] if self.problems else f"{wrong[0].kernel} is {wrong[0].status}"
        return self

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "PartResult":
        """What ``asdict`` made, read back."""
        values = dict(values)
        values["figures"] = [Figure(**figure) for figure in values["figures"]]
        values["kernels"] = [
            KernelOutcome(**{**kernel, "details": tuple(kernel["details"])}) for kernel in values["kernels"]
        ]
        return cls(**values)


@dataclass(frozen=True)
class Document:
    """All of one run.

    Attributes:
        date: when it ended, ISO 8601 in UTC.
        seconds: wall time of all of it; budget: what it was allowed.
        device: facts about the device and what drives it, by name.
        versions: of libraries and of this project, by name.
        parts: in the order they ran.
    """

    date: str
    seconds: float
    budget: float
    device: dict[str, str | int]
    versions: dict[str, str]
    parts: tuple[PartResult, ...]

    @property
    def exit_status(self) -> int:
        """Of the command; see the package's words."""
        if any(part.status in WRONG for part in self.parts):
            return 1
        if any(part.status == "left out" for part in self.parts):
            return 3
        return 0 if any(part.status == "passed" for part in self.parts) else 2

    def write(self, path: Path) -> None:
        """As JSON, replacing what was there."""
        path.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Document":
        """Raises ValueError, naming the file, for anything but a document of this format."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            found = values.pop("format")
            if found != FORMAT:
                raise ValueError(f"its format is {found}, this reads {FORMAT}: run scripts.device_check again")
            parts = tuple(PartResult.from_json(part) for part in values.pop("parts"))
            return cls(**values, parts=parts)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}: not a device check: {error}") from error
