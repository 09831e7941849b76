"""sampling.sample, sampling.apply_penalties, sampling.apply_token_mask, sampling.logprobs and sampling.has_nan.

sample
    ``fn(logits, temperature, top_k, top_p, min_p, seed, choice, position, out) -> None``
    logits float32 [S, V], may be overwritten; temperature (above 0), top_p (in (0, 1]) and min_p (in [0, 1))
    float32 [S]; top_k int32 [S], where 0 keeps all and 1 is greedy; seed int64 [S]; choice and position int32 [S];
    out int32 [S]. S may be 0. For each row:

    1. z = logit / temperature, one float32 division each. The candidates are all ids, sorted by z descending, then
       id ascending.
    2. A candidate's weight is w = exp(z - z_max), difference and exponential in float64.
    3. top-k keeps the first min(top_k, V) candidates, or all where top_k is 0.
    4. top-p, where top_p < 1: cum[j] is the running float64 sum of w over what top-k kept, in candidate order, and
       total its last value. Keeps candidate 0 and every j with cum[j-1] < top_p * total (top_p widened to float64).
    5. min-p, where min_p > 0: keeps the candidates with w >= min_p (widened to float64). The first has w = 1.
    6. total is cum of the last candidate kept. The first candidate with cum[j] >= u * total is drawn; u is
       ``uniform(seed, choice, position)``, the product in float64.

    top_k = 1 needs none of it: the lowest id among the largest logits. Where z_max is infinite the first candidate
    is drawn. -inf is a token that is never drawn beside finite ones. A row with a NaN gives some id in [0, V):
    whether logits are sound is for has_nan to say.

The uniform number depends on (seed, choice, position) only
    All arithmetic is unsigned, modulo 2^64; seed, choice and position are sign-extended to 64 bits.
    mix(h):  h ^= h >> 30;  h *= 0xBF58476D1CE4E5B9;  h ^= h >> 27;  h *= 0x94D049BB133111EB;  h ^= h >> 31
    h = mix(seed + G);  h = mix((h ^ choice) + G);  h = mix((h ^ position) + G)  with G = 0x9E3779B97F4A7C15
    u = (float32(h >> 40) + 0.5f) * 2^-24, both operations in float32, rounded to nearest, ties to even: in (0, 1].

apply_penalties
    ``fn(logits, counts, prompt_mask, rows, presence, frequency, repetition) -> None``
    logits float32 [S, V], in place. counts int32 [R, V]: how often pool row r has generated each token. prompt_mask
    bool or uint8 [R, V]: whether its prompt holds the token. rows int32 [S]: the pool row of each row of logits.
    presence, frequency and repetition (above 0) float32 [S].
    Where the prompt or the output holds a token: logit = logit / repetition if logit > 0 else logit * repetition.
    Then logit -= frequency * count; then logit -= presence where count > 0. All in float32.

apply_token_mask
    ``fn(logits, mask, rows) -> None``
    logits float32 [S, V], in place. mask int32 [R, ceil(V / 32)]: token t may be drawn where bit t % 32 of word t // 32
    is set; bits from V on say nothing. rows int32 [S]: the row of ``mask`` for each row of logits, or -1 for a row
    that is left alone. The logits of tokens that may not be drawn become -inf; the others stay as they are.

logprobs
    ``fn(logits, ids, k, out_logprob, top_ids, top_logprobs) -> None``
    logits float32 [S, V], left alone; ids int32 [S], each in [0, V); k a Python int in [0, V]; out_logprob float32
    [S]; top_ids int32 [S, k]; top_logprobs float32 [S, k]. A log-probability is logit - log(sum(exp(logits))). The
    top ids are sorted by logit descending, then id ascending.

has_nan
    ``fn(logits, out) -> None``: logits float32 [S, V], left alone; out bool [S]: whether the row holds a NaN.

Roles: logits. No traits.
"""

import torch

from tokenspeed_kernel.binding import Bound, bind
from tokenspeed_kernel.registry import Band, KernelSpec, Operation, declare_operation, register_kernel
from tokenspeed_kernel.signature import FLOAT32, FormatSignature

