"""Formats whose arguments are JSON: each call has the schema of its function."""

from tokenspeed.frontend.calling.functions import Function, Wanted
from tokenspeed.frontend.calling.lark import Lark
from tokenspeed.frontend.calling.marked import CallWriter, Marked


def json_call(before: str, after: str) -> CallWriter:
    """A call with NAME in the text before the arguments."""

    def call(lark: Lark, function: Function) -> str:
        name = before.replace("NAME", function.name)
        return f"{lark.written(name)} {lark.json(function.schema)} {lark.written(after)}"

    return call


hermes = Marked("<tool_call>", json_call('\n{"name": "NAME", "arguments": ', "}\n</tool_call>"), between="\n")

deepseek_v3 = Marked(
    "<｜tool▁calls▁begin｜>",
    json_call("<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n", "\n```<｜tool▁call▁end｜>"),
    between="\n",
    end="<｜tool▁calls▁end｜>",
    one_block=True,
    never=("<｜tool▁call▁begin｜>",),
)
deepseek_v31 = Marked(
    "<｜tool▁calls▁begin｜>",
    json_call("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    end="<｜tool▁calls▁end｜>",
    one_block=True,
    never=("<｜tool▁call▁begin｜>",),
)


def _kimi_call(lark: Lark, function: Function) -> str:
    """The number in the id counts the calls of the conversation, which the model keeps."""
    begin = lark.written(f"<|tool_call_begin|>functions.{function.name}:")
    number = lark.terminal("/(0|[1-9][0-9]{0,3})/")
    end = lark.written("<|tool_call_end|>")
    return f"{begin} {number} {lark.written('<|tool_call_argument_begin|>')} {lark.json(function.schema)} {end}"


kimi_k2 = Marked(
    "<|tool_calls_section_begin|>",
    _kimi_call,
    end="<|tool_calls_section_end|>",
    one_block=True,
    never=("<|tool_call_begin|>",),
)

_MISTRAL_NAMED = Marked("[TOOL_CALLS]", json_call("NAME[ARGS]", ""))
_MISTRAL_LIST = Marked(
    "[TOOL_CALLS]",
    json_call('{"name": "NAME", "arguments": ', "}"),
    before=" [",
    between=", ",
    end="]",
    one_block=True,
)


def mistral(lark: Lark, wanted: Wanted) -> str:
    """Names behind the marker where the tokenizer has the token that ends them, a list of objects where it has not."""
    return (_MISTRAL_NAMED if lark.is_special("[ARGS]") else _MISTRAL_LIST)(lark, wanted)


_PYTHON_TAG = "<|python_tag|>"
_LLAMA_CALL = json_call('{"name": "NAME", "parameters": ', "}")


def llama3_json(lark: Lark, wanted: Wanted) -> str:
    """An answer that begins with a brace is a call."""
    call = lark.any_of([_LLAMA_CALL(lark, function) for function in wanted.functions])
    calls = lark.rule(f'{call} ("; " {call})*' if wanted.parallel else call)
    if wanted.must:
        return calls
    if wanted.answer is not None:
        return f"{lark.json(wanted.answer)} | {calls}"
    other = not_begun_by(lark, "{", _PYTHON_TAG)
    return f"{lark.rule(other)} | {calls} | {lark.until(_PYTHON_TAG, text=other)} {calls}"


def not_begun_by(lark: Lark, character: str, *never: str) -> str:
    """A lexeme of text that does not begin with the character, and in which none of ``never`` stands."""
    begun = lark.terminal(rf"/\s*\{character}(.|\n)*/")
    return lark.terminal(f"{lark.without(*never)} & ~{begun}")
