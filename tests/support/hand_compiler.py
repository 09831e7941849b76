"""Constraints that are compiled when a test says so."""

from dataclasses import dataclass, field

from tokenspeed.device.handle import Grammar, TokenMatcher
from tokenspeed.messages import Constraint, ConstraintError, Rule


@dataclass
class MarkedGrammar(Grammar):
    """Says what it was compiled from; the token device knows no matchers."""

    constraint: Constraint

    def matcher(self) -> TokenMatcher:
        raise NotImplementedError


@dataclass
class Waiting:
    """A compilation that ends when the test says so."""

    constraint: Constraint
    found: Grammar | ConstraintError | None = None
    cancelled: bool = False

    def outcome(self) -> Grammar | ConstraintError | None:
        return self.found

    def cancel(self) -> None:
        self.cancelled = True

    def end(self) -> None:
        self.found = MarkedGrammar(self.constraint)


@dataclass
class HandCompiler:
    """Compiles by hand. A text "busy" is refused at once."""

    begun: list[Waiting] = field(default_factory=list)

    def compile(self, *rules: Rule) -> Waiting:
        (constraint,) = rules
        assert isinstance(constraint, Constraint)
        if constraint.text == "busy":
            raise ConstraintError("later", "constraint_busy")
        self.begun.append(Waiting(constraint))
        return self.begun[-1]


REGEX = Constraint(kind="regex", text="a+")
