"""Checks of a request that need the model: whatever passes here the engine can work on."""

from collections.abc import Sequence

from tokenspeed.frontend.errors import ContextLengthExceeded, RequestRefused, prompt_name
from tokenspeed.frontend.generation import Prompt
from tokenspeed.frontend.request import MAX_CHOICES, MAX_LOGPROBS, GenerationRequest
from tokenspeed.messages import MAX_BAD_WORD_CHARACTERS, MAX_BAD_WORDS, MAX_CONSTRAINT_BYTES, Constraint
from tokenspeed.recipes.model_config import ModelConfig


def check_request(prompt: Prompt, model: ModelConfig, max_model_len: int, *, needs_room: bool = True) -> int:
    """Returns the most tokens to generate for ``prompt``; raises RequestRefused (naming the field) otherwise.

    ``needs_room`` false is for a prompt that nothing is generated for: it may fill the context.
    """
    request = prompt.request
    _check_ranges(request)
    _check_ids(prompt, model)
    length = len(prompt.token_ids)
    if length == 0 or request.prompt == "":
        raise RequestRefused(
            f"{prompt_name(request.prompt_field)} is empty; there is nothing to go on from",
            "empty_prompt",
            request.prompt_field,
        )
    wanted = request.max_tokens if needs_room else 0
    if length + (1 if wanted is None else wanted) > max_model_len:
        if request.pooling is not None:
            raise RequestRefused(
                f"this model's maximum context length is {max_model_len} tokens, and an input leaves one of them free: "
                f"{request.prompt_field} has {length}; shorten it",
                "context_length_exceeded",
                request.prompt_field,
            )
        raise ContextLengthExceeded(
            max_model_len, length, wanted, request.prompt_field if length >= max_model_len else "max_tokens"
        )
    most = max_model_len - length if wanted is None else wanted
    if request.min_tokens > most:
        raise RequestRefused(
            f"min_tokens is {request.min_tokens}, but at most {most} can be generated", "invalid_value", "min_tokens"
        )
    return most


def _check_ranges(request: GenerationRequest) -> None:
    """The ranges that hold whoever asks; the server's schema has them too, with its own words."""
    ranges: list[tuple[str, float, bool, str]] = [
        ("n", request.n, 1 <= request.n <= MAX_CHOICES, f"1 to {MAX_CHOICES}"),
        ("best_of", request.generated_choices, request.n <= (request.best_of or request.n) <= MAX_CHOICES,
         f"n to {MAX_CHOICES}"),
        ("max_tokens", request.max_tokens or 0, request.max_tokens is None or request.max_tokens >= 1, "at least 1"),
        ("min_tokens", request.min_tokens, request.min_tokens >= 0, "at least 0"),
        ("temperature", request.temperature, 0 <= request.temperature < float("inf"), "0 or more"),
        ("top_k", request.top_k, request.top_k >= 0, "0 (all) or more"),
        ("top_p", request.top_p, 0 < request.top_p <= 1, "above 0, at most 1"),
        ("min_p", request.min_p, 0 <= request.min_p < 1, "0 or more, below 1"),
        ("repetition_penalty", request.repetition_penalty, 0 < request.repetition_penalty < float("inf"), "above 0"),
        ("logprobs", request.logprobs, -1 <= request.logprobs <= MAX_LOGPROBS, f"at most {MAX_LOGPROBS}"),
        ("prompt_logprobs", request.prompt_logprobs, -1 <= request.prompt_logprobs <= MAX_LOGPROBS,
         f"at most {MAX_LOGPROBS}"),
    ]  # fmt: skip
    for name, value, holds, wanted in ranges:
        if not holds:
            raise RequestRefused(f"{name} is {value}; it must be {wanted}", "invalid_value", name)
    if "" in request.stop:
        raise RequestRefused(
            "stop holds an empty string, which would end every answer at once", "invalid_value", "stop"
        )
    _check_words(request.bad_words)


def _check_words(words: Sequence[str]) -> None:
    if len(words) > MAX_BAD_WORDS:
        raise RequestRefused(
            f"bad_words has {len(words)} entries; at most {MAX_BAD_WORDS} are taken", "invalid_value", "bad_words"
        )
    for at, word in enumerate(words):
        where = f"bad_words[{at}]"
        if not word.strip(" "):
            raise RequestRefused(f"{where} is empty, or spaces alone; no text has none", "invalid_value", where)
        if len(word) > MAX_BAD_WORD_CHARACTERS:
            raise RequestRefused(
                f"{where} has {len(word)} characters; at most {MAX_BAD_WORD_CHARACTERS} are taken",
                "invalid_value",
                where,
            )


def check_constraint(constraint: Constraint, field: str, *, enabled: bool) -> None:
    """Whether the engine may be asked to compile it; raises RequestRefused naming ``field``."""
    if not enabled:
        raise RequestRefused(
            f"{field} is not supported: structured output is off on this server (api.structured_output)",
            "unsupported_field",
            field,
        )
    size = len(constraint.text.encode("utf-8", "surrogatepass"))
    if size > MAX_CONSTRAINT_BYTES:
        raise RequestRefused(
            f"{field} has {size} bytes; at most {MAX_CONSTRAINT_BYTES} are compiled", "invalid_value", field
        )


def _check_ids(prompt: Prompt, model: ModelConfig) -> None:
    """Every token id that a client names must exist."""
    request, size = prompt.request, model.vocab_size
    named = [("logit_bias", request.logit_bias), ("stop_token_ids", request.stop_token_ids)]
    if not isinstance(request.prompt, str):
        named.append((request.prompt_field, request.prompt))
    for name, ids in named:
        if ids and not 0 <= min(ids) <= max(ids) < size:
            wrong = next(token_id for token_id in ids if not 0 <= token_id < size)
            raise RequestRefused(
                f"{name} names token {wrong}, but the vocabulary has the ids 0 to {size - 1}", "invalid_value", name
            )
