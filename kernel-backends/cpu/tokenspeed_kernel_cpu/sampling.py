"""The operations of sampling; contract in tokenspeed_kernel.ops.sampling."""

import torch

from tokenspeed_kernel_cpu import _native
from tokenspeed_kernel_cpu.checks import KernelArgumentError, checked, expect, expect_range


def _check_sample(
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
    rows = logits.shape[:1]
    expect("logits", logits, torch.float32, logits.shape[:2])
    for name, tensor in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        expect(name, tensor, torch.float32, rows)
    for name, tensor in (("top_k", top_k), ("choice", choice), ("position", position), ("out", out)):
        expect(name, tensor, torch.int32, rows)
    expect("seed", seed, torch.int64, rows)


def _check_penalties(
    logits: torch.Tensor,
    counts: torch.Tensor,
    prompt_mask: torch.Tensor,
    rows: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    expect("logits", logits, torch.float32, logits.shape[:2])
    expect("counts", counts, torch.int32, (counts.shape[0], logits.shape[1]))
    expect("prompt_mask", prompt_mask, (torch.bool, torch.uint8), counts.shape)
    expect("rows", rows, torch.int32, logits.shape[:1])
    expect_range("rows", rows, 0, counts.shape[0])
    for name, tensor in (("presence", presence), ("frequency", frequency), ("repetition", repetition)):
        expect(name, tensor, torch.float32, logits.shape[:1])


def _check_token_mask(logits: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> None:
    expect("logits", logits, torch.float32, logits.shape[:2])
    expect("mask", mask, torch.int32, (mask.shape[0], -(-logits.shape[1] // 32)))
    expect("rows", rows, torch.int32, logits.shape[:1])
    expect_range("rows", rows, -1, mask.shape[0])


def _check_logprobs(
    logits: torch.Tensor,
    ids: torch.Tensor,
    k: int,
    out_logprob: torch.Tensor,
    top_ids: torch.Tensor,
    top_logprobs: torch.Tensor,
) -> None:
    rows, vocabulary = logits.shape
    expect("logits", logits, torch.float32, (rows, vocabulary))
    expect("ids", ids, torch.int32, (rows,))
    expect_range("ids", ids, 0, vocabulary)
    if not 0 <= k <= vocabulary:
        raise KernelArgumentError(f"k is {k}; it must be 0 to {vocabulary}")
    expect("out_logprob", out_logprob, torch.float32, (rows,))
    expect("top_ids", top_ids, torch.int32, (rows, k))
    expect("top_logprobs", top_logprobs, torch.float32, (rows, k))


def _check_has_nan(logits: torch.Tensor, out: torch.Tensor) -> None:
    expect("logits", logits, torch.float32, logits.shape[:2])
    expect("out", out, torch.bool, logits.shape[:1])


@checked(_check_sample)
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
    """Draws one token a row. Rows that are not greedy have their logits overwritten."""
    _native.sample(
        logits.data_ptr(),
        logits.size(0),
        logits.size(1),
        temperature.data_ptr(),
        top_k.data_ptr(),
        top_p.data_ptr(),
        min_p.data_ptr(),
        seed.data_ptr(),
        choice.data_ptr(),
        position.data_ptr(),
        out.data_ptr(),
    )


@checked(_check_penalties)
def apply_penalties(
    logits: torch.Tensor,
    counts: torch.Tensor,
    prompt_mask: torch.Tensor,
    rows: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    """Repetition, frequency and presence penalties, in place."""
    _native.apply_penalties(
        logits.data_ptr(),
        logits.size(0),
        logits.size(1),
        counts.data_ptr(),
        prompt_mask.data_ptr(),
        rows.data_ptr(),
        presence.data_ptr(),
        frequency.data_ptr(),
        repetition.data_ptr(),
    )


@checked(_check_token_mask)
def apply_token_mask(logits: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> None:
    """-inf for the tokens that a mask leaves out, in place; rows of -1 are left alone."""
    _native.apply_token_mask(logits.data_ptr(), logits.size(0), logits.size(1), mask.data_ptr(), rows.data_ptr())


@checked(_check_logprobs)
def logprobs(
    logits: torch.Tensor,
    ids: torch.Tensor,
    k: int,
    out_logprob: torch.Tensor,
    top_ids: torch.Tensor,
    top_logprobs: torch.Tensor,
) -> None:
    """Log-probabilities of the given ids and of the k best."""
    _native.logprobs(
        logits.data_ptr(),
        logits.size(0),
        logits.size(1),
        ids.data_ptr(),
        k,
        out_logprob.data_ptr(),
        top_ids.data_ptr(),
        top_logprobs.data_ptr(),
    )


@checked(_check_has_nan)
def has_nan(logits: torch.Tensor, out: torch.Tensor) -> None:
    """Whether each row holds a NaN."""
    _native.has_nan(logits.data_ptr(), logits.size(0), logits.size(1), out.data_ptr())
