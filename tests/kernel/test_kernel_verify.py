"""Drafted tokens change how many tokens come at once, not which ones, and by rejection not how likely each is."""

import torch

from tokenspeed_kernel.ops.sampling import reference_sample
from tokenspeed_kernel.ops.verify import reference_verify, reference_verify_proposals

ROWS, TOKENS = 1000, 5
SIGMAS = 5.0


def outputs(rows: int, width: int) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=torch.int32) for shape in ((rows, width), (rows, width), (rows,))]


def rules(nodes: int) -> list[torch.Tensor]:
    """Plain sampling, a seed of its own for each node."""
    ones, zeros = torch.ones(nodes), torch.zeros(nodes, dtype=torch.int32)
    return [ones, zeros, ones, torch.zeros(nodes), torch.arange(nodes, dtype=torch.int64), zeros, zeros]


def test_the_drawn_walk_is_what_decoding_one_by_one_gives() -> None:
    """A chain of which the first two drafts are right: three tokens at once, those of three decodes."""
    torch.manual_seed(20261130)
    logits, drawn = torch.randn(4, TOKENS), torch.empty(4, dtype=torch.int32)
    reference_sample(logits.clone(), *rules(4), drawn)
    drafted = torch.cat([drawn[:1], drawn[:2], 1 + drawn[2:3]])
    chain, starts = torch.tensor([-1, 0, 1, 2], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32)
    path, tokens, counts = outputs(1, 4)
    reference_verify(drawn, drafted, chain, starts, path, tokens, counts)
    assert tokens.tolist() == [[*drawn[:3].tolist(), -1]] and counts.tolist() == [3]


def test_rejection_keeps_the_distribution_and_accepts_more_than_matching_would() -> None:
    """Three siblings from proposals far from the model's: the token at the root is as likely as if none were there."""
    generator = torch.Generator().manual_seed(20261130)
    wanted = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0])
    proposed = torch.tensor([0.1, 0.1, 0.2, 0.3, 0.3])
    tree = torch.tensor([-1, 0, 0, 0], dtype=torch.int32)
    drafted = torch.multinomial(proposed, 4 * ROWS, replacement=True, generator=generator).to(torch.int32)
    logits = wanted.log().repeat(4 * ROWS, 1)
    starts = torch.arange(0, 4 * ROWS + 1, 4, dtype=torch.int32)
    path, tokens, counts = outputs(ROWS, 2)
    call = (logits, *rules(4 * ROWS), proposed.repeat(4 * ROWS, 1), drafted, tree.repeat(ROWS), starts)
    reference_verify_proposals(*call, path, tokens, counts)
    found = torch.bincount(tokens[:, 0], minlength=TOKENS) / ROWS
    assert bool(((found - wanted).abs() <= SIGMAS * (wanted * (1 - wanted) / ROWS).sqrt()).all()), found
    first_alone = float(torch.minimum(wanted, proposed).sum())
    assert float((counts == 2).float().mean()) > first_alone > float((wanted * proposed).sum())