SAMPLING_SIGNATURE = FormatSignature.of(logits=FLOAT32)

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _declare(mode: str, arguments: str) -> Operation:
    return declare_operation(
        Operation(family="sampling", mode=mode, roles=SAMPLING_SIGNATURE.roles, arguments=arguments)
    )


SAMPLE = _declare("sample", "logits [S, V], temperature, top_k, top_p, min_p, seed, choice, position, out int32 [S]")
APPLY_PENALTIES = _declare(
    "apply_penalties", "logits [S, V] in/out, counts [R, V], prompt_mask [R, V], rows, presence, frequency, repetition"
)
APPLY_TOKEN_MASK = _declare("apply_token_mask", "logits [S, V] in/out, mask int32 [R, ceil(V / 32)], rows int32 [S]")
LOGPROBS = _declare("logprobs", "logits [S, V], ids [S], k, out_logprob [S], top_ids [S, k], top_logprobs [S, k]")
HAS_NAN = _declare("has_nan", "logits [S, V], out bool [S]")


def _reference_spec(mode: str) -> KernelSpec:
    return KernelSpec(
        name=f"reference_sampling_{mode}",
        family="sampling",
        mode=mode,
        solution="reference",
        signatures=frozenset({SAMPLING_SIGNATURE}),
        band=Band.REFERENCE,
        tags=frozenset({"deterministic", "row_invariant"}),
    )


def _mix(h: int) -> int:
    h ^= h >> 30
    h = h * 0xBF58476D1CE4E5B9 & _MASK
    h ^= h >> 27
    h = h * 0x94D049BB133111EB & _MASK
    return h ^ h >> 31


def uniform(seed: int, choice: int, position: int, *more: int) -> float:
    """The uniform number of the module's words, a float32 value in (0, 1]; ``more`` numbers are mixed in as position
    is, for further ones of the same token (verify.py)."""
    h = _mix((seed & _MASK) + _GOLDEN & _MASK)
    for number in (choice, position, *more):
        h = _mix((h ^ number & _MASK) + _GOLDEN & _MASK)
    return float((torch.tensor(h >> 40, dtype=torch.float32) + 0.5) * 2.0**-24)


