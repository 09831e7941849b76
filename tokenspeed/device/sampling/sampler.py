"""Draws the tokens of a step and takes log-probabilities. Runs on the forward thread only.

The order of parameters is that of tokenspeed/messages/sampling.py: logit bias, the mask of ``min_tokens``, penalties
(repetition, frequency, presence), the mask of a constraint, then temperature, top-k, top-p and min-p inside the
sampling kernel.
Log-probabilities are taken of the logits as the model gave them.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.device.handle import RowStart
from tokenspeed.device.sampling.backend import SamplingBackend
from tokenspeed.device.sampling.constraints import RowConstraints
from tokenspeed.device.sampling.parameters import RowParameters
from tokenspeed.device.sampling.penalties import PenaltyState
from tokenspeed.messages import SamplingParameters


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of S rows: float32 [S] of the tokens, int32 and float32 [S, k] of the most probable ones.

    Rows that did not ask for any hold NaN and -1.
    """

    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sampled:
    """``tokens`` int32 [S] (-1 where the logits held a NaN or a constraint left none), ``nan`` bool [S]; copies.

    ``complete`` are the rows whose constraint lets nothing follow, ``refused`` says why one left no token to draw; both
    by index among S.
    """

    tokens: NDArray[np.int32]
    nan: NDArray[np.bool_]
    logprobs: Logprobs | None
    complete: list[int] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)


class _RowFeatures:
    """What a pool row asks for beyond the plain parameters."""

    def __init__(self, start: RowStart, vocab_size: int) -> None:
        sampling = start.sampling
        self.prompt = start.prompt
        self.penalised = sampling.needs_counts
        self.logprobs = sampling.logprobs
        # After a retraction the prompt's log-probabilities were published before.
        self.prompt_logprobs = sampling.prompt_logprobs if start.output.size == 0 else -1
        self.min_tokens = sampling.min_tokens
        # The frontend refuses ids beyond the vocabulary; dropping one here keeps a slip from failing the whole batch.
        stops = [token for token in sampling.stop_token_ids if 0 <= token < vocab_size]
        biases = {token: value for token, value in sampling.logit_bias.items() if 0 <= token < vocab_size}
        self.stop_ids = torch.tensor(stops, dtype=torch.int64)
        self.bias_ids = torch.tensor(list(biases), dtype=torch.int64)
        self.bias_values = torch.tensor(list(biases.values()), dtype=torch.float32)

    @staticmethod
    def needed(sampling: SamplingParameters) -> bool:
        """Whether ``sampling`` asks for any of them; plain rows take no time of a step."""
        wants_logprobs = max(sampling.logprobs, sampling.prompt_logprobs) >= 0
        return wants_logprobs or sampling.needs_counts or sampling.min_tokens > 0 or bool(sampling.logit_bias)


