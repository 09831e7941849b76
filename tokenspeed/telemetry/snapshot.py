"""The snapshot types under the name the dashboard imports; they are defined where they cross the wire."""

from tokenspeed.messages.snapshot import (
    STATES,
    CounterSnapshot,
    FlowSnapshot,
    GroupSnapshot,
    RequestSnapshot,
    StateSnapshot,
    StepSnapshot,
)

__all__ = [
    "STATES",
    "CounterSnapshot",
    "FlowSnapshot",
    "GroupSnapshot",
    "RequestSnapshot",
    "StateSnapshot",
    "StepSnapshot",
]
