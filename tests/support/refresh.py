"""Prepares attention backends for rows of a small pool, as the runner does."""

import torch

from tokenspeed.device.attention.backend import AttentionBackend, ForwardMode

Tables = torch.Tensor | dict[str, torch.Tensor]


def by_group(tables: Tables) -> dict[str, torch.Tensor]:
    return tables if isinstance(tables, dict) else {"g": tables}


def decode(
    backend: AttentionBackend, tables: Tables, rows: list[int], lengths: list[int], bs: int, *, replay: bool = False
) -> None:
    backend.refresh_decode_metadata(
        bs,
        len(rows),
        torch.tensor(rows, dtype=torch.int64),
        torch.tensor(lengths, dtype=torch.int32),
        forward_mode=ForwardMode.DECODE,
        block_tables=by_group(tables),
        for_graph_replay=replay,
    )


def extend(backend: AttentionBackend, tables: Tables, rows: list[int], new: list[int], old: list[int]) -> None:
    lengths, prefixes = torch.tensor(new, dtype=torch.int32), torch.tensor(old, dtype=torch.int32)
    backend.refresh_extend_metadata(
        len(rows),
        torch.tensor(rows, dtype=torch.int64),
        forward_mode=ForwardMode.EXTEND,
        block_tables=by_group(tables),
        extend_seq_lens=lengths,
        extend_seq_lens_cpu=lengths,
        extend_prefix_lens=prefixes,
        extend_prefix_lens_cpu=prefixes,
        extend_with_prefix=any(old),
        query_shard=None,
    )
