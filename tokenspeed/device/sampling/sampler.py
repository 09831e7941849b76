"""Draws the tokens of a step and takes log-probabilities. Runs on the forward thread only.

A draw has three parts: what the device will need is written on the host (``prepare``) before the step's inputs are
uploaded, the device draws (``draw``) without the host waiting, and once its outcome has landed, constraints are told of
it (``finish``).

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
from tokenspeed.device.placement import Landing, Placement
from tokenspeed.device.sampling.backend import SamplingBackend
from tokenspeed.device.sampling.constraints import RowConstraints
from tokenspeed.device.sampling.parameters import RowParameters
from tokenspeed.device.sampling.penalties import PenaltyState
from tokenspeed.device.sampling.rows import SamplingRows
from tokenspeed.messages import SamplingParameters


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of S rows: float32 [S] of the tokens, int32 and float32 [S, k] of the most probable ones.

    Rows that did not ask for any hold NaN and -1. What has yet to land is there once it was waited for.
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the device draws for S rows, in memory that stays.

    Attributes:
        tokens: int32 [S]; nan: bool [S], whether a row's logits held one: its token says nothing.
        both: uint8 [5 S], the two of them as one piece.
    """

    tokens: torch.Tensor
    nan: torch.Tensor
    both: torch.Tensor


class _RowFeatures:
    """What a pool row asks for beyond the plain parameters."""

    def __init__(self, placement: Placement, start: RowStart, vocab_size: int) -> None:
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
        self.stop_ids = placement.upload(np.array(stops, np.int64))
        self.bias_ids = placement.upload(np.array(list(biases), np.int64))
        self.bias_values = placement.upload(np.array(list(biases.values()), np.float32))

    @staticmethod
    def needed(sampling: SamplingParameters) -> bool:
        """Whether ``sampling`` asks for any of them; plain rows take no time of a step."""
        wants_logprobs = max(sampling.logprobs, sampling.prompt_logprobs) >= 0
        return wants_logprobs or sampling.needs_counts or sampling.min_tokens > 0 or bool(sampling.logit_bias)


@dataclass(slots=True)
class Draw:
    """One step's draw on its way; S rows.

    Attributes:
        into: the rows' part of the step's inputs.
        most_kept: the largest top-k of the rows, 0 where one keeps all.
        special: place and pool row of those that ask for more than the plain parameters.
        penalised: whether a row has a penalty.
        constrained: place and pool row of those with a constraint.
        asking: place, and how many, of those that ask for log-probabilities.
        asking_places: int64, the places of these on the device.
        outcome: what the device draws.
        drawn: the same as it lands on the host.
        taken: the log-probabilities of the asking rows.
    """

    into: SamplingRows
    most_kept: int
    special: list[tuple[int, int]]
    penalised: bool
    constrained: list[tuple[int, int]]
    asking: list[tuple[int, int]]
    asking_places: torch.Tensor | None
    outcome: Outcome
    drawn: NDArray[np.uint8] | None = None
    taken: Logprobs | None = None