class Sampler:
    """The sampling state of all pool rows, and the steps that use it."""

    def __init__(self, backend: SamplingBackend, *, num_rows: int, max_batch: int, vocab_size: int) -> None:
        self._backend = backend
        self._vocab_size = vocab_size
        self._parameters = RowParameters(num_rows, max_batch)
        self._penalties = PenaltyState(vocab_size)
        self._constraints = RowConstraints(vocab_size)
        self._features: dict[int, _RowFeatures] = {}
        self._tokens = torch.zeros(max_batch, dtype=torch.int32)
        self._nan = torch.zeros(max_batch, dtype=torch.bool)

    def begin(self, start: RowStart) -> None:
        """A request begins (again) in a pool row: its parameters, and its counts where a penalty asks for them."""
        row = start.row
        self._parameters.set(row, start.sampling)
        if _RowFeatures.needed(start.sampling):
            self._features[row] = _RowFeatures(start, self._vocab_size)
        else:
            self._features.pop(row, None)
        if start.grammar is None:
            self._constraints.release(row)
        else:
            self._constraints.begin(start, start.grammar)
        if start.sampling.needs_counts:
            self._penalties.begin(row, start.prompt, start.output)
        else:
            self._penalties.release(row)

    def prompt_request(self, row: int) -> tuple[NDArray[np.int32], int] | None:
        """The prompt of pool row ``row`` and how many prompt log-probabilities it asks for; None where none."""
        features = self._features.get(row)
        if features is None or features.prompt_logprobs < 0:
            return None
        return features.prompt, features.prompt_logprobs

    def sample(self, logits: torch.Tensor, rows: NDArray[np.intp], positions: NDArray[np.int32]) -> Sampled:
        """Draws a token for each of ``rows`` (pool rows) from ``logits`` float32 [S, V], which it overwrites.

        ``positions`` int32 [S]: the index each token will have in its sequence, prompt and output counted together.
        """
        count = rows.shape[0]
        tokens, nan = self._tokens[:count], self._nan[:count]
        self._backend.has_nan(logits, nan)
        special = [(place, row) for place, row in enumerate(rows.tolist()) if row in self._features]
        asking = [(place, self._features[row].logprobs) for place, row in special if self._features[row].logprobs >= 0]
        raw = logits[[place for place, _ in asking]] if asking else None
        batch = self._parameters.gather(rows)
        if special:
            self._apply_features(logits, special, positions)
            if any(self._features[row].penalised for _, row in special):
                slots = torch.tensor([self._penalties.slot(row) for row in rows.tolist()], dtype=torch.int32)
                self._backend.apply_penalties(
                    logits, self._penalties.counts, self._penalties.prompt_mask, slots,
                    batch.presence_penalty, batch.frequency_penalty, batch.repetition_penalty,
                )  # fmt: skip
        constrained = self._constraints.places(rows.tolist())
        if constrained:
            self._backend.apply_token_mask(logits, self._constraints.masks, self._constraints.slots(count, constrained))
        self._backend.sample(
            logits, batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.seed, batch.choice,
            torch.from_numpy(positions), tokens,
        )  # fmt: skip
        logprobs = None if raw is None else self._logprobs(raw, tokens, asking)
        drawn, flags = tokens.numpy().copy(), nan.numpy().copy()
        drawn[flags] = -1
        sampled = Sampled(tokens=drawn, nan=flags, logprobs=logprobs)
        self._constrain(sampled, constrained)
        for place, row in special:
            if drawn[place] >= 0:
                self._penalties.add(row, int(drawn[place]))
        return sampled

    def prompt_logprobs(self, logits: torch.Tensor, targets: NDArray[np.int32], k: int) -> Logprobs:
        """Log-probabilities of ``targets`` int32 [S] under ``logits`` [S, V], and of the ``k`` best of each row."""
        return self._taken(logits, torch.from_numpy(targets.astype(np.int32)), min(k, self._vocab_size))

    def _constrain(self, sampled: Sampled, constrained: list[tuple[int, int]]) -> None:
        """Tells the constraints what was drawn, and the outcome what came of it."""
        for place, row in constrained:
            if sampled.nan[place]:
                continue
            is_whole, refusal = self._constraints.take(row, int(sampled.tokens[place]))
            if is_whole:
                sampled.complete.append(place)
            if refusal:
                sampled.refused[place] = refusal
                sampled.tokens[place] = -1

    def _apply_features(
        self, logits: torch.Tensor, special: list[tuple[int, int]], positions: NDArray[np.int32]
    ) -> None:
        for place, row in special:
            features = self._features[row]
            if features.bias_ids.numel():
                logits[place].index_add_(0, features.bias_ids, features.bias_values)
            generated = int(positions[place]) - features.prompt.size
            if generated < features.min_tokens and features.stop_ids.numel():
                logits[place].index_fill_(0, features.stop_ids, -torch.inf)

    def _logprobs(self, raw: torch.Tensor, tokens: torch.Tensor, asking: list[tuple[int, int]]) -> Logprobs:
        """Spreads the log-probabilities of the asking rows over all rows of the batch."""
        places = [place for place, _ in asking]
        k = min(max(count for _, count in asking), self._vocab_size)
        taken = self._taken(raw, tokens[places], k)
        size = tokens.shape[0]
        spread = Logprobs(
            logprobs=np.full(size, np.nan, np.float32),
            top_ids=np.full((size, k), -1, np.int32),
            top_logprobs=np.full((size, k), np.nan, np.float32),
        )
        spread.logprobs[places] = taken.logprobs
        spread.top_ids[places] = taken.top_ids
        spread.top_logprobs[places] = taken.top_logprobs
        return spread

    def _taken(self, logits: torch.Tensor, ids: torch.Tensor, k: int) -> Logprobs:
        size = ids.shape[0]
        logprobs = torch.empty(size)
        top_ids, top_logprobs = torch.empty(size, k, dtype=torch.int32), torch.empty(size, k)
        self._backend.logprobs(logits, ids, k, logprobs, top_ids, top_logprobs)
        return Logprobs(logprobs=logprobs.numpy(), top_ids=top_ids.numpy(), top_logprobs=top_logprobs.numpy())
