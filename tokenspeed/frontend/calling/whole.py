"""Formats that frame the whole answer: the grammar holds the reasoning and the answer too."""

from tokenspeed.frontend.calling.functions import Function, Parameter, Wanted
from tokenspeed.frontend.calling.lark import Lark
from tokenspeed.frontend.calling.tags import parameters, said_values


def _answer(lark: Lark, wanted: Wanted, *never: str) -> str:
    return lark.rule(lark.without(*never)) if wanted.answer is None else lark.json(wanted.answer)


_HARMONY = ("<|end|>", "<|start|>", "<|call|>", "<|return|>")


def gpt_oss(lark: Lark, wanted: Wanted) -> str:
    """Reasoning, then one call or the answer. A call ends the answer: the model writes no second one.

    The token behind a call and that behind the answer are end tokens, which no grammar holds.
    """
    next_ = f"{lark.written('<|start|>assistant')}"
    open_end = f"{lark.until(*_HARMONY)} {next_}"
    thought = lark.rule(f"{lark.written('<|channel|>analysis<|message|>')} {open_end}")
    call = lark.any_of([_harmony_call(lark, function) for function in wanted.functions])
    begun = wanted.prompt_end[wanted.prompt_end.rfind("<|start|>") :]
    inside = f"{open_end} " if "<|start|>" in begun and "<|message|>" in begun else ""
    if wanted.must:
        return f"{inside}{thought}? {call}"
    said = lark.rule(f"{lark.written('<|channel|>commentary<|message|>')} {open_end}")
    final = lark.rule(f"{lark.written('<|channel|>final<|message|>')} {_answer(lark, wanted, *_HARMONY)}")
    ends = (
        f"{_answer(lark, wanted, *_HARMONY)} | " if inside else ""
    )  # the message that is gone on with may be the last
    return f"{ends}{inside}({thought} | {said})* ({call} | {final})"


def _harmony_call(lark: Lark, function: Function) -> str:
    """The recipient stands before or behind the channel."""
    to = f" to=functions.{function.name}"
    before = lark.rule(lark.written(f"{to}<|channel|>commentary"))
    behind = lark.rule(lark.written(f"<|channel|>commentary{to}"))
    json_ = lark.rule(f"({lark.written(' <|constrain|>json')} | {lark.written(' json')})?")
    return f"({before} | {behind}) {json_} {lark.written('<|message|>')} {lark.json(function.schema)}"


_INKLING = ("<|end_message|>", "<|content_model_end_sampling|>", "<|message_model|>")


def inkling(lark: Lark, wanted: Wanted) -> str:
    """A row of messages: thinking, text, calls."""
    end, next_ = _INKLING[0], lark.written("<|message_model|>")
    thought = lark.rule(f"{lark.written('<|content_thinking|>')} {lark.until(*_INKLING)} {next_}")
    call = lark.any_of([_inkling_call(lark, function) for function in wanted.functions])
    calls = f"{call} ({next_} {call})*" if wanted.parallel else call
    begun = wanted.prompt_end[wanted.prompt_end.rfind("<|message_model|>") :]
    inside = f"{lark.until(*_INKLING)} {next_} " if "<|content_text|>" in begun else ""
    if wanted.must:
        return f"{inside}{thought}? {calls}"
    text = f"{lark.written('<|content_text|>')} "
    if wanted.answer is not None:
        last = lark.rule(f"{text}{_answer(lark, wanted)} {lark.written(end)}")
        return f"{inside}{thought}? ({last} | {lark.rule(calls)})"
    said = lark.rule(f"{text}{lark.until(*_INKLING)}")
    messages = lark.rule(f"({thought} | {said} {next_})* ({said} | {calls})")
    return f"{lark.until(*_INKLING)} | {inside}{messages}" if inside else messages


def _inkling_call(lark: Lark, function: Function) -> str:
    name = f'{function.name}<|content_invoke_tool_json|>{{"name": "{function.name}", "args": '
    return f"{lark.written(name)} {lark.json(function.schema)} {lark.written('}<|end_message|>')}"


_K3 = ("<|open|>", "<|close|>")


def kimi_k3(lark: Lark, wanted: Wanted) -> str:
    """Thinking, a response and tools, each an element that may be there or not."""
    end_thought = f"{lark.until('<|close|>think<|sep|>', *_K3)}"
    opened = wanted.prompt_end.rstrip().endswith("<|open|>think<|sep|>")
    thought = end_thought if opened else f"({lark.written('<|open|>think<|sep|>')} {end_thought})?"
    count = lark.terminal("/[1-9][0-9]{0,2}/")
    call = lark.any_of([_k3_call(lark, function, count) for function in wanted.functions])
    several = f"({call})*" if wanted.parallel else ""
    tools = lark.rule(
        f"{lark.written('<|open|>tools<|sep|>')} {call} {several} {lark.written('<|close|>tools<|sep|>')}"
    )
    if wanted.must:
        return f"{thought} {tools}"
    response, close = lark.written("<|open|>response<|sep|>"), "<|close|>response<|sep|>"
    if wanted.answer is not None:
        return f"{thought} ({response} {_answer(lark, wanted)} {lark.written(close)} | {tools})"
    said = lark.rule(f"{response} {lark.until(close, *_K3)}")
    return f"{thought} ({said} {tools}? | {tools})"


def _k3_call(lark: Lark, function: Function, count: str) -> str:
    """Arguments stand each in an element of its own, or all in one."""
    close = lark.written("<|close|>call<|sep|>")
    each = lark.rule(parameters(lark, function, _k3_argument))
    together = lark.rule(
        f"{lark.written('<|open|>json<|sep|>')} {lark.json(function.schema)} {lark.written('<|close|>json<|sep|>')}"
    )
    begin, middle = lark.written(f'<|open|>call tool="{function.name}" index="'), lark.written('"<|sep|>')
    return f"{begin} {count} {middle} ({each} | {together}) {close}"


def _k3_argument(lark: Lark, function: Function, parameter: Parameter) -> str:
    end = "<|close|>argument<|sep|>"
    types = sorted(parameter.types - {"string"})
    other = types[0] if len(types) == 1 else "object"
    other = "number" if other == "integer" else other
    begin = {
        text: lark.written(f'<|open|>argument key="{parameter.name}" type="{kind}"<|sep|>')
        for text, kind in ((True, "string"), (False, other))
    }
    values = said_values(lark, function, parameter, end, *_K3)
    return lark.any_of([f"{begin[text]} {written}" for text, written in values])
