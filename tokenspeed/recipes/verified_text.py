"""Writes a ``verified`` section into a recipe's file: text is inserted, so every comment stays where it is."""

import re
from pathlib import Path
from typing import Any

import yaml

from tokenspeed.recipes.catalogue import load_recipe
from tokenspeed.recipes.document import RecipeError


def write_verified(path: Path, profile: str, section: dict[str, Any]) -> None:
    """Puts ``section`` in place of the profile's ``verified``, or behind its last key, and checks the result.

    The file is as it was where the result would be no right recipe. Raises RecipeError.
    """
    before = path.read_text("utf-8")
    path.write_text(with_verified(before, path, profile, section), "utf-8")
    try:
        load_recipe(path)
    except RecipeError:
        path.write_text(before, "utf-8")
        raise


def with_verified(text: str, path: Path, profile: str, section: dict[str, Any]) -> str:
    """The recipe's text with the section; raises RecipeError where the profile is not written as a block in it."""
    node = _profile_node(text, path, profile)
    lines = text.splitlines()
    indent = node.value[0][0].start_mark.column
    block = _block(section, indent)
    for key, value in node.value:
        if key.value == "verified":
            first, last = key.start_mark.line, _last_line(value)
            return "\n".join([*lines[:first], *block, *lines[last + 1 :]]) + "\n"
    end = _last_line(node.value[-1][1])
    return "\n".join([*lines[: end + 1], *block, *lines[end + 1 :]]) + "\n"


def _profile_node(text: str, path: Path, profile: str) -> yaml.MappingNode:
    node: Any = yaml.compose(text, yaml.SafeLoader)
    for name in ("profiles", profile):
        pairs = {key.value: value for key, value in node.value} if isinstance(node, yaml.MappingNode) else {}
        if name not in pairs:
            raise RecipeError(
                f"{path}: profile {profile} is not written in this file, so its verified section cannot be"
            )
        node = pairs[name]
    if not isinstance(node, yaml.MappingNode) or node.flow_style or not node.value:
        line = node.start_mark.line + 1
        raise RecipeError(f"{path}:{line}: profile {profile} is written in braces; give each of its keys a line")
    return node


def _last_line(node: yaml.Node) -> int:
    """The line that a value ends on. A block ends with its last part: its own mark is where the next thing begins."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style and node.value:
        return _last_line(node.value[-1][1])
    if isinstance(node, yaml.SequenceNode) and not node.flow_style and node.value:
        return _last_line(node.value[-1])
    end = node.end_mark
    # Text in block style ends where the next line begins.
    return int(end.line - 1 if end.column == 0 and end.line > node.start_mark.line else end.line)


def _block(section: dict[str, Any], indent: int) -> list[str]:
    text = yaml.safe_dump({"verified": section}, sort_keys=False, allow_unicode=True, width=10_000)
    # A date in quotes stays text for every reader of YAML.
    return [" " * indent + re.sub(r"^(  date: )'?(\d{4}-\d\d-\d\d)'?$", r'\1"\2"', line) for line in text.splitlines()]