class Sampler:
    """The sampling state of all pool rows, and the steps that use it."""

    def __init__(
        self, placement: Placement, backend: SamplingBackend, *, num_rows: int, max_batch: int, vocab_size: int
    ) -> None:
        self._placement = placement
        self._backend = backend
        self._vocab_size = vocab_size
        self._parameters = RowParameters(num_rows)
        self._penalties = PenaltyState(placement, vocab_size)
        self._constraints = RowConstraints(placement, vocab_size)
        self._features: dict[int, _RowFeatures] = {}
        self._memory = placement.zeros(5 * max_batch, dtype=torch.uint8)
        self._outcomes: dict[int, Outcome] = {}

    def begin(self, start: RowStart) -> None:
        """A request begins (again) in a pool row: its parameters, and its counts where a penalty asks for them."""
        row = start.row
        self._parameters.set(row, start.sampling)
        if _RowFeatures.needed(start.sampling):
            self._features[row] = _RowFeatures(self._placement, start, self._vocab_size)
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

    def constrains(self, rows: NDArray[np.int32]) -> bool:
        """Whether any of pool rows ``rows`` draws under a constraint."""
        return bool(self._constraints.places(rows.tolist()))

    def prepare(self, rows: NDArray[np.intp], into: SamplingRows) -> Draw:
        """Writes ``into`` what the device needs to draw a token for each of ``rows`` (pool rows), whose positions are
        there. Touches no device but to send what few rows ask for."""
        count, each = rows.shape[0], rows.tolist()
        self._parameters.gather(rows, into)
        features = self._features
        special = [(place, row) for place, row in enumerate(each) if row in features] if features else []
        asking = [(place, features[row].logprobs) for place, row in special if features[row].logprobs >= 0]
        penalised = any(features[row].penalised for _, row in special)
        if penalised:
            into.penalty_slots.host[:] = [self._penalties.slot(row) for row in each]
        constrained = self._constraints.places(each)
        if constrained:
            self._constraints.fill_slots(constrained, into.mask_slots.host)
        places = self._placement.upload(np.array([place for place, _ in asking], np.int64)) if asking else None
        most = self._parameters.most_kept(rows)
        return Draw(into, most, special, penalised, constrained, asking, places, self._outcome(count))

    def draw(self, draw: Draw, logits: torch.Tensor, landing: Landing) -> None:
        """Draws from ``logits`` float32 [S, V], which it overwrites, and has the outcome brought to the host by
        ``landing``; does not wait."""
        into, outcome, batch = draw.into, draw.outcome, draw.into.parameters
        self._backend.has_nan(logits, outcome.nan)
        raw = None if draw.asking_places is None else logits.index_select(0, draw.asking_places)
        if draw.special:
            self._apply_features(logits, draw.special, into.positions.host)
        if draw.penalised:
            self._backend.apply_penalties(
                logits, self._penalties.counts, self._penalties.prompt_mask, into.penalty_slots.tensor,
                batch.presence_penalty, batch.frequency_penalty, batch.repetition_penalty,
            )  # fmt: skip
        if draw.constrained:
            self._backend.apply_token_mask(logits, self._constraints.masks(), into.mask_slots.tensor)
        self._backend.sample(
            logits, batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.seed, batch.choice,
            into.positions.tensor, outcome.tokens, most_kept=draw.most_kept,
        )  # fmt: skip
        if draw.penalised:
            self._penalties.add(into.penalty_slots.tensor, outcome.tokens, outcome.nan)
        draw.drawn = landing.take(outcome.both)
        if raw is not None and draw.asking_places is not None:
            k = min(max(count for _, count in draw.asking), self._vocab_size)
            draw.taken = self._taken(raw, outcome.tokens.index_select(0, draw.asking_places), k, landing)

    def finish(self, draw: Draw) -> Sampled:
        """What was drawn, once it has landed; tells the constraints."""
        assert draw.drawn is not None, "a draw is finished behind draw"
        count = draw.outcome.tokens.shape[0]
        drawn, flags = draw.drawn[: 4 * count].view(np.int32).copy(), draw.drawn[4 * count :].view(np.bool_).copy()
        drawn[flags] = -1
        sampled = Sampled(tokens=drawn, nan=flags, logprobs=_spread(draw))
        self._constrain(sampled, draw.constrained)
        return sampled

    def prompt_logprobs(self, logits: torch.Tensor, targets: NDArray[np.int32], k: int, landing: Landing) -> Logprobs:
        """Log-probabilities of ``targets`` int32 [S] under ``logits`` [S, V], and of the ``k`` best of each row; there
        once ``landing`` has them."""
        ids = self._placement.upload(targets.astype(np.int32))
        return self._taken(logits, ids, min(k, self._vocab_size), landing)

    def _outcome(self, count: int) -> Outcome:
        found = self._outcomes.get(count)
        if found is None:
            both = self._memory[: 5 * count]
            tokens, nan = both[: 4 * count].view(torch.int32), both[4 * count :].view(torch.bool)
            found = self._outcomes[count] = Outcome(tokens, nan, both)
        return found

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

    def _taken(self, logits: torch.Tensor, ids: torch.Tensor, k: int, landing: Landing) -> Logprobs:
        size, device = ids.shape[0], logits.device
        logprobs, top_logprobs = (torch.empty(shape, device=device) for shape in ((size,), (size, k)))
        top_ids = torch.empty(size, k, dtype=torch.int32, device=device)
        self._backend.logprobs(logits, ids, k, logprobs, top_ids, top_logprobs)
        return Logprobs(landing.take(logprobs), landing.take(top_ids), landing.take(top_logprobs))


def _spread(draw: Draw) -> Logprobs | None:
    """The log-probabilities of the asking rows, over all rows of the batch."""
    taken = draw.taken
    if taken is None:
        return None
    size, places, k = draw.outcome.tokens.shape[0], [place for place, _ in draw.asking], taken.top_ids.shape[1]
    spread = Logprobs(
        logprobs=np.full(size, np.nan, np.float32),
        top_ids=np.full((size, k), -1, np.int32),
        top_logprobs=np.full((size, k), np.nan, np.float32),
    )
    spread.logprobs[places] = taken.logprobs
    spread.top_ids[places] = taken.top_ids
    spread.top_logprobs[places] = taken.top_logprobs
    return spread
