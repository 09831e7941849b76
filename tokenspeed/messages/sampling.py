"""How the tokens of one choice are drawn."""

import msgspec


class SamplingParameters(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The sampling parameters of one choice, as the engine needs them.

    Greedy decoding is ``top_k == 1``: there is no second arm. A frontend that is asked for ``temperature == 0`` sends
    ``temperature=1.0, top_k=1``. The random number of a token depends on ``(seed, choice, position)`` only, where the
    position counts prompt and output tokens, so that a token does not depend on what else runs.

    The order in which the parameters apply to the logits: logit bias, the mask of ``min_tokens``, repetition penalty,
    presence and frequency penalties, the mask of a constraint (``Submit.constraint``), temperature, top-k, top-p,
    min-p.

    Attributes:
        temperature: divides the logits; above 0.
        top_k: the number of candidates kept; 0 keeps all.
        top_p: the probability mass kept, in (0, 1].
        min_p: the least probability kept, as a share of the largest, in [0, 1).
        presence_penalty: subtracted once from the logit of every token that the output contains.
        frequency_penalty: subtracted from a token's logit as often as the output contains it.
        repetition_penalty: divides (multiplies, where negative) the logits of the tokens of prompt and output; above 0.
        logit_bias: token id to the value added to its logit.
        min_tokens: the stop token ids are masked until so many tokens are generated; a constraint after which nothing
            may follow ends the choice earlier all the same.
        stop_token_ids: the tokens that end the choice (end-of-sequence ids included unless they are to be ignored).
        seed: 64 bits.
        choice: index of the choice among the ``n`` of its request.
        logprobs: how many of the most probable tokens to report beside each sampled one; -1 reports nothing, 0 the
            sampled token only. They are taken from the logits as the model gave them, before any parameter applies.
        prompt_logprobs: the same for the tokens of the prompt.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    choice: int = 0
    logprobs: int = -1
    prompt_logprobs: int = -1

    @property
    def needs_counts(self) -> bool:
        """Whether the sampler has to know which tokens prompt and output contain."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)
