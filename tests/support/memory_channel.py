"""A frontend inside the test: what it sends and what came back, as lists."""

from tokenspeed.engine.loop import IDLE_WAIT_MS
from tokenspeed.messages import (
    PROTOCOL_VERSION,
    EngineInput,
    EngineMessage,
    EngineOutput,
    EngineSnapshot,
    Finish,
    Inspect,
    Inspected,
    Order,
    OrderDone,
    RequestOutput,
    Submit,
)
from tokenspeed.messages.snapshot import StateSnapshot


class MemoryChannel:
    """Implements the loop's Channel. ``waits`` counts the times the loop had nothing at all to do and waited."""

    def __init__(self) -> None:
        self.inbox: list[EngineInput] = []
        self.outputs: list[RequestOutput] = []
        self.snapshots: list[StateSnapshot] = []
        self.answers: list[OrderDone] = []
        self.inspected: list[Inspected] = []
        self.messages = 0
        self.waits = 0

    def send_in(
        self,
        *,
        submits: list[Submit] | None = None,
        finishes: list[Finish] | None = None,
        aborts: list[int] | None = None,
        orders: list[Order] | None = None,
        inspects: list[Inspect] | None = None,
        watch_s: float = 0.0,
        drain: bool = False,
    ) -> None:
        self.inbox.append(
            EngineInput(
                version=PROTOCOL_VERSION,
                submits=submits or [],
                finishes=finishes or [],
                aborts=aborts or [],
                orders=orders or [],
                inspects=inspects or [],
                watch_s=watch_s,
                drain=drain,
            )
        )

    def receive(self, timeout_ms: int) -> list[EngineInput]:
        if timeout_ms >= IDLE_WAIT_MS and not self.inbox:
            self.waits += 1
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: EngineMessage) -> None:
        if isinstance(message, EngineOutput):
            self.messages += 1
            self.outputs.extend(message.outputs)
        elif isinstance(message, EngineSnapshot):
            self.snapshots.append(message.snapshot)
        elif isinstance(message, OrderDone):
            self.answers.append(message)
        elif isinstance(message, Inspected):
            self.inspected.append(message)

    def tokens(self, handle: int) -> list[int]:
        return [token for output in self.outputs if output.handle == handle for token in output.token_ids]

    def ends(self, handle: int) -> list[str]:
        """The finish reasons of a request; exactly one when it ended right."""
        return [o.finish_reason for o in self.outputs if o.handle == handle and o.finish_reason is not None]

    def last(self, handle: int) -> RequestOutput:
        return [output for output in self.outputs if output.handle == handle][-1]
