"""Page tables in the forms that wrapped libraries take, and their results in ours.

Ours (ops/attention.py): a table int32 [B, pages], lengths int32 [B], the first query of each row int32 [B + 1]. Nothing
here waits for the device but ``listed``, which says so.
"""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class PagedRows:
    """The rows of one call.

    Attributes:
        page_table: int32 [B, pages], its row stride its own.
        query_start: int32 [B + 1].
        seq_lens: int32 [B].
        page: tokens of a page.
        most: queries that a row has at most.
    """

    page_table: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    page: int
    most: int

    @property
    def count(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def longest(self) -> int:
        """Tokens that a row has at most, as far as the host knows."""
        return self.page_table.shape[1] * self.page


def uniform_rows(page_table: torch.Tensor, seq_lens: torch.Tensor, page: int, queries: int) -> PagedRows:
    """Rows that all have as many of ``queries`` queries, as a decode's do; B is at least 1."""
    width = queries // seq_lens.shape[0]
    starts = torch.arange(0, queries + 1, max(1, width), dtype=torch.int32, device=seq_lens.device)
    return PagedRows(page_table, starts[: seq_lens.shape[0] + 1], seq_lens, page, width)


def ragged_rows(
    page_table: torch.Tensor, query_start: torch.Tensor, seq_lens: torch.Tensor, page: int, queries: int
) -> PagedRows:
    """Rows as they stand in an extend."""
    return PagedRows(page_table, query_start, seq_lens, page, queries)


def single_queries(rows: PagedRows) -> PagedRows:
    """Rows of a decode as one row for each query, each as long as what its query sees."""
    width = rows.most
    behind = torch.arange(width - 1, -1, -1, dtype=torch.int32, device=rows.seq_lens.device)
    lengths = (rows.seq_lens.unsqueeze(1) - behind).clamp(min=0).flatten()
    table = rows.page_table.repeat_interleave(width, 0)
    return uniform_rows(table, lengths, rows.page, rows.count * width)


def without_unseen_pages(rows: PagedRows, window: int) -> PagedRows:
    """The rows without the pages before the first key of their first query, in a table made anew.

    Libraries that mask the keys before a window still load the tile they lie in, and multiply what the cache has
    dropped by a weight of 0. Positions count from the end, so that a window and causality stay what they were.
    """
    if window == 0:
        return rows
    widths = rows.query_start[1:] - rows.query_start[:-1]
    dropped = ((rows.seq_lens - widths - window + 1).clamp(min=0) // rows.page).to(torch.int32)
    pages = rows.page_table.shape[1]
    kept = min(pages, (window + rows.most) // rows.page + 2)
    places = dropped.unsqueeze(1) + torch.arange(kept, dtype=torch.int32, device=dropped.device)
    table = rows.page_table.gather(1, places.clamp(max=max(0, pages - 1)).long())
    return replace(rows, page_table=table, seq_lens=rows.seq_lens - dropped * rows.page)


def with_leading_row(rows: PagedRows) -> PagedRows:
    """The rows behind one without keys that has the queries before ``query_start[0]``: for libraries that find a row by
    its first query, and take the first of all for 0."""
    table = torch.cat([rows.page_table[:1], rows.page_table])
    lengths = torch.cat([rows.seq_lens.new_zeros(1), rows.seq_lens])
    starts = torch.cat([rows.query_start.new_zeros(1), rows.query_start])
    return replace(rows, page_table=table, seq_lens=lengths, query_start=starts)


@dataclass(frozen=True)
class ListedRows:
    """Rows as lists of pages, one row's behind the other's.

    Attributes:
        query_start, page_start: int32 [B + 1], on the host; both begin with 0.
        lengths: int32 [B], on the host.
        last_page: int32 [B], on the host: tokens of a row's last page, 0 of a row without pages.
        pages: int32 [page_start[B]], on the device.
        first_query, queries: the queries that belong to rows, of those of the call.
    """

    query_start: torch.Tensor
    page_start: torch.Tensor
    lengths: torch.Tensor
    last_page: torch.Tensor
    pages: torch.Tensor
    first_query: int
    queries: int


def listed(rows: PagedRows) -> ListedRows:
    """The same rows as lists. Waits for the device once: how many pages there are is known there only."""
    known = torch.cat([rows.query_start, rows.seq_lens]).cpu()
    starts, lengths = known[: rows.count + 1], known[rows.count + 1 :].clamp(min=0)
    counts = (lengths + rows.page - 1) // rows.page
    page_start = torch.zeros(rows.count + 1, dtype=torch.int32)
    torch.cumsum(counts, 0, dtype=torch.int32, out=page_start[1:])
    # The place of every page in the table, made on the host and sent over.
    owners = torch.repeat_interleave(torch.arange(rows.count), counts.long())
    places = torch.arange(owners.shape[0]) - page_start[:-1].long()[owners]
    device = rows.page_table.device
    pages = rows.page_table[owners.to(device), places.to(device)]
    first = int(starts[0])
    last_page = torch.where(counts > 0, lengths - (counts - 1) * rows.page, 0).to(torch.int32)
    return ListedRows(
        (starts - first).contiguous(),
        page_start,
        lengths.contiguous(),
        last_page,
        pages,
        first,
        int(starts[-1]) - first,
    )


@dataclass(frozen=True)
class SeenQueries:
    """Which queries of a call belong to a row, and which of those see a key; bool [T, 1] each."""

    belong: torch.Tensor
    see: torch.Tensor


def seen_queries(rows: PagedRows, queries: int) -> SeenQueries:
    """Of T = ``queries`` queries."""
    places = torch.arange(queries, dtype=torch.int32, device=rows.seq_lens.device)
    owners = torch.searchsorted(rows.query_start, places, right=True, out_int32=True) - 1
    belong = (owners >= 0) & (owners < rows.count)
    owners = owners.clamp(0, rows.count - 1)
    position = rows.seq_lens[owners] - rows.query_start[owners + 1] + places
    return SeenQueries(belong.unsqueeze(1), (belong & (position >= 0)).unsqueeze(1))


def settle(seen: SeenQueries, found: torch.Tensor, out: torch.Tensor, unseen: float = 0.0) -> None:
    """Writes what a library found to ``out``, both [T, H, D] or [T, H]: ``unseen`` for queries that see no key,
    whatever it found there; queries of no row keep what ``out`` has."""
    shape = (-1,) + (1,) * (out.dim() - 1)
    see, belong = seen.see.view(shape), seen.belong.view(shape)
    out.copy_(torch.where(see, found, torch.where(belong, unseen, out)))
