"""What /generate answers with, in SGLang's shape."""

import time
from collections.abc import Sequence

import msgspec

from tokenspeed.frontend.collect import ChoiceResult
from tokenspeed.frontend.generation import Generation, Prompt
from tokenspeed.frontend.tokenizer import Tokenizer
from tokenspeed.messages import TokenLogprobs
from tokenspeed.server.generate_api.requests import GenerateRequest
from tokenspeed.server.logprobs import SMALLEST, prompt_entries, token_text
from tokenspeed.server.timings import TimingsBody, timings_of

LogprobTriple = tuple[float | None, int, str | None]
"""Log-probability (none for a prompt's first token), token id, and its text where that was asked for."""


class StopFinish(msgspec.Struct, kw_only=True, tag_field="type", tag="stop"):
    matched: str | int | None


class LengthFinish(msgspec.Struct, kw_only=True, tag_field="type", tag="length"):
    length: int


class MetaInfo(msgspec.Struct, kw_only=True):
    """``timings`` is not SGLang's; it is of the call, of whose choices the last one may be still to end in a stream."""

    id: str
    finish_reason: StopFinish | LengthFinish | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float
    input_token_logprobs: list[LogprobTriple] | msgspec.UnsetType = msgspec.UNSET
    output_token_logprobs: list[LogprobTriple] | msgspec.UnsetType = msgspec.UNSET
    input_top_logprobs: list[list[LogprobTriple] | None] | msgspec.UnsetType = msgspec.UNSET
    output_top_logprobs: list[list[LogprobTriple] | None] | msgspec.UnsetType = msgspec.UNSET
    timings: TimingsBody | msgspec.UnsetType = msgspec.UNSET


class GenerateBody(msgspec.Struct, kw_only=True):
    """One choice. ``index`` counts the choices of a call with several, in streams."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | msgspec.UnsetType = msgspec.UNSET


class AnswerWriter:
    """Makes the bodies of one call's choices."""

    def __init__(self, body: GenerateRequest, tokenizer: Tokenizer, generation: Generation) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self._generation = generation

    def write(self, prompt: Prompt, result: ChoiceResult, *, ended: bool = True) -> GenerateBody:
        """The choice so far; ``ended`` false leaves out why it ended."""
        # the token that ended a choice counts, and is shown only where the request keeps it
        hidden = isinstance(result.matched_stop, int) and not prompt.request.include_stop
        completion = len(result.token_ids) + int(ended and hidden)
        meta = MetaInfo(
            id=prompt.request.request_id,
            finish_reason=_finish(result, completion) if ended else None,
            prompt_tokens=len(prompt.token_ids),
            completion_tokens=completion,
            cached_tokens=prompt.cached_tokens,
            e2e_latency=time.monotonic() - self._generation.started_at,
        )
        if ended:
            meta.timings = timings_of(self._generation, self._body.return_timings)
        if self._body.return_logprob:
            self._add_logprobs(meta, prompt, result)
        return GenerateBody(text=result.text, output_ids=result.token_ids, meta_info=meta)

    def _add_logprobs(self, meta: MetaInfo, prompt: Prompt, result: ChoiceResult) -> None:
        top = bool(self._body.top_logprobs_num)
        meta.output_token_logprobs = self._triples(result.logprobs)
        if top:
            meta.output_top_logprobs = self._tops(result.logprobs)
        start = self._body.logprob_start_len
        if start is None or start < 0:
            meta.input_token_logprobs = []
            return
        entries = prompt_entries(prompt)[max(start - 1, 0) :]
        first = [] if start > 0 else [self._triple(prompt.token_ids[0], None)]
        meta.input_token_logprobs = [*first, *self._triples(entries)]
        if top:
            meta.input_top_logprobs = [*(None for _ in first), *self._tops(entries)]

    def _triple(self, token_id: int, logprob: float | None) -> LogprobTriple:
        shown = token_text(self._tokenizer.token_bytes(token_id)) if self._body.return_text_in_logprobs else None
        return (None if logprob is None else max(logprob, SMALLEST), token_id, shown)

    def _triples(self, entries: Sequence[TokenLogprobs]) -> list[LogprobTriple]:
        return [self._triple(entry.token_id, entry.logprob) for entry in entries]

    def _tops(self, entries: Sequence[TokenLogprobs]) -> list[list[LogprobTriple] | None]:
        return [
            [self._triple(*pair) for pair in zip(entry.top_ids, entry.top_logprobs, strict=True)] for entry in entries
        ]


def _finish(result: ChoiceResult, completion: int) -> StopFinish | LengthFinish:
    if result.finish_reason == "length":
        return LengthFinish(length=completion)
    return StopFinish(matched=result.matched_stop)
