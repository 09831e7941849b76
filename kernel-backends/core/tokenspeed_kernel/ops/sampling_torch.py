"""The operations of sampling by PyTorch over all rows at once: for devices that have no kernel of their own for them.

The references go row by row and wait for the device at each; nothing here does. Rows are sorted whole. The contracts
are those of sampling.py. What a device's sums round to may depend on the number of rows, so nothing is promised of it.
"""

import torch

from tokenspeed_kernel.ops.sampling import (
    SAMPLING_SIGNATURE,
    reference_apply_penalties,
    reference_has_nan,
)
from tokenspeed_kernel.registry import Band, KernelFunction, KernelSpec, register_kernel

_GOLDEN, _MIX_1, _MIX_2 = (value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""As int64, whose products wrap as those of unsigned numbers do."""


def _shifted(h: torch.Tensor, bits: int) -> torch.Tensor:
    """The bits of int64 shifted down, zeros above."""
    return (h >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(h: torch.Tensor) -> torch.Tensor:
    h = (h ^ _shifted(h, 30)) * _MIX_1
    h = (h ^ _shifted(h, 27)) * _MIX_2
    return h ^ _shifted(h, 31)


def uniforms(seed: torch.Tensor, choice: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """sampling.uniform of each row, float32."""
    h = _mixed(seed + _GOLDEN)
    h = _mixed((h ^ choice.long()) + _GOLDEN)
    h = _mixed((h ^ position.long()) + _GOLDEN)
    return (_shifted(h, 40).float() + 0.5) * 2.0**-24


def sample(
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
    """sampling.sample."""
    rows, vocabulary = logits.shape
    if not rows:
        return
    greedy = top_k == 1
    z = logits / torch.where(greedy, 1.0, temperature).unsqueeze(1)
    ordered = torch.sort(torch.where(torch.isnan(z), -torch.inf, z), dim=1, descending=True, stable=True)
    highest = ordered.values[:, :1].double()
    place = torch.arange(vocabulary, device=logits.device)
    weights = torch.exp(ordered.values.double() - highest)
    running = torch.cumsum(weights, dim=1)
    # each cut keeps the candidates before a place, so that places are all there is to keep
    kept = torch.where((top_k > 0) & (top_k < vocabulary), top_k, vocabulary).long()
    mass = top_p.double() * running.gather(1, kept.unsqueeze(1) - 1).squeeze(1)
    within = ((running[:, :-1] < mass.unsqueeze(1)) & (place[1:] < kept.unsqueeze(1))).sum(dim=1) + 1
    kept = torch.where(top_p < 1.0, within, kept)
    likely = ((weights >= min_p.double().unsqueeze(1)) & (place < kept.unsqueeze(1))).sum(dim=1).clamp(min=1)
    kept = torch.where(min_p > 0.0, likely, kept)
    target = uniforms(seed, choice, position).double() * running.gather(1, kept.unsqueeze(1) - 1).squeeze(1)
    drawn = ((running < target.unsqueeze(1)).sum(dim=1)).minimum(kept - 1)
    drawn.masked_fill_(greedy | torch.isinf(highest.squeeze(1)), 0)
    out.copy_(ordered.indices.gather(1, drawn.unsqueeze(1)).squeeze(1))


def apply_token_mask(logits: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> None:
    """sampling.apply_token_mask."""
    if not logits.shape[0] or not mask.shape[0]:
        return
    words = mask[rows.clamp(min=0).long()].unsqueeze(2)
    allowed = (words >> torch.arange(32, dtype=torch.int32, device=mask.device)) & 1
    forbidden = (allowed.flatten(1)[:, : logits.shape[1]] == 0) & (rows >= 0).unsqueeze(1)
    logits.masked_fill_(forbidden, -torch.inf)


def logprobs(
    logits: torch.Tensor,
    ids: torch.Tensor,
    k: int,
    out_logprob: torch.Tensor,
    top_ids: torch.Tensor,
    top_logprobs: torch.Tensor,
) -> None:
    """sampling.logprobs."""
    normaliser = torch.logsumexp(logits, dim=1, keepdim=True)
    out_logprob.copy_((logits.gather(1, ids.long().unsqueeze(1)) - normaliser).squeeze(1))
    if k:
        ordered = torch.sort(logits, dim=1, descending=True, stable=True)
        top_ids.copy_(ordered.indices[:, :k])
        top_logprobs.copy_(ordered.values[:, :k] - normaliser)


def _register(mode: str, kernel: KernelFunction) -> None:
    spec = KernelSpec(
        name=f"torch_sampling_{mode}",
        family="sampling",
        mode=mode,
        solution="torch",
        signatures=frozenset({SAMPLING_SIGNATURE}),
        band=Band.PORTABLE,
    )
    register_kernel(spec)(kernel)


# These two have no loop over rows as they are.
_register("has_nan", reference_has_nan)
_register("apply_penalties", reference_apply_penalties)
_register("apply_token_mask", apply_token_mask)
_register("sample", sample)
_register("logprobs", logprobs)
