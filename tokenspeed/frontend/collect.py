"""A call's deltas put together to whole choices."""

from dataclasses import dataclass, field

from tokenspeed.frontend.generation import Generation
from tokenspeed.frontend.parsing.parts import Answer, Part, put_together
from tokenspeed.frontend.request import Delta
from tokenspeed.messages import FinishReason, TokenLogprobs


@dataclass
class ChoiceResult:
    """One whole choice; the fields are those of Delta. ``answer`` is what it is made of, also where nothing is told
    apart."""

    index: int
    text: str = ""
    parts: list[Part] = field(default_factory=list)
    parsed: bool = False
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    matched_stop: str | int | None = None

    @property
    def answer(self) -> Answer:
        return put_together(self.parts) if self.parsed else Answer(content=self.text)

    @property
    def mean_logprob(self) -> float:
        """How probable the choice was, per token; an empty one is as probable as can be."""
        return sum(entry.logprob for entry in self.logprobs) / len(self.logprobs) if self.logprobs else 0.0

    def as_delta(self) -> Delta:
        return Delta(
            index=self.index,
            text=self.text,
            parts=self.parts,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            matched_stop=self.matched_stop,
        )


async def collect(generation: Generation) -> list[ChoiceResult]:
    """Reads a generation to its end and returns its choices, numbered through.

    Where a prompt asked for the best ``n`` of more, those remain, the best first. Raises as ``next_batch`` does.
    """
    results: dict[int, ChoiceResult] = {}
    parsed = any(prompt.request.parsing is not None for prompt in generation.prompts)
    texts: dict[int, list[str]] = {}
    while batch := await generation.next_batch():
        for delta in batch:
            result = results.setdefault(delta.index, ChoiceResult(delta.index, parsed=parsed))
            texts.setdefault(delta.index, []).append(delta.text)
            result.parts.extend(delta.parts)
            result.token_ids.extend(delta.token_ids)
            result.logprobs.extend(delta.logprobs)
            if delta.finish_reason is not None:
                result.finish_reason, result.matched_stop = delta.finish_reason, delta.matched_stop
    for index, pieces in texts.items():
        results[index].text = "".join(pieces)
    return _chosen(generation, [results[index] for index in sorted(results)])


def _chosen(generation: Generation, results: list[ChoiceResult]) -> list[ChoiceResult]:
    chosen: list[ChoiceResult] = []
    for prompt in generation.prompts:
        request = prompt.request
        candidates, results = results[: request.generated_choices], results[request.generated_choices :]
        if request.generated_choices > request.n:
            candidates = sorted(candidates, key=lambda result: result.mean_logprob, reverse=True)[: request.n]
        if request.logprobs < 0:
            for result in candidates:
                result.logprobs = []  # they were asked for to rank the choices only
        chosen.extend(candidates)
    for index, result in enumerate(chosen):
        result.index = index
    return chosen
