"""Any rank but rank 0: it does to its scheduler what rank 0's was told, and executes the plans that come of it.

Both must plan the same. Every plan carries its digest; where they differ the engine ends, for ranks that compute
different rows would exchange nonsense.
"""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from tokenspeed.device.handle import DeviceHandle, PendingStep, StepFailed
from tokenspeed.engine.journaled_scheduler import event_of, submit_again
from tokenspeed.engine.leading import step_failure
from tokenspeed.engine.loop import EngineFailure
from tokenspeed.engine.rank_wire import FollowingLink, Start, Stop, Told
from tokenspeed.telemetry.journal import Advanced, Begin, Planned, Raised, Record, Submitted

if TYPE_CHECKING:
    from tokenspeed_scheduler import Plan, Scheduler

BUSY_WAIT_MS = 20
"""How soon a failed step is noticed, and a storage operation that ended is told, where no message comes."""

IDLE_WAIT_MS = 1000


class FollowingLoop:
    """One thread runs it.

    Args:
        rank, world: for messages.
        link: to rank 0.
        handle: the only door to the device.
        begin: makes the scheduler that a record asks for; raises ValueError where this rank's would be another.
        storage: whether there are storage operations to tell of.

    Attributes:
        stopped: whether rank 0 ended this one, and all it had told was done.
    """

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        link: FollowingLink,
        handle: DeviceHandle,
        begin: "Callable[[Begin], Scheduler]",
        storage: bool,
    ) -> None:
        self._who = f"rank {rank} of {world}"
        self._link = link
        self._handle = handle
        self._begin = begin
        self._storage = storage
        self._scheduler: Scheduler | None = None
        self._plan: Plan | None = None
        self._raised = ""
        self._in_flight: deque[PendingStep] = deque()
        self.stopped = False

    def run(self) -> None:
        """Runs until rank 0 stops it. Raises EngineFailure where this rank cannot go on with the others."""
        while True:
            is_last = len(self._in_flight) == 1
            message = self._link.receive(BUSY_WAIT_MS if self._in_flight or self._storage else IDLE_WAIT_MS)
            if isinstance(message, Stop):
                while self._in_flight:
                    self._drop_oldest()
                self.stopped = True
                return
            if message is not None:
                self._take(message)
            # To ask for a step is to say that no other is to be launched before it is finished; so the last one is
            # asked for where rank 0 fell silent behind it.
            self._drop_done(keep=0 if is_last and message is None else 1)
            if self._storage and (outcomes := self._handle.finished_operations()):
                self._link.report(outcomes)

    def _take(self, message: Told) -> None:
        for record in message.records:
            self._apply(record)
        if message.starts is not None:
            self._execute(message.starts)

    def _execute(self, starts: list[Start]) -> None:
        assert self._plan is not None, "rank 0 executes what it planned"
        self._in_flight.append(self._handle.execute(self._plan, [start.row_start() for start in starts]))
        self._plan = None

    def _drop_done(self, *, keep: int) -> None:
        while len(self._in_flight) > keep and self._in_flight[0].done():
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Waits for it where it is not done."""
        try:
            self._in_flight.popleft().result()
        except StepFailed as error:
            raise step_failure(self._who, error) from error

    # What rank 0's scheduler was told.

    def _apply(self, record: Record) -> None:
        raised, self._raised = self._raised, ""
        if isinstance(record, Raised):
            if record.error != raised and record.call != "plan":
                self._diverged(f"a {record.call} raised {record.error} there and {raised or 'nothing'} here")
            return
        if raised:
            self._diverged(f"a call raised {raised} here and nothing there")
        if isinstance(record, Begin):
            self._scheduler = self._begin(record)
            return
        scheduler = self._scheduler
        assert scheduler is not None, "rank 0 says first what its scheduler is made of"
        if isinstance(record, Planned):
            self._plan = self._planned(scheduler, record)
            return
        try:
            if isinstance(record, Submitted):
                submit_again(scheduler, record)
            elif isinstance(record, Advanced):
                scheduler.advance([event_of(name, arguments) for name, arguments in record.events])
        except Exception as error:  # as rank 0's did, or the next record finds that it did not
            self._raised = type(error).__name__

    def _planned(self, scheduler: "Scheduler", record: Planned) -> "Plan":
        plan = scheduler.plan()
        digest = plan.digest()
        if digest != record.digest:
            self._diverged(
                f"plan {record.forward_id} has the digest {record.digest.hex()[:16]} there, plan {plan.forward_id} "
                f"{digest.hex()[:16]} here"
            )
        return plan

    def _diverged(self, how: str) -> None:
        raise EngineFailure(f"{self._who} does not plan as rank 0 does: {how}")
