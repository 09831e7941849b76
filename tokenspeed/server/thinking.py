"""How much a request wants the model to think, in the words of the model's chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.frontend.parsing.parser import Parsing
from tokenspeed.frontend.parsing.registry import REASONING_FORMATS, WholeFormat
from tokenspeed.frontend.tokenizer import Tokenizer
from tokenspeed.messages import ThinkingBudget
from tokenspeed.server.errors import ApiError

EFFORTS = ("none", "off", "minimal", "low", "medium", "high", "xhigh", "max")
_OFF = ("none", "off")


def thinking_variables(effort: str | None, *, switch: str, reasoning_format: str) -> dict[str, Any]:
    """Returns the template's variables for ``reasoning_effort``; {} where the request says nothing.

    Args:
        effort: of the request.
        switch, reasoning_format: of the served model's formats.

    Raises:
        ApiError: 400 for a word that is unknown to the API or to the model, or where nothing says what the template
            makes of it.
    """
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise _wrong(f"is {effort!r}; it must be one of {', '.join(EFFORTS)}", "invalid_value")
    if not switch:
        raise _wrong(
            "is not supported by this model as it is served: nothing says which variable of its chat template switches "
            "reasoning. Start the server with --thinking-switch NAME, or set formats.thinking_switch in the recipe",
            "unsupported_field",
        )
    if switch == "reasoning_effort":
        known = REASONING_FORMATS.get(reasoning_format)
        words = known.efforts if isinstance(known, WholeFormat) else ()
        if words and effort not in words:
            raise _wrong(f"is {effort!r}; this model knows {', '.join(words)}", "invalid_value")
        return {"reasoning_effort": effort}
    on = effort not in _OFF
    value: bool | str = on if switch != "thinking_mode" else "enabled" if on else "disabled"
    return {switch: value, **({"reasoning_effort": effort} if on else {})}


def reasoning_end(
    reasoning_format: str, prompt_end: str, *, variables: Mapping[str, Any], switch: str, continues: bool
) -> tuple[str, str]:
    """Returns the text behind which the answer begins, "" where it begins at once; and the text that opens reasoning
    where the prompt left it to the model whether it reasons, "" where that is settled.

    Args:
        reasoning_format, switch: of the served model's formats.
        prompt_end: the last characters of the prompt.
        variables: of the template; the switch among them may turn reasoning off.
        continues: the prompt ends inside an answer.
    """
    known = REASONING_FORMATS.get(reasoning_format)
    if known is None:
        return "", ""
    if isinstance(known, WholeFormat):
        return ("" if continues or prompt_end.rstrip().endswith(known.answer) else known.answer), ""
    if known.opened_by(prompt_end):
        return known.closing, ""
    is_off = bool(switch) and variables.get(switch) in (False, "disabled", *_OFF)
    if continues or is_off or prompt_end.rstrip().endswith(known.closing):
        return "", ""
    return known.closing, known.opening


def thinking_budget(
    tokens: int | None,
    *,
    parsing: Parsing,
    begin_after: str,
    opening: str,
    stop_token_ids: Sequence[int],
    tokenizer: Tokenizer,
) -> ThinkingBudget | None:
    """Returns what the engine keeps of ``thinking_token_budget``; None where there is no reasoning to bound.

    Args:
        tokens: of the request; None is no bound.
        parsing: what is told apart in the answer.
        begin_after, opening: see reasoning_end.
        stop_token_ids: of the request.
        tokenizer: of the model.

    Raises:
        ApiError: 400, where nothing says how the model reasons, or a stop token would end what is to go on.
    """
    if tokens is None:
        return None
    known = REASONING_FORMATS.get(parsing.reasoning_format)
    if known is None:
        raise ApiError(
            400,
            "thinking_token_budget is not supported by this model as it is served: nothing says how it marks its "
            "reasoning. Start the server with --reasoning-format NAME, or set formats.reasoning in the recipe",
            code="unsupported_field",
            param="thinking_token_budget",
        )
    if isinstance(known, WholeFormat):
        _, opened, inside = parsing.prompt_end.rpartition(known.opening)
        is_open = bool(opened) and not any(end in inside for end in known.ends)
        budget = ThinkingBudget(
            tokens=tokens,
            opening=known.opening,
            ends=known.ends,
            closing=known.closing,
            is_open=is_open,
            reopens=True,
        )
    elif begin_after:
        budget = ThinkingBudget(
            tokens=tokens,
            opening=known.opening,
            ends=(known.closing, *parsing.calls_in_reasoning),
            closing=known.closing,
            is_open=not opening,
        )
    else:
        return None
    clash = sorted(set(stop_token_ids) & set(tokenizer.encode(budget.closing, add_special_tokens=False)))
    if clash:
        raise ApiError(
            400,
            f"stop_token_ids names {clash[0]}, with which the engine ends reasoning that uses up its "
            "thinking_token_budget; leave one of them out",
            code="invalid_value",
            param="stop_token_ids",
        )
    return budget


def _wrong(what: str, code: str) -> ApiError:
    return ApiError(400, f"reasoning_effort {what}", code=code, param="reasoning_effort")
