"""Tools that must be called, or called by their schemas, to the constraint that the engine keeps.

Which door a request came through makes no difference: all that is needed stands in the arguments.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tokenspeed.frontend.calling.functions import Function, UnwritableCallError, Wanted
from tokenspeed.frontend.calling.registry import CALL_GRAMMARS, call_grammar
from tokenspeed.frontend.parsing.registry import TOOL_FORMATS, WholeFormat
from tokenspeed.frontend.tokenizer import Tokenizer
from tokenspeed.messages import MAX_CONSTRAINT_BYTES, Constraint
from tokenspeed.server.constraints import Asked
from tokenspeed.server.errors import ApiError
from tokenspeed.server.tools import chosen_tool


def call_constraint(
    tools: Sequence[Any] | None,
    choice: Any,
    *,
    parallel: bool,
    tool_format: str,
    special: Mapping[str, int],
    prompt_end: str = "",
    answer: Asked | None = None,
) -> Asked | None:
    """Returns what an answer must look like because of its tools; None where the model is free.

    It begins where the answer does, behind the reasoning; in formats that frame the whole answer (``frames_answer``) it
    holds the reasoning too.

    Args:
        tools, choice: ``tools`` and ``tool_choice`` of the request, in the form of chat completions; ``offered_tools``
            has checked them.
        parallel: whether an answer may have several calls.
        tool_format: the served model's.
        special: see ``special_tokens``.
        prompt_end: the last characters of the prompt.
        answer: the request's own constraint. Beside tools that may be called it is what an answer without calls looks
            like, if it is JSON; the constraint that is returned has taken it in and names the same field.

    Raises:
        ApiError: 400, where no grammar can say what is asked.
    """
    chosen, name = chosen_tool(choice)
    if not tools or chosen == "none":
        return None
    must = chosen in ("required", "named")
    functions = [_function(tool, must) for tool in tools if chosen != "named" or tool["function"]["name"] == name]
    strict = next(_strict_fields(tools), "")
    schema = None if must or answer is None else _json_schema(answer.constraint)
    if not must and not strict and schema is None:
        return None
    field = "tool_choice" if must else strict
    if tool_format not in CALL_GRAMMARS:
        raise _invalid(f"{field} needs a grammar of calls, and the tool format {tool_format!r} has none", field)
    wanted = Wanted(functions, must=must, parallel=parallel, answer=schema, prompt_end=prompt_end)
    try:
        text = call_grammar(tool_format, wanted, special)
    except UnwritableCallError as error:
        where = f"tools[{_place(tools, error.function)}].function.parameters"
        raise _invalid(f"{where}: {error}", where) from error
    if len(text.encode("utf-8", "surrogatepass")) > MAX_CONSTRAINT_BYTES:
        raise _invalid(f"the schemas are too long: a grammar of at most {MAX_CONSTRAINT_BYTES} bytes is taken", field)
    return Asked(Constraint(kind="grammar", text=text), field if schema is None or answer is None else answer.field)


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """The names of a tokenizer's special tokens, and their ids."""
    return {tokenizer.token_name(one): one for one in sorted(tokenizer.special_ids)}


def frames_answer(tool_format: str) -> bool:
    """Whether the constraint of ``call_constraint`` holds the reasoning too."""
    return isinstance(TOOL_FORMATS.get(tool_format), WholeFormat)


def _function(tool: Mapping[str, Any], must: bool) -> Function:
    """Where calls must be made, all of them conform; otherwise those of strict tools do."""
    function = tool["function"]
    return Function(function["name"], function.get("parameters"), checked=must or bool(function.get("strict")))


def _strict_fields(tools: Sequence[Any]) -> Iterator[str]:
    for at, tool in enumerate(tools):
        if tool["function"].get("strict"):
            yield f"tools[{at}].function.strict"


def _json_schema(constraint: Constraint) -> dict[str, Any] | None:
    """The schema of an answer in JSON; None for other constraints, which tools cannot be joined with."""
    if constraint.kind == "json_object":
        return {"type": "object"}
    if constraint.kind != "json_schema":
        return None
    try:
        schema = msgspec.json.decode(constraint.text)
    except (msgspec.DecodeError, RecursionError):
        return None  # the engine says what is wrong with it
    return schema if isinstance(schema, dict) else None


def _place(tools: Sequence[Any], name: str) -> int:
    return next(at for at, tool in enumerate(tools) if tool["function"]["name"] == name)


def _invalid(message: str, field: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param=field)
