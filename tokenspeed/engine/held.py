"""Requests whose rules are being compiled: not submitted to the scheduler yet, and in nobody's way."""

from dataclasses import dataclass
from typing import Protocol

from tokenspeed.device.handle import Grammar
from tokenspeed.messages import ConstraintError, Rule, Submit


class Compilation(Protocol):
    """The rules of a request on their way."""

    def outcome(self) -> Grammar | ConstraintError | None:
        """The grammar, or why there is none; None while it is being compiled. Never blocks."""
        ...

    def cancel(self) -> None:
        """The request is gone."""
        ...


class GrammarCompiler(Protocol):
    """Compiles off the loop's thread; see tokenspeed.grammar.pool."""

    def compile(self, *rules: Rule) -> Compilation:
        """Begins with all the rules of a request, which make one grammar; never blocks.

        Raises ConstraintError where it cannot.
        """
        ...


@dataclass(frozen=True)
class HeldRequest:
    """One that waits, and since when (seconds since the epoch)."""

    submit: Submit
    compilation: Compilation
    arrived: float


class HeldRequests:
    """Holds what waits for its grammar. ``compiler`` None refuses every rule."""

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._waiting: dict[int, HeldRequest] = {}
        self._refused: list[tuple[Submit, ConstraintError]] = []

    def __len__(self) -> int:
        return len(self._waiting) + len(self._refused)

    def waiting(self) -> list[HeldRequest]:
        """Those whose rules are being compiled, in the order they came."""
        return list(self._waiting.values())

    def hold(self, submit: Submit, now: float) -> bool:
        """Takes a request that has rules, and begins to compile them; False where it has none. ``now`` in seconds since
        the epoch."""
        rules = submit.rules
        if not rules:
            return False
        try:
            if self._compiler is None:
                raise ConstraintError("this engine compiles no constraints", "constraint_unavailable")
            self._waiting[submit.handle] = HeldRequest(submit, self._compiler.compile(*rules), now)
        except ConstraintError as error:
            self._refused.append((submit, error))
        return True

    def drop(self, handle: int) -> bool:
        """Lets go of a request whose client left; False where it is not held."""
        found = self._waiting.pop(handle, None)
        if found is not None:
            found.compilation.cancel()
        return found is not None

    def released(self) -> list[tuple[Submit, Grammar | ConstraintError]]:
        """The requests that wait no longer, in the order they came, each with its grammar or why there is none."""
        ready: list[tuple[Submit, Grammar | ConstraintError]] = list(self._refused)
        self._refused = []
        for handle, held in list(self._waiting.items()):
            outcome = held.compilation.outcome()
            if outcome is not None:
                del self._waiting[handle]
                ready.append((held.submit, outcome))
        return ready
