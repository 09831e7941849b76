"""Traits: the facts of a call that formats do not say (head_dim, causal, …), as declared vocabularies.

An operation declares the traits it knows. A spec bounds them, a request gives their values. A name that is not in the
vocabulary is an error in both: a misspelt trait never passes. A trait a spec does not bound admits its declared
default only, so a vocabulary can grow without old kernels being chosen for what they never heard of.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

TraitValue: TypeAlias = int | bool | str


class TraitError(ValueError):
    """A trait that the operation does not declare, or a bound or value of the wrong kind."""


@dataclass(frozen=True)
class OneOf:
    """The value is one of these."""

    values: frozenset[TraitValue]

    def __post_init__(self) -> None:
        if not isinstance(self.values, frozenset) or not self.values:
            raise TraitError(f"OneOf takes a non-empty frozenset of values, got {self.values!r}; use one_of(...)")

    def admits(self, value: TraitValue) -> bool:
        return value in self.values

    def __str__(self) -> str:
        return "one of " + ", ".join(sorted(map(str, self.values)))


@dataclass(frozen=True)
class Range:
    """minimum <= value <= maximum; None leaves the end open."""

    minimum: int
    maximum: int | None = None

    def __post_init__(self) -> None:
        if self.maximum is not None and self.maximum < self.minimum:
            raise TraitError(f"Range({self.minimum}, {self.maximum}) is empty; swap its ends")

    def admits(self, value: TraitValue) -> bool:
        return isinstance(value, int) and value >= self.minimum and (self.maximum is None or value <= self.maximum)

    def __str__(self) -> str:
        return f"at least {self.minimum}" if self.maximum is None else f"{self.minimum} to {self.maximum}"


@dataclass(frozen=True)
class MultipleOf:
    """The value is a positive multiple of ``divisor``, and no larger than ``maximum`` where one is given."""

    divisor: int
    maximum: int | None = None

    def __post_init__(self) -> None:
        if self.divisor < 1:
            raise TraitError(f"MultipleOf({self.divisor}): the divisor must be at least 1")
        if self.maximum is not None and self.maximum < self.divisor:
            raise TraitError(f"MultipleOf({self.divisor}, {self.maximum}) is empty; the maximum is below the divisor")

    def admits(self, value: TraitValue) -> bool:
        fits = isinstance(value, int) and value > 0 and value % self.divisor == 0
        return fits and (self.maximum is None or int(value) <= self.maximum)

    def __str__(self) -> str:
        return f"a multiple of {self.divisor}" + ("" if self.maximum is None else f" up to {self.maximum}")


TraitBound: TypeAlias = OneOf | Range | MultipleOf


def one_of(*values: TraitValue) -> OneOf:
    """``OneOf`` of these values."""
    return OneOf(frozenset(values))


@dataclass(frozen=True)
class TraitDeclaration:
    """One trait of an operation's vocabulary.

    Attributes:
        kinds: the kinds of bound that make sense for it.
        type: int, bool or str; a request's value has exactly this type.
        meaning: one line, with its unit.
        example: a usual value; ``explain`` uses it where the caller gives none.
        default: the value a request means when it leaves the trait out, and the only one a spec admits that does not
            bound it. None: there is no default; every spec and every request must say it.
    """

    kinds: tuple[type[TraitBound], ...]
    type: type
    meaning: str
    example: TraitValue
    default: TraitValue | None = None


Vocabulary: TypeAlias = Mapping[str, TraitDeclaration]


def size_trait(meaning: str, example: int) -> TraitDeclaration:
    """A positive integer that may be bounded by any kind."""
    return TraitDeclaration((OneOf, Range, MultipleOf), int, meaning, example)


def flag_trait(meaning: str, example: bool, default: bool | None = None) -> TraitDeclaration:
    """A yes or no."""
    return TraitDeclaration((OneOf,), bool, meaning, example, default)


def _known(operation: str, name: str, vocabulary: Vocabulary) -> TraitDeclaration:
    declaration = vocabulary.get(name)
    if declaration is None:
        raise TraitError(f"{operation} has no trait {name!r}; it declares {sorted(vocabulary) or 'none'}")
    return declaration


def check_bounds(operation: str, bounds: Mapping[str, TraitBound], vocabulary: Vocabulary) -> None:
    """Raises TraitError unless ``bounds`` fit the vocabulary and leave out only traits that have a default."""
    for name, bound in bounds.items():
        declaration = _known(operation, name, vocabulary)
        if not isinstance(bound, declaration.kinds):
            kinds = " or ".join(kind.__name__ for kind in declaration.kinds)
            raise TraitError(f"trait {name!r} of {operation} is bounded by {kinds}, not by {bound!r}")
        if isinstance(bound, OneOf):
            wrong = [value for value in bound.values if type(value) is not declaration.type]
            if wrong:
                raise TraitError(f"trait {name!r} of {operation} is {declaration.type.__name__}, got {wrong[0]!r}")
    missing = sorted(n for n, d in vocabulary.items() if n not in bounds and d.default is None)
    if missing:
        raise TraitError(f"a kernel of {operation} must bound trait {missing[0]!r} ({vocabulary[missing[0]].meaning})")


def complete_request(
    operation: str, request: Mapping[str, TraitValue], vocabulary: Vocabulary
) -> dict[str, TraitValue]:
    """The request with defaults filled in. Raises TraitError for an unknown, missing or wrongly typed trait."""
    complete: dict[str, TraitValue] = {}
    for name, value in request.items():
        declaration = _known(operation, name, vocabulary)
        if type(value) is not declaration.type:
            raise TraitError(f"trait {name!r} of {operation} is {declaration.type.__name__}, got {value!r}")
        complete[name] = value
    for name, declaration in vocabulary.items():
        if name in complete:
            continue
        if declaration.default is None:
            raise TraitError(f"a request for {operation} must give trait {name!r} ({declaration.meaning})")
        complete[name] = declaration.default
    return complete


def refusal(bounds: Mapping[str, TraitBound], request: Mapping[str, TraitValue], vocabulary: Vocabulary) -> str | None:
    """Why ``bounds`` do not admit a complete ``request``, or None where they do."""
    for name in sorted(request):
        value, bound = request[name], bounds.get(name)
        if bound is None and value != vocabulary[name].default:
            return f"{name} is {value}; this kernel does not bound {name}, so it takes {vocabulary[name].default} only"
        if bound is not None and not bound.admits(value):
            return f"{name} is {value}; it must be {bound}"
    return None
