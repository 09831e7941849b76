"""What a caller asks AsyncLLM for, and what comes back."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from tokenspeed.frontend.parsing.parser import Parsing
from tokenspeed.frontend.parsing.parts import Part
from tokenspeed.messages import Constraint, FinishReason, Pooling, SamplingParameters, ThinkingBudget, TokenLogprobs

MAX_CHOICES = 128
"""The most choices of one prompt."""
MAX_REQUEST_CHOICES = 1024
"""The most choices of one call, over all its prompts."""
MAX_LOGPROBS = 20
GREEDY_BELOW = 1e-4
"""A temperature below this is greedy: dividing by it would leave the range of float32."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One prompt and how to go on from it. Everything not given has the value that changes nothing.

    Attributes:
        prompt: text, or token ids.
        request_id: a name for logs and the dashboard; chosen where empty.
        n: choices to return.
        best_of: choices to generate; the ``n`` with the highest mean log-probability are returned. None is ``n``.
        max_tokens: the most tokens of a choice; None is the rest of the context.
        min_tokens: neither stop tokens nor stop strings end a choice before so many tokens.
        stop: strings that end a choice.
        stop_token_ids: tokens that end a choice, besides the model's own end tokens.
        ignore_eos: the model's own end tokens do not end a choice.
        include_stop: whether the text keeps the stop string (or the stop token's text).
        skip_special_tokens: whether special tokens are left out of the text.
        seed: None draws one.
        logprobs, prompt_logprobs: how many alternatives to report beside each token; 0 the token only, -1 nothing.
        priority: larger runs first.
        parsing: what is to be told apart in the text; None leaves it as it is.
        timeout_s: seconds that it may take from ``start`` on; None is no bound.
        cache_salt: requests share cached prefixes only with requests of the same salt.
        constraint: what the text of every choice must look like; None is free text.
        constraint_field: the caller's name for it, in errors.
        pooling: the embedding of the prompt is asked for, and nothing is generated: ``n`` and ``max_tokens`` are 1.
        prompt_field: the caller's name for the prompt, in errors.
        bad_words: texts that no choice holds. A space in front of one makes no difference: a word is banned wherever it
            stands.
        thinking: how many tokens every choice may reason; None is no bound.

    The others are those of SamplingParameters, except that ``temperature`` may be 0 (greedy).
    """

    prompt: str | Sequence[int]
    request_id: str = ""
    n: int = 1
    best_of: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int = -1
    prompt_logprobs: int = -1
    priority: int = 0
    cache_salt: str = ""
    parsing: Parsing | None = None
    constraint: Constraint | None = None
    constraint_field: str = "constraint"
    pooling: Pooling | None = None
    prompt_field: str = "prompt"
    bad_words: tuple[str, ...] = ()
    thinking: ThinkingBudget | None = None
    timeout_s: float | None = None

    @property
    def generated_choices(self) -> int:
        """How many choices the engine generates."""
        return max(self.n, self.best_of or 0)

    def sampling(self, eos_token_ids: Sequence[int], seed: int, choice: int) -> SamplingParameters:
        """Returns the engine's parameters for one choice."""
        greedy = self.temperature < GREEDY_BELOW
        ends = (*(() if self.ignore_eos else eos_token_ids), *self.stop_token_ids)
        ranked = self.best_of is not None and self.best_of > self.n
        return SamplingParameters(
            temperature=1.0 if greedy else self.temperature,
            top_k=1 if greedy else self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(dict.fromkeys(ends)),
            seed=seed & 0xFFFF_FFFF_FFFF_FFFF,
            choice=choice,
            logprobs=max(self.logprobs, 0) if ranked else self.logprobs,
            prompt_logprobs=self.prompt_logprobs if choice == 0 else -1,
        )


class Delta(msgspec.Struct, kw_only=True):
    """What was added to one choice. The deltas of a choice, joined, are the whole of it.

    Attributes:
        index: of the choice.
        text: new text; never part of a character and never part of a stop string.
        parts: what the text is, where the request has it told apart; they may lag behind the text, and are all there
            with the last delta.
        token_ids: the tokens that count with this text (the token that ended the choice is not among them unless the
            request keeps it in the text).
        logprobs: one for each of ``token_ids`` where asked for.
        finish_reason: set in the last delta of a choice.
        matched_stop: the stop string or the stop token that ended it.
    """

    index: int
    text: str = ""
    parts: list[Part] = []
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None


@dataclass(slots=True)
class Usage:
    """Token counts of a call so far. The token that ended a choice counts as generated.

    ``reasoning_tokens`` are those among the generated ones that were spent before the end of reasoning, the markers
    included; None where reasoning is not told apart.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int | None = None
