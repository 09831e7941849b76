"""YAML with positions: plain data, and beside it the place in the file where every key and value stands.

pyyaml's own loader forgets positions and lets a later duplicate key win in silence; a recipe is edited by hand, so both
matter. Anchors and aliases work; merge keys (``<<``) do not, ``extends`` is the one way to inherit.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import yaml

KeyPath = tuple[str | int, ...]
Value: TypeAlias = "bool | int | float | str | list[Value] | dict[str, Value] | None"


@dataclass(frozen=True)
class Place:
    """Where something was said: a line of a file, or with line 0 a flag or a variable (``--port``)."""

    origin: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.origin}:{self.line}:{self.column}" if self.line else self.origin

    @property
    def short(self) -> str:
        """The file's last part and the line: what the resolved configuration prints."""
        return f"{Path(self.origin).name}:{self.line}" if self.line else self.origin


class RecipeError(ValueError):
    """Something an operator wrote cannot be used. One line a problem; each names the place and what mends it."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass
class Document:
    """A mapping with the place of every key.

    Attributes:
        data: the mapping.
        places: path of keys and list indices to where it stands; the empty path is the document itself.
    """

    data: dict[str, Value]
    places: dict[KeyPath, Place] = field(default_factory=dict)

    def place(self, path: KeyPath) -> Place:
        """The place of ``path``, or of the nearest thing around it that has one."""
        for length in range(len(path), -1, -1):
            found = self.places.get(path[:length])
            if found is not None:
                return found
        return Place("(unknown)")

    def part(self, *path: str) -> "Document":
        """The mapping at ``path`` as a document of its own; an empty one where there is none or it is null."""
        found: Value = self.data
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        depth = len(path)
        places = {where[depth:]: place for where, place in self.places.items() if where[:depth] == path}
        return Document(found if isinstance(found, dict) else {}, places)

    def leaves(self, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Value]]:
        """Every value that is no mapping, with its path."""
        yield from _leaves(self.data, path)


def _leaves(value: Value, path: KeyPath) -> Iterator[tuple[KeyPath, Value]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    elif path and value != {}:
        yield path, value


def read_document(path: Path) -> Document:
    """Reads one YAML file; raises RecipeError with file, line and column where it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read: {error}") from error
    return parse_document(text, str(path))


def parse_document(text: str, origin: str) -> Document:
    """Parses YAML text whose outermost value is a mapping; ``origin`` names it in places and errors."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(origin, mark.line + 1, mark.column + 1) if mark else Place(origin)
        raise RecipeError(f"{place}: this is no valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise RecipeError(f"{origin}: this is no valid YAML: {error}") from error
    if not isinstance(node, yaml.MappingNode):
        raise RecipeError(f"{Place(origin, 1, 1)}: expected keys and values (name: ...), found something else")
    places: dict[KeyPath, Place] = {(): Place(origin, 1, 1)}
    data = _construct(node, (), origin, places)
    assert isinstance(data, dict)
    return Document(data, places)


def parse_scalar(text: str, origin: str) -> Value:
    """Reads one value as YAML does (``8``, ``true``, ``[1, 2]``, ``text``), for flags and ``SET``."""
    return parse_document(f"value: {text}" if text else "value:", origin).data["value"]


def _construct(node: yaml.Node, path: KeyPath, origin: str, places: dict[KeyPath, Place]) -> Value:
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Value] = {}
        for key_node, value_node in node.value:
            place = Place(origin, key_node.start_mark.line + 1, key_node.start_mark.column + 1)
            key = _key(key_node, place)
            if key in mapping:
                raise RecipeError(f"{place}: the key {key!r} stands twice; the first is at {places[(*path, key)]}")
            places[(*path, key)] = place
            mapping[key] = _construct(value_node, (*path, key), origin, places)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        items: list[Value] = []
        for index, item in enumerate(node.value):
            places[(*path, index)] = Place(origin, item.start_mark.line + 1, item.start_mark.column + 1)
            items.append(_construct(item, (*path, index), origin, places))
        return items
    place = Place(origin, node.start_mark.line + 1, node.start_mark.column + 1)
    return _scalar(node, place)


def _key(node: yaml.Node, place: Place) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise RecipeError(f"{place}: a key must be a word")
    if node.tag == "tag:yaml.org,2002:merge":
        raise RecipeError(f"{place}: merge keys (<<) are not read; use extends")
    return str(node.value)


def _scalar(node: yaml.Node, place: Place) -> Value:
    constructor = yaml.constructor.SafeConstructor()
    try:
        value = constructor.construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError) as error:
        raise RecipeError(f"{place}: {str(node.value)!r} cannot be read: {error}") from error
    if value is None or isinstance(value, bool | int | float | str):
        return value
    # Dates and binary data have no use in a recipe; what was written is what was meant.
    return str(node.value)


def merge(base: Document, over: Document) -> Document:
    """Returns ``base`` with ``over`` laid on it: mappings merge, everything else (lists and null too) replaces.

    A null stays one, so that it takes away what a layer further below says too; ``without_nulls`` ends the stack. The
    places follow the values, so that an error in an inherited value names the file where it stands.
    """
    places = {path: place for path, place in base.places.items() if not path}
    data = _merge(base.data, over.data, (), base.places, over.places, places)
    return Document(data, {**places, (): over.place(())})


def without_nulls(document: Document) -> Document:
    """The document without its nulls: a key without a value says nothing."""
    return Document(_pruned(document.data), document.places)


def _pruned(mapping: Mapping[str, Value]) -> dict[str, Value]:
    return {
        key: _pruned(value) if isinstance(value, dict) else value for key, value in mapping.items() if value is not None
    }


def _merge(
    base: Mapping[str, Value],
    over: Mapping[str, Value],
    path: KeyPath,
    base_places: Mapping[KeyPath, Place],
    over_places: Mapping[KeyPath, Place],
    places: dict[KeyPath, Place],
) -> dict[str, Value]:
    merged: dict[str, Value] = {}
    for key in [*base, *(key for key in over if key not in base)]:
        where = (*path, key)
        low, high = base.get(key), over.get(key)
        if key in over and isinstance(high, dict):
            places[where] = over_places.get(where, Place("(unknown)"))
            merged[key] = _merge(low if isinstance(low, dict) else {}, high, where, base_places, over_places, places)
        else:
            source = over_places if key in over else base_places
            merged[key] = high if key in over else low
            _copy_places(source, where, places)
    return merged


def _copy_places(source: Mapping[KeyPath, Place], where: KeyPath, places: dict[KeyPath, Place]) -> None:
    for path, place in source.items():
        if path[: len(where)] == where:
            places[path] = place
