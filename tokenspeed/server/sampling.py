"""Request fields to a GenerationRequest."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokenspeed.frontend.parsing.parser import Parsing
from tokenspeed.frontend.request import GenerationRequest
from tokenspeed.messages import ThinkingBudget
from tokenspeed.server.constraints import Asked, constraint_of
from tokenspeed.server.deadline import time_left
from tokenspeed.server.errors import ApiError
from tokenspeed.server.requests import SamplingFields

_PLAIN = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "priority",
    "cache_salt",
)
"""Fields that go into a GenerationRequest under their own name."""


def generation_request(
    body: SamplingFields,
    prompt: str | Sequence[int],
    defaults: Mapping[str, float | int],
    *,
    request_id: str,
    max_tokens: int | None,
    logprobs: int,
    best_of: int | None = None,
    prompt_logprobs: int = -1,
    parsing: Parsing | None = None,
    constraint: Asked | None = None,
    begin_after: str = "",
    opening: str = "",
    thinking: ThinkingBudget | None = None,
) -> GenerationRequest:
    """Returns what AsyncLLM is asked for.

    Args:
        body: the request.
        prompt: text or token ids.
        defaults: values for fields that the request leaves open.
        request_id: its name.
        max_tokens, logprobs, best_of: whose fields differ between the two kinds of completion.
        prompt_logprobs: the least that is needed; the request may ask for more.
        parsing: what is to be told apart in the text.
        constraint: what follows from other fields (tools that must be called). The request's own excludes it, but where
            it names the same field: then it has taken that in (an answer in JSON, or calls).
        begin_after: the text that ends the reasoning, where the model reasons first; a constraint begins behind it.
        opening: the text that opens it, where only an answer that begins so is one that reasons.
        thinking: how long it may be.

    Raises:
        ApiError: 400, for fields that contradict each other.
    """
    _check_stream(body)
    values: dict[str, Any] = {
        name: value for name in _PLAIN if (value := _given(getattr(body, name), defaults.get(name))) is not None
    }
    top_k = _given(body.top_k, defaults.get("top_k"))
    if max_tokens is None and "max_tokens" in defaults:
        max_tokens = int(defaults["max_tokens"])
    asked = _constraint(constraint_of(body), constraint, begin_after, opening)
    return GenerationRequest(
        prompt=prompt,
        request_id=request_id,
        n=body.n or 1,
        best_of=best_of,
        max_tokens=max_tokens,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        bad_words=tuple(body.bad_words or ()),
        include_stop=bool(body.include_stop_str_in_output),
        top_k=max(int(top_k or 0), 0),
        logit_bias=_logit_bias(body.logit_bias or {}),
        seed=body.seed,
        logprobs=logprobs,
        parsing=parsing,
        prompt_logprobs=max(prompt_logprobs, -1 if body.prompt_logprobs is None else body.prompt_logprobs),
        constraint=asked.constraint if asked else None,
        constraint_field=asked.field if asked else "",
        thinking=thinking,
        timeout_s=time_left(body.timeout),
        **values,
    )


def _constraint(own: Asked | None, other: Asked | None, begin_after: str, opening: str) -> Asked | None:
    if own is not None and other is not None and own.field != other.field:
        raise ApiError(
            400,
            f"{own.field} and {other.field} exclude each other: both say what the answer must look like",
            code="invalid_value",
            param=own.field,
        )
    asked = other or own
    if asked is None or not begin_after:
        return asked
    return Asked(msgspec.structs.replace(asked.constraint, begin_after=begin_after, opening=opening), asked.field)


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value


def _check_stream(body: SamplingFields) -> None:
    options = body.stream_options
    if options is not None and not body.stream:
        raise ApiError(400, "stream_options goes with stream: true", code="invalid_value", param="stream_options")
    if options is not None and options.include_obfuscation:
        raise ApiError(
            400,
            "stream_options.include_obfuscation is not supported: streams are not padded",
            code="unsupported_field",
            param="stream_options.include_obfuscation",
        )
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(
            400,
            "prompt_logprobs does not go with stream: true; the chunks have no place for them",
            code="invalid_value",
            param="prompt_logprobs",
        )


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    bias = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit()):
            raise ApiError(
                400,
                f"logit_bias: {key!r} is no token id; keys are token ids in decimal",
                code="invalid_value",
                param="logit_bias",
            )
        bias[int(key)] = value
    return bias
