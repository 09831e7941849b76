"""Typed access to what a checkpoint says, with errors that name the file and the key."""

from collections.abc import Mapping
from typing import Any

from tokenspeed.recipes.checkpoint_error import CheckpointError


class Fields:
    """A mapping that came from a file.

    Attributes:
        where: the file, and the place in it, for messages.
        values: as they were read.
    """

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where = where
        self.values = values

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {key} should be an integer, it is {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {key} should be a number, it is {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {key} should be true or false, it is {value!r}")
        return value

    def words(self, key: str, count: int) -> list[str] | None:
        """A list of ``count`` strings, one for each layer; None where the key is not there."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value) or len(value) != count:
            held = f"holds {len(value)} entries" if isinstance(value, list) else f"is {value!r}"
            raise CheckpointError(f"{self.where}: {key} {held}; it has one string for each of the {count} layers")
        return value

    def part(self, key: str) -> "Fields":
        """The mapping under ``key``; CheckpointError where there is none."""
        value = self.values.get(key)
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{self.where}: {key} should be an object, it is {value!r}")
        return Fields(f"{self.where}: {key}", value)

    def refuse_unless(self, key: str, accepted: tuple[object, ...]) -> None:
        """Raises where ``key`` is present with a value this engine would have to ignore."""
        value = self.values.get(key)
        if value is not None and value not in accepted:
            raise CheckpointError(f"{self.where}: {key} is {value!r}, supported is {' or '.join(map(repr, accepted))}")


def ids(*values: object) -> tuple[int, ...]:
    """Flattens ids and lists of ids to unique ids in order; None is nothing."""
    found: dict[int, None] = {}
    for value in values:
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, int) and not isinstance(item, bool):
                found[item] = None
    return tuple(found)


def first_id(value: object) -> int | None:
    """The first of them, if there is one."""
    found = ids(value)
    return found[0] if found else None
