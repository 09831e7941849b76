"""Requests whose constraint is being compiled: not submitted to the scheduler yet, and in nobody's way."""

from typing import Protocol

from tokenspeed.device.handle import Grammar
from tokenspeed.messages import Constraint, ConstraintError, Submit


class Compilation(Protocol):
    """A constraint on its way."""

    def outcome(self) -> Grammar | ConstraintError | None:
        """The grammar, or why there is none; None while it is being compiled. Never blocks."""
        ...

    def cancel(self) -> None:
        """The request is gone."""
        ...


class GrammarCompiler(Protocol):
    """Compiles off the loop's thread; see tokenspeed.grammar.pool."""

    def compile(self, constraint: Constraint) -> Compilation:
        """Begins; never blocks. Raises ConstraintError where it cannot."""
        ...


class HeldRequests:
    """Holds what waits for its grammar. ``compiler`` None refuses every constraint."""

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._waiting: dict[int, tuple[Submit, Compilation]] = {}
        self._refused: list[tuple[Submit, ConstraintError]] = []

    def __len__(self) -> int:
        return len(self._waiting) + len(self._refused)

    def hold(self, submit: Submit) -> bool:
        """Takes a request that has a constraint, and begins to compile it; False where it has none."""
        if submit.constraint is None:
            return False
        try:
            if self._compiler is None:
                raise ConstraintError("structured output is off (api.structured_output)", "constraint_unavailable")
            self._waiting[submit.handle] = (submit, self._compiler.compile(submit.constraint))
        except ConstraintError as error:
            self._refused.append((submit, error))
        return True

    def drop(self, handle: int) -> bool:
        """Lets go of a request whose client left; False where it is not held."""
        found = self._waiting.pop(handle, None)
        if found is not None:
            found[1].cancel()
        return found is not None

    def released(self) -> list[tuple[Submit, Grammar | ConstraintError]]:
        """The requests that wait no longer, in the order they came, each with its grammar or why there is none."""
        ready: list[tuple[Submit, Grammar | ConstraintError]] = list(self._refused)
        self._refused = []
        for handle, (submit, compilation) in list(self._waiting.items()):
            outcome = compilation.outcome()
            if outcome is not None:
                del self._waiting[handle]
                ready.append((submit, outcome))
        return ready
