"""The request body of /generate. Every field here is honoured; two tables of rules say what becomes of the others."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tokenspeed.frontend.request import MAX_REQUEST_CHOICES
from tokenspeed.server.body import invalid_value
from tokenspeed.server.errors import ApiError
from tokenspeed.server.fields import FieldRules, check_fields
from tokenspeed.server.requests import CompletionRequest, LogprobCount, TokenId

DEFAULT_NEW_TOKENS = 128
"""SGLang's own default."""

_TEXT_ONLY = "this server reads and writes text only"
_NO_ADAPTERS = "adapters are not supported by this version"

RULES = FieldRules(
    without_effect={
        "log_metrics": "metrics are always counted",
        "no_logs": "requests are not logged with their text",
        "conversation_id": "nothing is stored that it could be attached to",
        "label": "who asks makes no difference here",
        "modalities": "there is text only",
        "return_bytes": "answers are JSON",
    },
    refused={
        "input_embeds": _TEXT_ONLY,
        "image_data": "this version does not take pictures yet, whatever the model",
        "video_data": "this version does not take pictures yet, whatever the model",
        "audio_data": _TEXT_ONLY,
        "token_ids_logprob": "ask for top_logprobs_num",
        "return_hidden_states": "hidden states do not leave the engine",
        "lora_path": _NO_ADAPTERS,
        "lora_id": _NO_ADAPTERS,
        "session_params": "nothing is stored; send the whole prompt",
        "custom_logit_processor": "this server runs no code of its clients",
        "bootstrap_host": "this server prefills and decodes itself",
        "bootstrap_port": "this server prefills and decodes itself",
        "bootstrap_room": "this server prefills and decodes itself",
        "data_parallel_rank": "there is one rank",
        "background": "an answer is given to the request that asks for it",
    },
    harmless={"background": (False,), "return_hidden_states": (False,), "token_ids_logprob": ([],)},
)

SAMPLING_RULES = FieldRules(
    without_effect={
        "spaces_between_special_tokens": "texts are joined as the tokenizer joins them",
        "stream_interval": "a stream shows what there is",
    },
    refused={
        "stop_regex": "use stop",
        "custom_params": "this server runs no code of its clients",
    },
    harmless={},
)

SAMPLING_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "sampling_seed": "seed",
    **{
        name: name
        for name in (
            "n",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
            "stop",
            "stop_token_ids",
            "ignore_eos",
            "skip_special_tokens",
            "logit_bias",
            "json_schema",
            "regex",
            "ebnf",
            "structural_tag",
        )
    },
}
"""The supported sampling parameters, and what plain completions call them."""


class GenerateRequest(msgspec.Struct, kw_only=True):
    """One prompt or several, as ``text`` or ``input_ids``."""

    text: str | list[str] | None = None
    input_ids: list[TokenId | list[TokenId]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Meta(ge=-1)] | None = None
    top_logprobs_num: LogprobCount | None = None
    return_text_in_logprobs: bool | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)] | None = None
    extra_key: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    return_timings: bool | None = None  # not SGLang's: as in chat completions

    @property
    def is_batch(self) -> bool:
        """Whether several prompts are given, be it one in a list."""
        if self.text is not None:
            return isinstance(self.text, list)
        return bool(self.input_ids) and isinstance((self.input_ids or [0])[0], list)

    def prompts(self) -> list[str | list[int]]:
        """The prompts; raises ApiError (400) where there are none, or both kinds."""
        if (self.text is None) == (self.input_ids is None):
            raise ApiError(400, "give either text or input_ids", code="invalid_value", param="text")
        given: Any = self.text if self.text is not None else self.input_ids
        prompts = list(given) if self.is_batch else [given]
        if not prompts:
            raise ApiError(400, "text is an empty list", code="invalid_value", param="text")
        if self.text is None and len({isinstance(one, list) for one in given}) > 1:
            raise ApiError(400, "input_ids mixes ids and lists of ids", code="invalid_value", param="input_ids")
        return prompts

    def of_each(self, name: str, count: int) -> list[Any]:
        """What a field that may be a list says for each of ``count`` prompts; raises ApiError for another length."""
        value = getattr(self, name)
        if not isinstance(value, list):
            return [value] * count
        if not self.is_batch or len(value) != count:
            raise ApiError(
                400, f"{name} has {len(value)} entries for {count} prompts", code="invalid_value", param=name
            )
        return value


def sampling_of(given: dict[str, Any] | None, model: str, ignored: list[str]) -> CompletionRequest:
    """Returns sampling parameters as plain completions have them.

    Adds to ``ignored`` the names of those that are accepted without effect. Raises ApiError (400) naming what is wrong.
    """
    raw = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in (given or {}).items()}
    try:
        ignored += [f"sampling_params.{name}" for name in check_fields(raw, SAMPLING_NAMES, SAMPLING_RULES)]
    except ApiError as error:
        raise own_name(error) from error
    fields = {SAMPLING_NAMES[name]: value for name, value in (given or {}).items() if name in SAMPLING_NAMES}
    fields = {"max_tokens": DEFAULT_NEW_TOKENS, **{name: value for name, value in fields.items() if value is not None}}
    if fields["max_tokens"] == 0:
        raise ApiError(
            400,
            "sampling_params.max_new_tokens is 0; at least one token is generated",
            code="invalid_value",
            param="sampling_params.max_new_tokens",
        )
    try:
        return msgspec.convert({**fields, "model": model, "prompt": ""}, CompletionRequest)
    except msgspec.ValidationError as error:
        raise own_name(invalid_value(str(error))) from error


def own_name(error: ApiError) -> ApiError:
    """The same error, with the name that the field at fault has here."""
    body = error.body.error
    param = body.param or ""
    if param == "prompt":
        return ApiError(error.status, body.message, code=body.code, param="text", kind=body.type, headers=error.headers)
    head = param.partition("[")[0]
    back = {theirs: ours for ours, theirs in SAMPLING_NAMES.items()}
    known = head in back or body.code in ("unknown_field", "unsupported_field")
    if not known or head.startswith("sampling_params"):
        return error
    name = f"sampling_params.{back.get(head, head)}{param[len(head) :]}"
    message = body.message.replace(param, name, 1)
    return ApiError(error.status, message, code=body.code, param=name, kind=body.type, headers=error.headers)


def check_choices(counts: list[int]) -> None:
    """Raises ApiError (400) for more choices than one request may have, or another number for each prompt."""
    if len(set(counts)) > 1:
        name = "sampling_params.n"
        raise ApiError(400, f"{name} must be the same for all prompts", code="invalid_value", param=name)
    if sum(counts) > MAX_REQUEST_CHOICES:
        raise ApiError(
            400,
            f"{sum(counts)} choices over all prompts; at most {MAX_REQUEST_CHOICES} go into one request",
            code="invalid_value",
            param="text",
        )
