"""The operations of sampling on the device; contracts in tokenspeed_kernel.ops.sampling.

A row is a program's alone (or stretches of it are), so its result depends on no other. Nothing is sorted: cuts are
found by bisection, a pass over the row each, about 32 of them for a cut and 18 more where values tie.
"""

import torch

from tokenspeed_kernel_triton.loading import Launch

BLOCK = 2048
"""Elements of a row at a time."""

_WARPS = 8


def _grid(logits: torch.Tensor) -> tuple[int, int]:
    return logits.shape[0], -(-logits.shape[1] // BLOCK)


def _by_row(function: str, logits: torch.Tensor, *arguments: object) -> Launch:
    return Launch("sampling", function, (logits.shape[0],), (logits, *arguments), {"BLOCK": BLOCK}, _WARPS)


def _by_stretch(function: str, logits: torch.Tensor, *arguments: object) -> Launch:
    return Launch("sampling", function, _grid(logits), (logits, *arguments), {"BLOCK": BLOCK}, _WARPS)


def sample_of(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    choice: torch.Tensor,
    position: torch.Tensor,
    out: torch.Tensor,
) -> Launch:
    """The launch that draws a token for each row."""
    rules = (temperature, top_k, top_p, min_p, seed, choice, position)
    return _by_row("sample", logits, *rules, out, logits.shape[1])


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
    if logits.shape[0]:
        sample_of(logits, temperature, top_k, top_p, min_p, seed, choice, position, out).run()


def apply_penalties_of(
    logits: torch.Tensor,
    counts: torch.Tensor,
    prompt_mask: torch.Tensor,
    rows: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> Launch:
    """The launch of penalties."""
    penalties = (counts, prompt_mask.view(torch.uint8), rows, presence, frequency, repetition)
    return _by_stretch("apply_penalties", logits, *penalties, logits.shape[1])


def apply_penalties(
    logits: torch.Tensor,
    counts: torch.Tensor,
    prompt_mask: torch.Tensor,
    rows: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    """sampling.apply_penalties."""
    if logits.shape[0]:
        apply_penalties_of(logits, counts, prompt_mask, rows, presence, frequency, repetition).run()


def apply_token_mask_of(logits: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> Launch:
    """The launch of a grammar's mask."""
    return _by_stretch("apply_token_mask", logits, mask, rows, logits.shape[1], mask.shape[1])


def apply_token_mask(logits: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> None:
    """sampling.apply_token_mask."""
    if logits.shape[0]:
        apply_token_mask_of(logits, mask, rows).run()


def logprobs_of(
    logits: torch.Tensor,
    ids: torch.Tensor,
    k: int,
    out_logprob: torch.Tensor,
    top_ids: torch.Tensor,
    top_logprobs: torch.Tensor,
) -> Launch:
    """The launch of log-probabilities; a pass over the row for each of the k best."""
    return _by_row("logprobs", logits, ids, out_logprob, top_ids, top_logprobs, logits.shape[1], k)


def logprobs(
    logits: torch.Tensor,
    ids: torch.Tensor,
    k: int,
    out_logprob: torch.Tensor,
    top_ids: torch.Tensor,
    top_logprobs: torch.Tensor,
) -> None:
    """sampling.logprobs."""
    if logits.shape[0]:
        logprobs_of(logits, ids, k, out_logprob, top_ids, top_logprobs).run()


def has_nan_of(logits: torch.Tensor, out: torch.Tensor) -> Launch:
    """The launch that looks for NaN."""
    return _by_row("has_nan", logits, out, logits.shape[1])


def has_nan(logits: torch.Tensor, out: torch.Tensor) -> None:
    """sampling.has_nan."""
    if logits.shape[0]:
        has_nan_of(logits, out).run()
