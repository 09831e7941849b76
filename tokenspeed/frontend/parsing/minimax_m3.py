"""Calls of MiniMax-M3: tags that are named for the parameters, each behind a token of its own.

    ]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="weather">]<]minimax[>[<city>Köln]<]minimax[>[</city>
    ]<]minimax[>[<days>2]<]minimax[>[</days>
    ]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>

Source: the chat template of MiniMaxAI/MiniMax-M3 as public readers of it describe it. Objects are tags in tags, lists
are tags named ``item``; values have the types that the tool declares. Under a constraint, objects and lists are JSON.
"""

import re
from collections.abc import Mapping
from typing import Any

from tokenspeed.frontend.parsing.out import Out
from tokenspeed.frontend.parsing.reader import Reader, Steps
from tokenspeed.frontend.parsing.typed import Tools, TypedArguments, as_json, converted, types_of, value_through

_TOKEN = "]<]minimax[>["
_CALLS, _CALLS_END = f"{_TOKEN}<tool_call>", f"{_TOKEN}</tool_call>"
_INVOKE, _INVOKE_END = f"{_TOKEN}<invoke", f"{_TOKEN}</invoke>"
_TAG, _END_TAG = f"{_TOKEN}<", f"{_TOKEN}</"
_NAME = re.compile(r'\bname="([^"]+)"')
_MAX_DEPTH = 32

MARKERS = (_TOKEN,)


def grammar(reader: Reader, out: Out, tools: Tools) -> Steps[None]:
    while (yield from reader.through((_CALLS,), out.content)):
        called = False
        space = yield from reader.space()
        while (yield from reader.starts(_INVOKE)):
            called = True
            yield from _call(reader, out, tools)
            yield from reader.space()
        closing = yield from reader.starts(_CALLS_END)
        if not called:
            out.content(_CALLS + space + closing)


def _call(reader: Reader, out: Out, tools: Tools) -> Steps[None]:
    header: list[str] = []
    mark = yield from reader.through((">", _CALLS_END), header.append)
    written = "".join(header)
    name = _NAME.search(written)
    if mark != ">" or name is None:
        out.content(_INVOKE + written + mark)
        return
    out.begin(name[1])
    arguments = TypedArguments(out, tools, name[1])
    while True:
        yield from reader.space()
        mark = yield from reader.starts(_INVOKE_END, _CALLS_END, _TAG)
        if mark == _TAG:
            if not (yield from _parameter(reader, out, tools, name[1], arguments)):
                return
            continue
        if not mark and (yield from reader.peek()):
            out.content(reader.take(1))
            continue
        break
    if mark:
        arguments.end()


def _parameter(reader: Reader, out: Out, tools: Tools, function: str, arguments: TypedArguments) -> Steps[bool]:
    """Takes one parameter from behind its token; returns whether it was whole."""
    tag: list[str] = []
    if not (yield from reader.through((">",), tag.append)):
        return False
    name = "".join(tag)
    arguments.open(name)
    if arguments.streams or out.valid_calls:
        whole = bool((yield from value_through(reader, out, arguments, (f"{_END_TAG}{name}>",))))
    else:
        tree = yield from _tree(reader)
        whole = tree is not None
        if tree is not None:
            nested = tree.inner and _value(tree, tools.schema(function, name), tools.root(function))
            arguments.push(as_json(nested) if tree.inner else "".join(tree.text))
    if whole:
        arguments.close()
    return whole


class _Element:
    """A tag's content: text, and the elements in it with their names."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.inner: list[tuple[str, _Element]] = []


def _tree(reader: Reader) -> Steps[_Element | None]:
    """Takes an element through the tag that closes it; None where the answer ended before. Too deep tags are text."""
    above: list[_Element] = []
    element = _Element()
    while True:
        mark = yield from reader.through((_TAG,), element.text.append)
        tag: list[str] = []
        if not mark or not (yield from reader.through((">",), tag.append)):
            return None
        name = "".join(tag)
        if name.startswith("/"):
            if not above:
                return element
            element = above.pop()
        elif len(above) < _MAX_DEPTH:
            above.append(element)
            element = _Element()
            above[-1].inner.append((name, element))
        else:
            element.text.append(f"{_TAG}{name}>")


def _value(element: _Element, schema: Any, root: Mapping[str, Any]) -> Any:
    """The element as a JSON value of the types that ``schema`` declares."""
    declared = schema if isinstance(schema, Mapping) else {}
    if not element.inner:
        text = "".join(element.text)
        types = types_of(schema, root)
        return converted(text, types) if text or "string" in types else {} if "object" in types else []
    if all(name == "item" for name, _ in element.inner):
        return [_value(inner, declared.get("items"), root) for _, inner in element.inner]
    properties = declared.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    return {name: _value(inner, known.get(name), root) for name, inner in element.inner}
