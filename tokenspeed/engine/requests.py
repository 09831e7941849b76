"""What the loop remembers of a request while it lives: what the scheduler and the device need to be told again."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tokenspeed.device.handle import Grammar, RowStart
from tokenspeed.messages import Submit


@dataclass(slots=True)
class LiveRequest:
    """One live request.

    Attributes:
        submit: as the frontend sent it.
        prompt: int32 token ids of the prompt.
        limit: tokens after which it ends by length: its own ``max_new_tokens`` or what the model length leaves.
        stop_token_ids: tokens that end it.
        grammar: what its output must look like; None is free.
        output: the tokens generated so far.
        cached_tokens: prompt tokens the prefix cache gave at its first start; -1 before.
        reported_cached: whether ``cached_tokens`` went out.
        pooled: float32 [hidden size], what was pooled of its prompt so far; None where nothing was.
        submitted_at: when the loop took it, by the loop's clock.
        started_at: when its first step was planned; -1 before.
    """

    submit: Submit
    prompt: NDArray[np.int32]
    limit: int
    stop_token_ids: frozenset[int]
    grammar: Grammar | None = None
    output: list[int] = field(default_factory=list)
    cached_tokens: int = -1
    reported_cached: bool = False
    pooled: NDArray[np.float32] | None = None
    submitted_at: float = 0.0
    started_at: float = -1.0

    @property
    def queue_s(self) -> float:
        """Seconds it waited for its first step; -1 before that."""
        return self.started_at - self.submitted_at if self.started_at >= 0 else -1.0

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether every token of its prompt must be computed: what a cached prefix gave would be missing."""
        return self.submit.sampling.prompt_logprobs >= 0 or self.submit.pooling == "mean"

    def pool(self, vector: NDArray[np.float32]) -> None:
        """Adds what a chunk of its prompt gave."""
        self.pooled = vector if self.pooled is None else self.pooled + vector

    def embedding(self) -> bytes:
        """Its embedding, float32 [hidden size] in little-endian order, once the whole prompt is computed."""
        assert self.pooled is not None, "the last chunk of a pooled prompt gives a vector"
        count = len(self.prompt) if self.submit.pooling == "mean" else 1
        return (self.pooled / np.float32(count)).astype("<f4").tobytes()

    @classmethod
    def of(cls, submit: Submit, max_model_len: int, grammar: Grammar | None = None) -> "LiveRequest":
        """Returns the record of a request that was just submitted."""
        prompt = np.frombuffer(submit.prompt, dtype=np.int32)
        return cls(
            submit=submit,
            prompt=prompt,
            limit=min(submit.max_new_tokens, max_model_len - len(prompt)),
            stop_token_ids=frozenset(submit.sampling.stop_token_ids),
            grammar=grammar,
        )

    def start(self, row: int, prefix_len: int) -> RowStart:
        """Returns what the device must know when the request begins in ``row`` behind a cached prefix."""
        if self.cached_tokens < 0:
            self.cached_tokens = min(prefix_len, len(self.prompt))
        if prefix_len == 0:
            self.pooled = None  # a retracted one without an image computes its prompt again
        return RowStart(
            handle=self.submit.handle,
            row=row,
            sampling=self.submit.sampling,
            prompt=self.prompt,
            output=np.asarray(self.output, dtype=np.int32),
            grammar=self.grammar,
            pooling=self.submit.pooling,
        )