def _candidates(z: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first ``top_k`` candidates of z [V] (all where 0): their z and ids, by (z descending, id ascending)."""
    if not 0 < top_k < z.shape[0]:
        ordered = torch.sort(z, descending=True, stable=True)
        return ordered.values, ordered.indices
    least = torch.topk(z, top_k).values[-1]
    ids = torch.nonzero(z >= least).squeeze(1)  # ascending ids; more than top_k of them where the last place is shared
    ordered = torch.sort(z[ids], descending=True, stable=True)
    return ordered.values[:top_k], ids[ordered.indices[:top_k]]


def kept_candidates(z: torch.Tensor, top_k: int, top_p: float, min_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps 2 to 5 of the module's words for one row z [V]: the ids that are kept, in order, and their weights float64.
    Only the first where the largest z is infinite."""
    values, ids = _candidates(torch.where(torch.isnan(z), -torch.inf, z), top_k)
    if not torch.isfinite(values[0]):
        return ids[:1], torch.ones_like(values[:1], dtype=torch.float64)
    weights = torch.exp(values.double() - values[0].double())
    kept = weights.shape[0]
    if top_p < 1.0:
        running = torch.cumsum(weights, dim=0)
        # running is ascending, so this counts the candidates whose predecessor has not reached the mass
        kept = int((running[:-1] < top_p * running[-1]).sum()) + 1
    if min_p > 0.0:
        kept = min(kept, max(1, int((weights >= min_p).sum())))
    return ids[:kept], weights[:kept]


def _draw(z: torch.Tensor, top_k: int, top_p: float, min_p: float, u: float) -> int:
    """Steps 2 to 6 of the module's words for one row z [V]."""
    ids, weights = kept_candidates(z, top_k, top_p, min_p)
    running = torch.cumsum(weights, dim=0)
    drawn = int((running < u * running[-1]).sum())
    return int(ids[min(drawn, ids.shape[0] - 1)])


@register_kernel(_reference_spec("sample"))
def reference_sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    choice: torch.Tensor,
    position: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """sampling.sample by PyTorch. Rows with a small top_k are never sorted whole, greedy rows never sorted at all."""
    drawn_rows = torch.nonzero(top_k != 1).squeeze(1).tolist()
    if len(drawn_rows) < logits.shape[0]:
        out.copy_(torch.argmax(logits, dim=-1))
    for row in drawn_rows:
        z = logits[row] / temperature[row]
        u = uniform(int(seed[row]), int(choice[row]), int(position[row]))
        out[row] = _draw(z, int(top_k[row]), float(top_p[row]), float(min_p[row]), u)


@register_kernel(_reference_spec("apply_penalties"))
def reference_apply_penalties(
    logits: torch.Tensor,
    counts: torch.Tensor,
    prompt_mask: torch.Tensor,
    rows: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    """sampling.apply_penalties by PyTorch."""
    count = counts[rows.long()]
    seen = (count > 0) | prompt_mask[rows.long()].bool()
    factor = repetition.unsqueeze(1)
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits.copy_(torch.where(seen, repeated, logits))
    logits -= frequency.unsqueeze(1) * count
    logits -= presence.unsqueeze(1) * (count > 0)


@register_kernel(_reference_spec("apply_token_mask"))
def reference_apply_token_mask(logits: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> None:
    """sampling.apply_token_mask by PyTorch."""
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    for place, row in enumerate(rows.tolist()):
        if row >= 0:
            allowed = (mask[row].unsqueeze(1) >> bits) & 1
            logits[place].masked_fill_(allowed.flatten()[: logits.shape[1]] == 0, -torch.inf)


@register_kernel(_reference_spec("logprobs"))
def reference_logprobs(
    logits: torch.Tensor,
    ids: torch.Tensor,
    k: int,
    out_logprob: torch.Tensor,
    top_ids: torch.Tensor,
    top_logprobs: torch.Tensor,
) -> None:
    """sampling.logprobs by PyTorch."""
    normaliser = torch.logsumexp(logits, dim=-1)
    out_logprob.copy_(logits.gather(1, ids.long().unsqueeze(1)).squeeze(1) - normaliser)
    for row in range(logits.shape[0] if k else 0):
        values, best = _candidates(logits[row], k)
        top_ids[row] = best
        top_logprobs[row] = values - normaliser[row]


@register_kernel(_reference_spec("has_nan"))
def reference_has_nan(logits: torch.Tensor, out: torch.Tensor) -> None:
    """sampling.has_nan by PyTorch."""
    out.copy_(torch.isnan(logits).any(dim=-1))


def bind_sample(*, override: str | None = None) -> Bound:
    """Chooses ``fn(logits, temperature, top_k, top_p, min_p, seed, choice, position, out)``."""
    return bind("sampling", "sample", SAMPLING_SIGNATURE, {}, override=override)


def bind_apply_penalties(*, override: str | None = None) -> Bound:
    """Chooses ``fn(logits, counts, prompt_mask, rows, presence, frequency, repetition)``."""
    return bind("sampling", "apply_penalties", SAMPLING_SIGNATURE, {}, override=override)


def bind_apply_token_mask(*, override: str | None = None) -> Bound:
    """Chooses ``fn(logits, mask, rows)``."""
    return bind("sampling", "apply_token_mask", SAMPLING_SIGNATURE, {}, override=override)


def bind_logprobs(*, override: str | None = None) -> Bound:
    """Chooses ``fn(logits, ids, k, out_logprob, top_ids, top_logprobs)``."""
    return bind("sampling", "logprobs", SAMPLING_SIGNATURE, {}, override=override)


def bind_has_nan(*, override: str | None = None) -> Bound:
    """Chooses ``fn(logits, out bool [S])``."""
    return bind("sampling", "has_nan", SAMPLING_SIGNATURE, {}, override=override)
