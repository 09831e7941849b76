"""sampling.verify and sampling.verify_proposals on the device; contracts in tokenspeed_kernel.ops.verify."""

import torch

from tokenspeed_kernel_triton.loading import Launch
from tokenspeed_kernel_triton.sampling import BLOCK

NODES = 64
"""Nodes of a row that are looked at together."""

_WARPS = 8


def verify_of(
    drawn: torch.Tensor,
    drafted: torch.Tensor,
    parents: torch.Tensor,
    starts: torch.Tensor,
    path: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
) -> Launch:
    """The launch of the walk along drawn tokens."""
    rows, width = path.shape
    arguments = (drawn, drafted, parents, starts, path, tokens, counts, width)
    return Launch("verify", "verify", (rows,), arguments, {"BLOCK": NODES}, warps=1)


def verify(
    drawn: torch.Tensor,
    drafted: torch.Tensor,
    parents: torch.Tensor,
    starts: torch.Tensor,
    path: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """sampling.verify."""
    if path.shape[0]:
        verify_of(drawn, drafted, parents, starts, path, tokens, counts).run()


def verify_proposals_of(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    choice: torch.Tensor,
    position: torch.Tensor,
    proposals: torch.Tensor,
    drafted: torch.Tensor,
    parents: torch.Tensor,
    starts: torch.Tensor,
    path: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
) -> Launch:
    """The launch of the walk by rejection."""
    rows, width = path.shape
    rules = (temperature, top_k, top_p, min_p, seed, choice, position)
    tree = (drafted, parents, starts, path, tokens, counts)
    arguments = (logits, *rules, proposals, *tree, proposals.stride(0), logits.shape[1], width)
    return Launch("verify", "verify_proposals", (rows,), arguments, {"BLOCK": BLOCK}, _WARPS)


def verify_proposals(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    choice: torch.Tensor,
    position: torch.Tensor,
    proposals: torch.Tensor,
    drafted: torch.Tensor,
    parents: torch.Tensor,
    starts: torch.Tensor,
    path: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """sampling.verify_proposals."""
    if path.shape[0]:
        rules = (temperature, top_k, top_p, min_p, seed, choice, position)
        verify_proposals_of(logits, *rules, proposals, drafted, parents, starts, path, tokens, counts).run()
