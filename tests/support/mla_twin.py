"""The MLA decode kernel once more, in PyTorch and float32: the same blocks, steps, halves and places, block by block.

It shares the arithmetic of places (tokenspeed_mla.addressing) and the plan with the kernel, and nothing else, so that
what they say can be tried on many shapes. The machine code itself is run by ptx_machine, on fewer.
"""

from dataclasses import replace

import torch

from tokenspeed_mla import DecodePlan
from tokenspeed_mla.addressing import LATENT, TILE_KEYS, TILE_ROWS, WIDTH, ceil_div, page_of, split_keys, visible_keys
from tokenspeed_mla.decode import by_group, split_workspace

HALVES = 2


def decode(
    plan: DecodePlan,
    q: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """mla_decode by its plan: out [B, q_len, H, 512] and lse [B, q_len, H]."""
    out, lse = torch.full((*q.shape[:3], LATENT), torch.nan), torch.full(q.shape[:3], torch.nan)
    whole_out, whole_lse = by_group(replace(plan, splits=1), out, lse)
    if plan.splits == 1:
        parts, parts_lse = whole_out, whole_lse
    else:
        parts, parts_lse = split_workspace(plan, torch.full((plan.workspace_bytes // 4,), torch.nan))
    groups = q.view(plan.batch * plan.groups, plan.rows, WIDTH)
    for split in range(plan.splits):
        for group in range(plan.batch * plan.groups):
            for tile in range(plan.grid[0]):
                _block(plan, groups, cache, table, seq_lens, scale, (tile, group, split), parts, parts_lse)
    if plan.splits > 1:
        _merge(parts[:, :, : plan.rows], parts_lse[:, :, : plan.rows], whole_out[0], whole_lse[0])
    return out, lse


def _block(
    plan: DecodePlan,
    groups: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    position: tuple[int, int, int],
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    tile, request_group, split = position
    request, group = divmod(request_group, plan.groups)
    seq_len, page_size, first_token = int(seq_lens[request]), cache.shape[1], group * plan.fold
    first, share = split_keys(seq_len, page_size, split, plan.splits)
    stop = min(first + share, visible_keys(seq_len, plan.q_len, first_token + plan.fold - 1))
    steps = ceil_div(max(stop - first, 0), TILE_KEYS)

    rows = torch.arange(TILE_ROWS) + tile * TILE_ROWS
    there = int((rows < plan.rows).sum())
    queries = torch.zeros(TILE_ROWS, WIDTH)  # TMA's zeros beyond the group
    queries[:there] = groups[request_group, tile * TILE_ROWS :][:there]
    seen = visible_keys(seq_len, plan.q_len, first_token + rows // plan.heads)
    ends = torch.minimum(torch.tensor(stop), seen) - first

    sums, total = torch.zeros(TILE_ROWS, LATENT), torch.zeros(TILE_ROWS)
    most = torch.full((TILE_ROWS,), -torch.inf)
    for step in range(steps):
        stage = _stage(cache, table[request], first + step * TILE_KEYS, stop)
        keys = torch.arange(TILE_KEYS) + step * TILE_KEYS
        scores = torch.where(keys < ends[:, None], queries @ stage.T, -torch.inf)
        new = torch.maximum(most, scores.amax(dim=1))
        base = torch.where(torch.isneginf(new), 0.0, new)
        shrink = torch.exp((most - base) * scale)
        weights = torch.exp((scores - base[:, None]) * scale)
        most, total = new, total * shrink + weights.sum(dim=1)
        stage[max(stop - first - step * TILE_KEYS, 0) :] = 0.0
        sums = sums * shrink[:, None] + weights @ stage[:, :LATENT]

    empty = total == 0.0
    result = sums / torch.where(empty, 1.0, total)[:, None]
    out[split, request_group, rows[:there]] = result[:there]
    lse[split, request_group, rows[:there]] = torch.where(empty, -torch.inf, most * scale + total.log())[:there]


def _stage(cache: torch.Tensor, pages: torch.Tensor, position: int, stop: int) -> torch.Tensor:
    """The keys of a step as they lie in shared memory: box by box, those from ``stop`` on of the null page."""
    page_size = cache.shape[1]
    box_keys = min(page_size, TILE_KEYS)
    boxes = []
    for start in range(position, position + TILE_KEYS, box_keys):
        index, box = page_of(start, page_size, box_keys)
        page = int(pages[index]) if start < stop else 0
        boxes.append(cache[page, box * box_keys : (box + 1) * box_keys].float())
    return torch.cat(boxes)


def _merge(parts: torch.Tensor, parts_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """kernels/merge.py."""
    most = parts_lse.amax(dim=0)
    sums, total = torch.zeros_like(out), torch.zeros_like(lse)
    for part, part_lse in zip(parts, parts_lse, strict=True):
        used = ~torch.isneginf(part_lse)
        weight = torch.where(used, torch.exp(part_lse - torch.where(used, most, 0.0)), 0.0)
        total += weight
        sums += torch.where(used[..., None], part, 0.0) * weight[..., None]
    empty = total == 0.0
    out.copy_(sums / torch.where(empty, 1.0, total)[..., None])
    lse.copy_(torch.where(empty, -torch.inf, most + total.log()))
