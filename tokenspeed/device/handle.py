"""What the control plane may ask of the execution plane, and nothing else.

The event loop holds a ``DeviceHandle`` and cannot name a runner, backend, pool, stream or buffer. This file imports no
torch: everything that crosses it is plain data or numpy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from tokenspeed.messages import Pooling, PromptLogprobs, SamplingParameters

if TYPE_CHECKING:
    from tokenspeed_scheduler import Plan


class TokenMatcher(Protocol):
    """Which tokens may come next in one choice under a grammar. Forward thread only.

    The same tokens accepted lead to the same masks, whether they were filled in between or not: a request that was
    retracted begins with a fresh matcher that accepts its output again.
    """

    @property
    def may_end(self) -> bool:
        """Whether the text may end where it is; known after ``fill``."""
        ...

    @property
    def error(self) -> str:
        """Why it cannot go on; "" while it can."""
        ...

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Sets bit t % 32 of word t // 32 where token t may come next, and clears all others.

        ``mask`` is int32 [ceil(V / 32)]. End tokens are never among them: whether they may come is ``may_end``.
        """
        ...

    def accept(self, token: int) -> None:
        """The choice goes on with ``token``, which the last mask allowed."""
        ...


class Grammar(Protocol):
    """A compiled constraint."""

    def matcher(self) -> TokenMatcher:
        """Returns a matcher of its own for one choice. Forward thread only."""
        ...


@dataclass(frozen=True, kw_only=True)
class RowStart:
    """Said once, when a request begins in a pool row: its first chunk, or its first row after it was restored.

    This is the slot state of a request that comes back, whole: no other copy of it is kept while it is retracted. Its
    valid length is the plan's ``prefix_len``; random numbers depend on (seed, choice, position) only; the penalty
    counts are those of ``prompt`` and ``output``, and the sampler counts them anew, which is exact, because nothing of
    a victim was in flight; its last token is the last of ``output``.

    Attributes:
        handle: the request.
        row: its row in the request pool, 1-based; row 0 is the null row.
        sampling: how its tokens are drawn, logprob counts included.
        prompt: int32 token ids of the prompt; the sampler counts them where a penalty asks, prompt log-probabilities
            are taken of them.
        output: int32 token ids generated before (after a retraction), else empty.
        grammar: what the output must look like; None is free.
        pooling: the row's hidden states are pooled, and no token is drawn; None draws.
    """

    handle: int
    row: int
    sampling: SamplingParameters
    prompt: NDArray[np.int32]
    output: NDArray[np.int32]
    grammar: Grammar | None = None
    pooling: Pooling | None = None


@dataclass(frozen=True, kw_only=True)
class OperationOutcome:
    """A cache operation ended. ``succeeded`` uint8 [n], by block or key, or None where all did."""

    op_id: int
    succeeded: NDArray[np.uint8] | None = None


@dataclass(frozen=True, kw_only=True)
class StepTimings:
    """Seconds of the forward thread, of one step alone: what it does for another in between is that one's.

    On the host's own memory the work is done when its part ends. On a device all parts but the last queue it and do not
    wait: there ``forward`` is what it takes to queue one, and ``sample`` has whatever of the whole step the device had
    yet to do when the thread came to finish it. Without ``queued``, all steps together take no more time than passed.

    Attributes:
        queued: waiting in the thread's queue, and for the step before where that had to be finished.
        prepare: preparing inputs on the host.
        forward: the forward.
        sample: sampling, and waiting for the result.
        overlapped: the step was queued on the device before the host waited for the one before it, so that the device
            had no pause between them.
    """

    queued: float
    prepare: float
    forward: float
    sample: float
    overlapped: bool = False


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The outcome of one plan; row i belongs to row i of the plan.

    Attributes:
        forward_id: the plan's.
        tokens: int32 [rows]; -1 where a row does not sample (an intermediate chunk) or its logits were NaN. A pooled
            row has 0 where another would have its first token: its prompt is computed.
        nan: bool [rows]; the row's logits held a NaN, or its pooled vector something that is no finite number.
        logprobs: float32 [rows] of the sampled token, or None where no row asked.
        top_ids, top_logprobs: int32 and float32 [rows, k], k the largest count asked for; or None.
        prompt_logprobs: plan row to the slice of prompt log-probabilities that this chunk gave.
        pooled: plan row to float32 [hidden size]: of "mean" the sum over the tokens of this chunk, of "last" the hidden
            state of the prompt's last token, with its last chunk only.
        complete: plan rows whose grammar lets nothing follow the token they drew: their text is whole.
        refused: plan row to why its grammar left no token to draw; the row's token is -1.
        operations: the plan's copies, each with its outcome; storage operations run on and are told by
            ``DeviceHandle.finished_operations``.
        timings: see StepTimings.
    """

    forward_id: int
    tokens: NDArray[np.int32]
    nan: NDArray[np.bool_]
    logprobs: NDArray[np.float32] | None = None
    top_ids: NDArray[np.int32] | None = None
    top_logprobs: NDArray[np.float32] | None = None
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    pooled: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    complete: frozenset[int] = frozenset()
    refused: dict[int, str] = field(default_factory=dict)
    operations: tuple[OperationOutcome, ...] = ()
    timings: StepTimings


@dataclass(frozen=True, kw_only=True)
class StorageUsage:
    """What a storage tier has: blocks, bytes of theirs, and the most bytes there may be. As last counted."""

    blocks: int
    bytes: int
    limit_bytes: int


class PendingStep(Protocol):
    """A step that was handed to the forward thread.

    Asking for its result says that nothing more is to be queued on the device before it is waited for: what was handed
    over so far goes first.
    """

    @property
    def forward_id(self) -> int: ...

    def done(self) -> bool:
        """Asks for the result; whether ``result`` would return (or raise) at once. Never blocks."""
        ...

    def result(self) -> StepResult:
        """Waits for the step. Raises ``StepFailed`` where the forward raised."""
        ...


class StepFailed(RuntimeError):
    """A forward raised; the cause is chained. The rows of its plan have no result; the thread goes on."""


class PeerGone(RuntimeError):
    """Another rank of the engine does not answer any more: what ails this one is not its own."""


def peer_is_gone(error: BaseException | None) -> bool:
    """Whether ``error``, or what it came of, is that."""
    while error is not None and not isinstance(error, PeerGone):
        error = error.__cause__
    return error is not None


class DeviceHandle(Protocol):
    """The only things the running loop can ask of the device (a test pins the list)."""

    def execute(self, plan: "Plan", starts: Sequence[RowStart]) -> PendingStep:
        """Queues a plan: image saves and write-backs, zero, copies, restores and load-backs, transfers, batch.

        ``starts`` are the rows of the plan that begin. A plan may have operations and no rows. Never blocks and never
        raises for what the forward does: that comes out of ``PendingStep.result``. The plan's arrays are kept alive
        until the step, and every storage operation of it, is done.
        """
        ...

    def finished_operations(self) -> list[OperationOutcome]:
        """The storage operations that ended since this was last asked. Never blocks."""
        ...

    def storage_usage(self) -> StorageUsage | None:
        """What the storage tier has; None without one. Never blocks."""
        ...

    def shutdown(self) -> None:
        """Ends the threads of the device side after what was queued, and frees what it holds. May be called twice."""
        ...
