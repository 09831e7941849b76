"""YAML for a reader: block style in the order given, with comments. PyYAML writes no comments, hence this."""

import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence

import yaml

Scalar = str | int | float | bool | None


class Comment(str):
    """A key of a mapping (its value is not written): lines of comment above the key that follows."""


Mapped = Mapping[str, "Node"]
Node = Scalar | Sequence["Node"] | Mapped
"""What is written. A list of scalars goes on one line where it is short; an empty mapping is ``{}``."""

_INLINE = 90
_WIDTH = 110
_STEP = "  "

_CHARACTER = r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff]"
_PLAIN_LINES = re.compile(rf"(?! ){_CHARACTER}+\n(?:{_CHARACTER}*\n)*(?! *\n){_CHARACTER}+\n")
"""Two or more lines of plain text, the first not indented and the last not blank: a file, written as it is."""


def write_yaml(document: Mapped) -> str:
    """The document as text, with a newline at its end; reading it again gives the same values."""
    return "\n".join(_mapping(document, "")) + "\n"


def comment_lines(text: str) -> str:
    """Lines of text as lines of comment, for the top of a file."""
    return "".join(f"# {line}".rstrip() + "\n" for line in text.splitlines())


def _wrapped(text: str, width: int) -> Iterator[str]:
    """Lines no longer than that; one that begins with a blank is kept as it is."""
    for line in text.splitlines():
        yield from [line] if line.startswith(" ") else textwrap.wrap(line, width, break_on_hyphens=False)


def _mapping(mapping: Mapped, indent: str) -> Iterator[str]:
    for key, value in mapping.items():
        if isinstance(key, Comment):
            yield from (f"{indent}# {line}" for line in _wrapped(key, _WIDTH - len(indent)))
        else:
            yield from _entry(f"{indent}{_scalar(key)}:", value, indent)


def _entry(head: str, value: Node, indent: str) -> Iterator[str]:
    short = _inline(value)
    if isinstance(value, str) and _PLAIN_LINES.fullmatch(value):
        yield f"{head} |"
        yield from (f"{indent}{_STEP}{line}" if line else "" for line in value[:-1].split("\n"))
    elif short is not None:
        yield f"{head} {short}"
    elif isinstance(value, Mapping):
        yield head
        yield from _mapping(value, indent + _STEP)
    else:
        assert isinstance(value, Sequence), value
        yield head
        yield from _sequence(value, indent + _STEP)


def _sequence(items: Sequence[Node], indent: str) -> Iterator[str]:
    for item in items:
        short = _inline(item)
        if short is not None:
            yield f"{indent}- {short}"
            continue
        assert isinstance(item, Mapping | Sequence), item
        inner = indent + _STEP
        lines = _mapping(item, inner) if isinstance(item, Mapping) else _sequence(item, inner)
        # The dash takes the place of the first line's indentation; a comment there stays above it.
        dashed = False
        for line in lines:
            if dashed:
                yield line
            elif line.lstrip().startswith("#"):
                yield indent + line.lstrip()
            else:
                yield f"{indent}- {line[len(inner) :]}"
                dashed = True


def _inline(value: Node) -> str | None:
    """The value on one line; None where it needs several."""
    if value is None or isinstance(value, str | int | float):
        return _scalar(value)
    if isinstance(value, Mapping):
        return "{}" if not value else None
    if all(item is None or isinstance(item, str | int | float) for item in value):
        text = yaml.safe_dump(list(value), default_flow_style=True, width=math.inf, allow_unicode=True).rstrip("\n")
        return text if len(text) <= _INLINE else None
    return None


def _scalar(value: Scalar) -> str:
    style = '"' if isinstance(value, str) and "\n" in value else None
    text = yaml.safe_dump(value, default_style=style, default_flow_style=True, width=math.inf, allow_unicode=True)
    # A scalar alone ends with the mark of a document's end.
    return text.removesuffix("...\n").rstrip("\n")
