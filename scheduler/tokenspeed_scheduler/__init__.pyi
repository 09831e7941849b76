"""Types of the scheduler's binding (the module is C++20; see csrc/)."""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

class Role(IntEnum):
    FUSED = 0
    PREFILL = 1
    DECODE = 2

class State(IntEnum):
    """The twelve states, in the order of the transition table."""

    BOOTSTRAPPING = 0
    SUBMITTED = 1
    PREFETCHING = 2
    PREFILLING = 3
    REMOTE_PREFILLING = 4
    PREFILL_AWAITING_RESULT = 5
    PREFILL_DONE = 6
    DECODING = 7
    RETRACTED = 8
    RESTORING = 9
    FINISHING = 10
    FINISHED = 11

class RowKind(IntEnum):
    PREFILL = 0
    DECODE = 1

class InvalidTransition(RuntimeError):
    """An event that the transition table does not allow in that state; names event, state and request."""

class RequestRefused(ValueError):
    """A request that can never run here; the message names the bound and both figures."""

class CacheGroup:
    """One cache group. Errors (ValueError) name the group and the field."""

    def __init__(
        self,
        *,
        group_id: str,
        kind: str,
        block_granularity: int,
        children_per_parent: int = 1,
    ) -> None: ...
    @property
    def group_id(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def block_granularity(self) -> int: ...
    @property
    def children_per_parent(self) -> int: ...

class SchedulerConfig:
    """Everything the scheduler knows about its world, validated whole (ValueError names the field).

    Attributes:
        num_parents: parents in the pool, the null parent not counted.
        prefix_granularity: tokens of one prefix page; each group's block_granularity divides it.
        max_num_seqs: rows in the request pool (1-based rows 1..max_num_seqs).
        max_scheduled_tokens: the budget of a round; a prefill row costs its input length, a decode row its width.
        max_model_len: the longest prompt plus output.
        overlap_depth: 0 or 1 results may be out when the next round is planned.
        headroom_tokens: H of the headroom reserve for declared lengths.
        max_overtakes: how often the oldest prompt blocked for capacity may be overtaken by a newer one.
    """

    def __init__(
        self,
        *,
        role: Role = ...,
        groups: Sequence[CacheGroup],
        num_parents: int,
        prefix_granularity: int,
        max_num_seqs: int,
        max_scheduled_tokens: int,
        max_model_len: int,
        overlap_depth: int = 0,
        mixed_batches: bool = True,
        prefix_cache: bool = True,
        headroom_tokens: int = 4096,
        max_overtakes: int = 8,
    ) -> None: ...

class BlockTableDelta:
    """What changed in the block tables of one group: n entries, each replaces ids from a first slot on.

    All arrays are int32. ``row`` [n] pool row; ``first_slot`` [n]; ``count`` [n] ids of the entry; ``version_from`` and
    ``version_to`` [n] (a table starts at version 0 when its row begins and every delta raises it by one; a table after
    the delta has first_slot + count slots); ``ids`` [sum(count)] block ids, 0 is the null block.
    """

    @property
    def row(self) -> NDArray[np.int32]: ...
    @property
    def first_slot(self) -> NDArray[np.int32]: ...
    @property
    def count(self) -> NDArray[np.int32]: ...
    @property
    def version_from(self) -> NDArray[np.int32]: ...
    @property
    def version_to(self) -> NDArray[np.int32]: ...
    @property
    def ids(self) -> NDArray[np.int32]: ...

class PlanAbort:
    """A request the scheduler ended by itself. ``detail`` has the figures and the knob.

    ``reason`` is "capacity" (it outgrew the whole pool) or "failed" (one of its rows failed, or a row that samples
    brought no token, and nobody ended it before the next plan).
    """

    @property
    def handle(self) -> int: ...
    @property
    def reason(self) -> str: ...
    @property
    def detail(self) -> str: ...

class Plan:
    """One round. Arrays are read-only int32 views that keep the plan alive; prefills first, then decodes.

    Attributes:
        forward_id: rises by one with every plan that has rows; results are reported under it. 0 for an empty plan.
        num_rows: rows of the batch, may be 0 (then no result is expected; deltas may still be there).
        handle, row, kind, input_len, prefix_len, prompt_len, samples: [num_rows]. ``row`` is the pool row;
            ``input_len`` tokens are computed at positions prefix_len .. prefix_len + input_len - 1; ``prompt_len`` is
            the length of what is prefilled (the prompt, and after a retraction the output so far too); ``samples`` is
            1 where a token is to be sampled after the last input token.
        input_ids: [sum(input_len)]; -1 is that row's last sampled token, still on the device.
        starts: indices of the rows that begin (first chunk of a request in a pool row; prefix_len is then what the
            prefix cache gave).
        tables: one BlockTableDelta a cache group, in the order of the configuration. They apply before the batch.
        zero_blocks: per group, int32 block ids to zero before the batch (only where a group asks for it).
        copy_blocks: per group, int32 [n, 2] (source, target).
        aborts: requests the scheduler ended in this round.
    """

    @property
    def forward_id(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def handle(self) -> NDArray[np.int32]: ...
    @property
    def row(self) -> NDArray[np.int32]: ...
    @property
    def kind(self) -> NDArray[np.int32]: ...
    @property
    def input_len(self) -> NDArray[np.int32]: ...
    @property
    def prefix_len(self) -> NDArray[np.int32]: ...
    @property
    def prompt_len(self) -> NDArray[np.int32]: ...
    @property
    def samples(self) -> NDArray[np.int32]: ...
    @property
    def input_ids(self) -> NDArray[np.int32]: ...
    @property
    def starts(self) -> NDArray[np.int32]: ...
    @property
    def tables(self) -> list[BlockTableDelta]: ...
    @property
    def zero_blocks(self) -> list[NDArray[np.int32]]: ...
    @property
    def copy_blocks(self) -> list[NDArray[np.int32]]: ...
    @property
    def aborts(self) -> list[PlanAbort]: ...

class ForwardResult:
    """The result of one plan: ``tokens`` int32 [num_rows] (-1: none), ``failed`` uint8 [num_rows] or None.

    A failed row publishes nothing that this forward filled. Every row of a plan that sampled nothing still reports
    (an intermediate chunk lands with an empty result).
    """

    def __init__(self, forward_id: int, tokens: NDArray[np.int32], failed: NDArray[np.uint8] | None = None) -> None: ...

class Finish:
    """The request ended (stop token, length, stop string). With a forward out it goes through Finishing."""

    def __init__(self, handle: int) -> None: ...

class Abort:
    """The request is not wanted any more. Never refused; with a forward out it goes through Finishing."""

    def __init__(self, handle: int) -> None: ...

Event = ForwardResult | Finish | Abort

class GroupCounts:
    @property
    def group_id(self) -> str: ...
    @property
    def total(self) -> int: ...
    @property
    def held(self) -> int: ...
    @property
    def cached(self) -> int: ...
    @property
    def free(self) -> int: ...
    @property
    def pinned(self) -> int: ...

class Snapshot:
    """Counts of one moment. ``states``: int64 [12], -1 where the role has no such state, Finished cumulative.

    ``flows``: list of (source, target, count) by State value. ``running`` counts requests that own a device bundle
    and are not Finishing, ``waiting`` those that wait for a first or another chance. ``overtakes`` counts prompts that
    passed the oldest one blocked for capacity, ``evictions`` cached blocks that gave way.
    """

    @property
    def round(self) -> int: ...
    @property
    def states(self) -> NDArray[np.int64]: ...
    @property
    def groups(self) -> list[GroupCounts]: ...
    @property
    def flows(self) -> list[tuple[int, int, int]]: ...
    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def live(self) -> int: ...
    @property
    def retractions(self) -> int: ...
    @property
    def ignored_results(self) -> int: ...
    @property
    def prefix_query_tokens(self) -> int: ...
    @property
    def prefix_hit_tokens(self) -> int: ...
    @property
    def prefill_tokens(self) -> int: ...
    @property
    def decode_tokens(self) -> int: ...
    @property
    def overtakes(self) -> int: ...
    @property
    def evictions(self) -> int: ...

class RequestRow:
    @property
    def handle(self) -> int: ...
    @property
    def state(self) -> State: ...
    @property
    def age_rounds(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def computed_tokens(self) -> int: ...
    @property
    def generated_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def retractions(self) -> int: ...
    @property
    def reason(self) -> str: ...

class Scheduler:
    """The control plane's mind. One thread calls it; ``plan`` and ``advance`` release the GIL."""

    def __init__(self, config: SchedulerConfig) -> None: ...
    def submit(
        self,
        handle: int,
        prompt: NDArray[np.int32],
        *,
        max_new_tokens: int,
        declared: bool = True,
        priority: int = 0,
        namespace: bytes = b"",
        max_cached_prefix_tokens: int = -1,
    ) -> None:
        """Queues a request. Raises RequestRefused where it can never fit, ValueError for the handle of a request that
        is alive, an empty prompt or a negative token. Larger priorities go first, age breaks ties. The scheduler stops
        giving a request decode rows once max_new_tokens are scheduled."""

    def advance(self, events: Sequence[Event]) -> None:
        """Applies a batch of events, validated whole before any is applied. Results of an unknown or repeated
        forward_id, and events of an unknown or ended handle, are ignored and counted. Raises ValueError, and is as it
        was, for a result with the wrong number of rows or before the results of earlier plans."""

    def plan(self) -> Plan:
        """Plans the next round. The plan must be executed exactly once, in order."""

    def snapshot(self) -> Snapshot: ...
    def requests(self, limit: int = 200) -> list[RequestRow]:
        """The live requests, the oldest first."""

    def has_work(self) -> bool:
        """Whether any request is alive."""

    def max_single_request_tokens(self) -> int:
        """The largest prompt plus output that one request, alone in the pool, can have."""

    def check_invariants(self) -> None:
        """Walks everything and raises RuntimeError where an invariant is broken. For tests; not cheap."""

def single_request_bound(config: SchedulerConfig) -> int:
    """The same arithmetic before a scheduler exists: for the memory plan."""

def transition_table() -> list[tuple[str, str, list[str]]]:
    """(state, event, successors) for every legal pair, by name: the one table, for docs, dashboard and tests."""
