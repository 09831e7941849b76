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

class OperationKind(IntEnum):
    """What a cache operation does with its blocks; see CacheOperation."""

    WRITE_BACK = 0
    IMAGE_SAVE = 1
    LOAD_BACK = 2
    RESTORE = 3
    STORAGE_QUERY = 4
    STORAGE_FETCH = 5
    STORAGE_PUT = 6
    HAND_OFF = 7
    REMOTE_PREFILL = 8

class InvalidTransition(RuntimeError):
    """An event that the transition table does not allow in that state; names event, state and request."""

class RequestRefused(ValueError):
    """A request that can never run here; the message names the bound and both figures."""

class CacheGroup:
    """One cache group. Errors (ValueError) name the group and the field.

    Attributes:
        kind: "full_history", "sliding_window" or "state".
        block_granularity: tokens of one block; history kinds only, a state group has no rows.
        children_per_parent: blocks in one parent.
        sliding_window_tokens: W of a sliding window: a token sees itself and the W - 1 before it. Else 0.
        checkpoint_granularity: state groups only: a state is kept at multiples of this many tokens, which are
            multiples of prefix_granularity. Else 0.
    """

    def __init__(
        self,
        *,
        group_id: str,
        kind: str,
        block_granularity: int = 0,
        children_per_parent: int = 1,
        sliding_window_tokens: int = 0,
        checkpoint_granularity: int = 0,
    ) -> None: ...
    @property
    def group_id(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def block_granularity(self) -> int: ...
    @property
    def children_per_parent(self) -> int: ...
    @property
    def sliding_window_tokens(self) -> int: ...
    @property
    def checkpoint_granularity(self) -> int: ...

class SchedulerConfig:
    """Everything the scheduler knows about its world, validated whole (ValueError names the field).

    Attributes:
        num_parents: parents in the device pool, the null parent not counted.
        prefix_granularity: tokens of one prefix page; each group's block_granularity divides it.
        max_num_seqs: rows in the request pool (1-based rows 1..max_num_seqs).
        max_scheduled_tokens: the budget of a round; a prefill row costs its input length, a decode row its width.
        max_model_len: the longest prompt plus output.
        overlap_depth: 0 or 1 results may be out when the next round is planned.
        headroom_tokens: H of the headroom reserve for declared lengths.
        max_overtakes: how often the oldest prompt blocked for capacity may be overtaken by a newer one.
        host_parents: parents in the host pool, the null parent not counted; 0 for none. They hold the images of
            retracted requests and, with host_cache, written-back prefix blocks.
        host_cache: write published blocks back to the host pool and load them from there.
        storage: look prompts up in the storage tier before they are admitted, and put written-back blocks there.
        storage_min_tokens: prompts with fewer tokens beyond device and host are not looked up.
        storage_timeout_ticks: a lookup that takes longer is not waited for (ticks of the Tick event).
        storage_max_operations: storage operations that may be out at once.
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
        host_parents: int = 0,
        host_cache: bool = True,
        storage: bool = False,
        storage_min_tokens: int = 0,
        storage_timeout_ticks: int = 5000,
        storage_max_operations: int = 16,
    ) -> None: ...
    @property
    def role(self) -> Role: ...
    @property
    def groups(self) -> list[CacheGroup]: ...
    @property
    def num_parents(self) -> int: ...
    @property
    def prefix_granularity(self) -> int: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_scheduled_tokens(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def overlap_depth(self) -> int: ...
    @property
    def mixed_batches(self) -> bool: ...
    @property
    def prefix_cache(self) -> bool: ...
    @property
    def headroom_tokens(self) -> int: ...
    @property
    def max_overtakes(self) -> int: ...
    @property
    def host_parents(self) -> int: ...
    @property
    def host_cache(self) -> bool: ...
    @property
    def storage(self) -> bool: ...
    @property
    def storage_min_tokens(self) -> int: ...
    @property
    def storage_timeout_ticks(self) -> int: ...
    @property
    def storage_max_operations(self) -> int: ...

class BlockTableDelta:
    """What changed in the block tables of one group: n entries, each replaces ids from a first slot on.

    All arrays are int32. ``row`` [n] pool row; ``first_slot`` [n]; ``count`` [n] ids of the entry; ``version_from`` and
    ``version_to`` [n] (a table starts at version 0 when its row begins and every delta raises it by one; a table after
    the delta has first_slot + count slots); ``ids`` [sum(count)] block ids, 0 is the null block.

    A sliding window's slots before the window are null. A state group's table has two slots, input and live: a forward
    reads its initial state from the input where that is not null, else from the live block (zeros where prefix_len is
    0), and writes its final state to the live block.
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

class CacheOperation:
    """Blocks that move between tiers. All arrays have one entry a block; ids are per group, parent 0 is null.

    What ``source`` and ``target`` are, by ``kind``:
        WRITE_BACK: device to host; the target becomes a host hit once OperationDone came.
        IMAGE_SAVE: device to host, for the image of the retracted ``handle``.
        LOAD_BACK: host to device, for the first chunk of ``handle`` in the same plan.
        RESTORE: host to device, for ``handle``, which runs again once OperationDone came.
        STORAGE_QUERY: no blocks; which of the keys does the storage have?
        STORAGE_FETCH: storage (by key) to host target.
        STORAGE_PUT: host source to storage (by key).
        HAND_OFF: prefill role: device source to the peer, which decodes ``handle``.
        REMOTE_PREFILL: decode role: the peer fills the device target for ``handle``.

    The order within a step: IMAGE_SAVE and WRITE_BACK; zero_blocks; copy_blocks; RESTORE and LOAD_BACK; transfers; the
    batch. Sources of the first two may be written again by the same step's batch, and targets of RESTORE may be read
    by it. Storage operations run beside the steps; their host blocks are pinned until OperationDone.

    Attributes:
        op_id: rises by one; the acknowledgement names it.
        handle: the request it is for, or 0.
        group, source, target: int32 [n].
        digests: uint8 [n, 32], the prefix page a block belongs to, its namespace included (storage kinds, else
            [0, 32]).
        offsets: int32 [n], the block's place in its page (storage kinds), or its slot in the request's table (HAND_OFF
            and REMOTE_PREFILL: so each side finds the other's block); else [0].
    """

    @property
    def op_id(self) -> int: ...
    @property
    def kind(self) -> OperationKind: ...
    @property
    def handle(self) -> int: ...
    @property
    def group(self) -> NDArray[np.int32]: ...
    @property
    def source(self) -> NDArray[np.int32]: ...
    @property
    def target(self) -> NDArray[np.int32]: ...
    @property
    def digests(self) -> NDArray[np.uint8]: ...
    @property
    def offsets(self) -> NDArray[np.int32]: ...

class PlanAbort:
    """A request the scheduler ended by itself. ``detail`` has the figures and the knob.

    ``reason`` is "capacity" (it outgrew the whole pool) or "failed" (one of its rows failed, or a row that samples
    brought no token, and nobody ended it before the next plan; or its image or its blocks from the peer were lost).
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
        starts: indices of the rows that begin in their pool row: the first chunk of a request (prefix_len is then what
            the caches gave), or its first row after it was restored or prefilled by a peer.
        tables: one BlockTableDelta a cache group, in the order of the configuration. They apply before the batch.
        zero_blocks: per group, int32 block ids to zero before the batch (only where a group asks for it).
        copy_blocks: per group, int32 [n, 2] (source, target).
        operations: cache operations, in the order of their op_id. A plan with operations must be executed even where
            it has no rows.
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
    def operations(self) -> list[CacheOperation]: ...
    @property
    def aborts(self) -> list[PlanAbort]: ...
    def digest(self) -> bytes:
        """SHA-256 over everything the plan says, 32 bytes: equal plans have equal digests on every machine."""

class ForwardResult:
    """The result of one plan: ``tokens`` int32 [num_rows] (-1: none), ``failed`` uint8 [num_rows] or None.

    A failed row publishes nothing that this forward filled. Every row of a plan that sampled nothing still reports
    (an intermediate chunk lands with an empty result).
    """

    def __init__(self, forward_id: int, tokens: NDArray[np.int32], failed: NDArray[np.uint8] | None = None) -> None: ...
    @property
    def forward_id(self) -> int: ...
    @property
    def tokens(self) -> NDArray[np.int32]: ...
    @property
    def failed(self) -> NDArray[np.uint8] | None: ...

class Finish:
    """The request ended (stop token, length, stop string). With a forward out it goes through Finishing."""

    def __init__(self, handle: int) -> None: ...
    @property
    def handle(self) -> int: ...

class Abort:
    """The request is not wanted any more. Never refused; with a forward out it goes through Finishing."""

    def __init__(self, handle: int) -> None: ...
    @property
    def handle(self) -> int: ...

class OperationDone:
    """A cache operation ended. ``succeeded``: uint8 [n] by block, or None where all did."""

    def __init__(self, op_id: int, succeeded: NDArray[np.uint8] | None = None) -> None: ...
    @property
    def op_id(self) -> int: ...
    @property
    def succeeded(self) -> NDArray[np.uint8] | None: ...

class Tick:
    """The time is ``now``, in ticks of the caller's choice (never smaller than before). Only timeouts look at it."""

    def __init__(self, now: int) -> None: ...
    @property
    def now(self) -> int: ...

class ForgetCache:
    """Prefixes that nobody holds are not to be hit any more: their blocks on the device and on the host become free.

    What the storage has stays there.
    """

    def __init__(self) -> None: ...

class Bootstrapped:
    """Prefill and decode roles: the handshake with the peer is done."""

    def __init__(self, handle: int) -> None: ...
    @property
    def handle(self) -> int: ...

class RemotePrefillDone:
    """Decode role: the peer wrote its last block; ``first_token`` is what it sampled, -1 where it failed."""

    def __init__(self, handle: int, first_token: int) -> None: ...
    @property
    def handle(self) -> int: ...
    @property
    def first_token(self) -> int: ...

Event = ForwardResult | Finish | Abort | OperationDone | Tick | ForgetCache | Bootstrapped | RemotePrefillDone

class GroupCounts:
    """Blocks of a group in one pool: held + cached + free + elsewhere = total; elsewhere is what other groups have the
    parents of. ``pinned`` are among held and cached: a copy or a peer touches them."""

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
    @property
    def elsewhere(self) -> int: ...

class PoolMaps:
    """Pictures of both pools, a string a group; ``host`` is empty without a host pool.

    Each has at most as many letters as were asked for, one for every equal run of the group's blocks in the order of
    their ids: "p" pinned, "h" held, "c" cached, "." free, "-" in a parent that another group has. A run shows what most
    of its blocks are; what would show nowhere takes the run that has most of it, if that can be spared.
    """

    @property
    def device(self) -> list[str]: ...
    @property
    def host(self) -> list[str]: ...

class Headroom:
    """What could be admitted now, by the rule of admission: beside what is promised to those that run.

    Attributes:
        tokens: that free and evictable blocks hold, in the tightest group that keeps a history (a full one where there
            is one).
        largest: prompt and output tokens of the largest request that fits whole; 0 where none does.
        requests: how many of ``typical_tokens`` fit, before those that wait have had theirs.
        typical_tokens: as given, or the mean of the live.
    """

    @property
    def tokens(self) -> int: ...
    @property
    def largest(self) -> int: ...
    @property
    def requests(self) -> int: ...
    @property
    def typical_tokens(self) -> int: ...

class Visit:
    """A request came into ``state`` in ``round``, at the ``time`` of the last set_time()."""

    @property
    def state(self) -> State: ...
    @property
    def round(self) -> int: ...
    @property
    def time(self) -> float: ...

class Description:
    """All there is to say about one request.

    Attributes:
        alive: whether it lives. Of the last 64 that ended there are row and visits, of others nothing but the handle.
        visits: the newest 128, the oldest first; ``visits_omitted`` counts those before.
        lines: why it waits and what it would take, or what it holds: one sentence each.
    """

    @property
    def alive(self) -> bool: ...
    @property
    def row(self) -> RequestRow: ...
    @property
    def visits(self) -> list[Visit]: ...
    @property
    def visits_omitted(self) -> int: ...
    @property
    def lines(self) -> list[str]: ...

class Note:
    """Something that happened to a request: ``kind`` is "retraction" or "storage_timeout"."""

    @property
    def time(self) -> float: ...
    @property
    def kind(self) -> str: ...
    @property
    def handle(self) -> int: ...
    @property
    def text(self) -> str: ...

class Explanation:
    """Why a request does not run, or that it does.

    Attributes:
        code: "running", "queued", "no_row", "budget", "capacity", "line_held", "result_in_flight", "armed",
            "generation_done", "operation", "retracted", "bootstrapping", "ending" or "ended".
        text: the same for people, with the figures and, where there is one, the knob.
        short_by: blocks it is short by ("capacity"), else 0.
        group_id: the group that is short, else "".
        other: the handle it waits for or gave way to, else 0.
        op_id: the operation it waits for, else 0.
    """

    @property
    def handle(self) -> int: ...
    @property
    def state(self) -> State: ...
    @property
    def code(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def short_by(self) -> int: ...
    @property
    def group_id(self) -> str: ...
    @property
    def other(self) -> int: ...
    @property
    def op_id(self) -> int: ...

class Decision:
    """What one round decided, as it is kept in the ring.

    Attributes:
        prefill_rows, prefill_tokens, decode_rows: what was scheduled.
        blocked: (handle, code, figure) of the first few that were tried and refused or left out.
        retracted, restored, aborted: handles.
        evictions: cached blocks that gave way.
        free_blocks: by group, what was obtainable at the end.
    """

    @property
    def round(self) -> int: ...
    @property
    def prefill_rows(self) -> int: ...
    @property
    def prefill_tokens(self) -> int: ...
    @property
    def decode_rows(self) -> int: ...
    @property
    def blocked(self) -> list[tuple[int, str, int]]: ...
    @property
    def retracted(self) -> list[int]: ...
    @property
    def restored(self) -> list[int]: ...
    @property
    def aborted(self) -> list[int]: ...
    @property
    def evictions(self) -> int: ...
    @property
    def free_blocks(self) -> list[int]: ...

class Snapshot:
    """Counts of one moment. ``states``: int64 [12], -1 where the role has no such state, Finished cumulative.

    ``flows``: list of (source, target, count) by State value. ``running`` counts requests that own a device bundle
    and are not Finishing, ``waiting`` those that wait for a first or another chance. ``overtakes`` counts prompts that
    passed the oldest one blocked for capacity, ``evictions`` cached blocks that gave way. ``host``: the host pool by
    group (held is pinned: images, and entries an operation touches), empty without one. ``prefix_hit_tokens`` counts
    all tiers, ``host_hit_tokens`` and ``storage_hit_tokens`` those that came from there. ``image_blocks`` counts blocks
    that images took up so far, ``recomputed_tokens`` what retractions without an image will compute again.
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
    @property
    def host(self) -> list[GroupCounts]: ...
    @property
    def host_hit_tokens(self) -> int: ...
    @property
    def storage_hit_tokens(self) -> int: ...
    @property
    def host_evictions(self) -> int: ...
    @property
    def pending_operations(self) -> int: ...
    @property
    def image_blocks(self) -> int: ...
    @property
    def restores(self) -> int: ...
    @property
    def recomputed_tokens(self) -> int: ...
    @property
    def storage_timeouts(self) -> int: ...

class RequestRow:
    """One request. ``arrived`` and ``since`` are times of set_time(): of its submission, and of its coming into the
    state. ``max_new_tokens`` is what the model's length leaves of what was asked for."""

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
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def host_blocks(self) -> int: ...
    @property
    def arrived(self) -> float: ...
    @property
    def since(self) -> float: ...

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
        """Applies a batch of events, validated whole before any is applied; ended operations come before results.
        Results of an unknown or repeated forward_id, and events of an unknown or ended handle or operation, are ignored
        and counted. Raises ValueError, and is as it was, for a result with the wrong number of rows or before the
        results of earlier plans, and for an operation with the wrong number of blocks."""

    def plan(self) -> Plan:
        """Plans the next round. The plan must be executed exactly once, in order."""

    def snapshot(self) -> Snapshot: ...
    def requests(self, limit: int = 200) -> list[RequestRow]:
        """The live requests by interest: who waits (longest in its state first), who is in prefill, who decodes (by
        blocks held), who ends."""

    def has_work(self) -> bool:
        """Whether any request is alive, or something waits to be sent with the next plan."""

    def explain(self, handle: int) -> Explanation:
        """Why the request is not running, as of the last round."""

    def set_time(self, seconds: float) -> None:
        """The time, in seconds of the caller's choice, that visits and notes are stamped with; it decides nothing."""

    def maps(self, cells: int = 256) -> PoolMaps:
        """Pictures of the pools; O(blocks)."""

    def headroom(self, typical_tokens: int = 0) -> Headroom:
        """What could be admitted now; ``typical_tokens`` 0 is the mean of the live, or 32768 where none lives."""

    def describe(self, handle: int) -> Description:
        """Everything about one request, alive or among the last 64 that ended."""

    def take_notes(self) -> list[Note]:
        """What happened since this was last asked: the newest 64."""

    def decisions(self, last: int = 64) -> list[Decision]:
        """The records of the last rounds that did or refused anything, the oldest first (the ring keeps 1024)."""

    def max_single_request_tokens(self) -> int:
        """The largest prompt plus output that one request, alone in the pool, can have."""

    def check_invariants(self) -> None:
        """Walks everything and raises RuntimeError where an invariant is broken. For tests; not cheap."""

def single_request_bound(config: SchedulerConfig) -> int:
    """The same arithmetic before a scheduler exists: for the memory plan."""

def transition_table() -> list[tuple[str, str, list[str]]]:
    """(state, event, successors) for every legal pair, by name: the one table, for docs, dashboard and tests."""
