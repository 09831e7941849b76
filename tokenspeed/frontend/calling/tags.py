"""Formats that write each argument as text between tags.

Parameters come in the order of their declaration, each at most once, the required ones always. What is no text is JSON
by its schema. Text is one of the values that the schema lists, or else any text without the tags that would end it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from tokenspeed.frontend.calling.functions import DEFINITIONS, Function, Parameter, UnwritableCallError
from tokenspeed.frontend.calling.lark import BOUNDS, NOTHING, NUMBER, Lark
from tokenspeed.frontend.calling.marked import Marked

ParameterWriter = Callable[[Lark, Function, Parameter], str]


def parameters(lark: Lark, function: Function, write: ParameterWriter) -> str:
    """All parameters of a function, as an expression."""
    written = [(one, lark.rule(write(lark, function, one))) for one in function.writable()]
    return " ".join(name if one.required else f"{name}?" for one, name in written) or NOTHING


def value(lark: Lark, function: Function, parameter: Parameter, end: str, *never: str) -> str:
    """A value and the tag that ends it, where the types of the declaration say how it is read."""
    texts = parameter.texts() if function.checked else None
    if texts is not None:
        return listed(lark, function, parameter, texts, end, *never)
    if "string" in parameter.types:
        return lark.until(end, *never)
    if not function.checked:
        return f"{lark.json({'type': sorted(parameter.types)})} {lark.written(end)}"
    return f"{_json(lark, parameter, parameter.schema)} {lark.written(end)}"


def _json(lark: Lark, parameter: Parameter, schema: Mapping[str, Any]) -> str:
    """A value that is no text."""
    if parameter.types == {"number"} and not any(key in parameter.schema for key in (*BOUNDS, "$ref", "allOf")):
        return lark.terminal(NUMBER)
    return lark.json(schema)


def listed(lark: Lark, function: Function, parameter: Parameter, texts: list[str], end: str, *never: str) -> str:
    """One of ``texts`` and the tag that ends it."""
    fit = [one for one in texts if end not in (one + end)[:-1] and not any(marker in one for marker in never)]
    if not fit:
        raise UnwritableCallError(
            function.name, f"none of the values of the parameter {parameter.name!r} can be written by this model"
        )
    return lark.any_of([lark.written(one + end) for one in fit])


def _between(opening: str, end: str, *never: str, after: str = "") -> ParameterWriter:
    """A parameter between tags, with KEY in the opening one and perhaps in the other."""

    def write(lark: Lark, function: Function, parameter: Parameter) -> str:
        begin, closing = opening.replace("KEY", parameter.name), end.replace("KEY", parameter.name)
        content = value(lark, function, parameter, closing, *never)
        return f"{lark.written(begin)} {content} {lark.written(after)}"

    return write


def _call(before: str, write: ParameterWriter, after: str) -> Callable[[Lark, Function], str]:
    def call(lark: Lark, function: Function) -> str:
        name = lark.written(before.replace("NAME", function.name))
        return f"{name} {parameters(lark, function, write)} {lark.written(after)}"

    return call


_CODER_VALUE = _between(
    "<parameter=KEY>\n", "\n</parameter>", "</parameter>", "</function>", "</tool_call>", after="\n"
)
qwen3_coder = Marked(
    "<tool_call>",
    _call("\n<function=NAME>\n", _CODER_VALUE, "</function>\n</tool_call>"),
    between="\n",
    never=("<function=",),
)

_GLM_VALUE = _between("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>", "</tool_call>", after="\n")
_GLM_DENSE_VALUE = _between("<arg_key>KEY</arg_key><arg_value>", "</arg_value>", "</tool_call>")
glm45 = Marked("<tool_call>", _call("NAME\n", _GLM_VALUE, "</tool_call>"), between="\n")
glm47 = Marked("<tool_call>", _call("NAME", _GLM_DENSE_VALUE, "</tool_call>"))

_MINIMAX_VALUE = _between('<parameter name="KEY">', "</parameter>", "</invoke>", "</minimax:tool_call>", after="\n")
minimax_m2 = Marked(
    "<minimax:tool_call>",
    _call('<invoke name="NAME">\n', _MINIMAX_VALUE, "</invoke>\n"),
    before="\n",
    end="</minimax:tool_call>",
    one_block=True,
)

_M3 = "]<]minimax[>["
minimax_m3 = Marked(
    f"{_M3}<tool_call>",
    _call(f'{_M3}<invoke name="NAME">', _between(f"{_M3}<KEY>", f"{_M3}</KEY>", _M3), f"{_M3}</invoke>\n"),
    before="\n",
    end=f"{_M3}</tool_call>",
    one_block=True,
)


def _dsml(block: str) -> Marked:
    end, never = "</｜DSML｜parameter>", ("</｜DSML｜invoke>", f"</｜DSML｜{block}>")

    def write(lark: Lark, function: Function, parameter: Parameter) -> str:
        """The model says itself whether a value is text."""
        begin = f'<｜DSML｜parameter name="{parameter.name}" string="'
        said = {True: lark.written(begin + 'true">'), False: lark.written(begin + 'false">')}
        line_break = lark.written("\n")
        kinds = said_values(lark, function, parameter, end, *never)
        return lark.any_of([f"{said[text]} {one} {line_break}" for text, one in kinds])

    return Marked(
        f"<｜DSML｜{block}>",
        _call('<｜DSML｜invoke name="NAME">\n', write, "</｜DSML｜invoke>\n"),
        before="\n",
        end=f"</｜DSML｜{block}>",
        one_block=True,
    )


def said_values(lark: Lark, function: Function, parameter: Parameter, end: str, *never: str) -> list[tuple[bool, str]]:
    """The values of formats that say whether a value is text: True and text, False and JSON, or one of both."""
    found = []
    values = parameter.values if function.checked else None
    texts = None if values is None else [one for one in values if isinstance(one, str)]
    if texts:
        found.append((True, listed(lark, function, parameter, texts, end, *never)))
    elif texts is None and (not function.checked or "string" in parameter.types):
        found.append((True, lark.until(end, *never)))
    others = sorted(parameter.types - {"string"})
    if not function.checked:
        found.append((False, f"{lark.json({})} {lark.written(end)}"))
    elif values is not None:
        kept = [one for one in values if not isinstance(one, str)]
        found += [(False, f"{lark.json({'enum': kept})} {lark.written(end)}")] if kept else []
    elif others:
        schema = _only(parameter, others) if "string" in parameter.types else parameter.schema
        found.append((False, f"{_json(lark, parameter, schema)} {lark.written(end)}"))
    return found


def _only(parameter: Parameter, types: list[str]) -> dict[str, Any]:
    """The parameter's schema without text."""
    schema = dict(parameter.schema)
    kept: dict[str, Any] = {key: schema.pop(key) for key in DEFINITIONS if key in schema}
    return {**kept, "allOf": [schema, {"type": types}]}


deepseek_v32 = _dsml("function_calls")
deepseek_v4 = _dsml("tool_calls")
