"""Requests whose rules are being compiled: not submitted to the scheduler yet, and in nobody's way."""

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


class HeldRequests:
    """Holds what waits for its grammar. ``compiler`` None refuses every rule."""

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._waiting: dict[int, tuple[Submit, Compilation]] = {}
        self._refused: list[tuple[Submit, ConstraintError]] = []

    def __len__(self) -> int:
        return len(self._waiting) + len(self._refused)

    def hold(self, submit: Submit) -> bool:
        """Takes a request that has rules, and begins to compile them; False where it has none."""
        rules = submit.rules
        if not rules:
            return False
        try:
            if self._compiler is None:
                raise ConstraintError("this engine compiles no constraints", "constraint_unavailable")
            self._waiting[submit.handle] = (submit, self._compiler.compile(*rules))
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
