"""The scheduler: a C++20 state machine that decides when, for whom and with which KV blocks a step runs."""

from tokenspeed_scheduler._core import (
    Abort,
    BlockTableDelta,
    CacheGroup,
    Finish,
    ForwardResult,
    GroupCounts,
    InvalidTransition,
    Plan,
    PlanAbort,
    RequestRefused,
    RequestRow,
    Role,
    RowKind,
    Scheduler,
    SchedulerConfig,
    Snapshot,
    State,
    single_request_bound,
    transition_table,
)

Event = ForwardResult | Finish | Abort

__all__ = [
    "Abort",
    "BlockTableDelta",
    "CacheGroup",
    "Event",
    "Finish",
    "ForwardResult",
    "GroupCounts",
    "InvalidTransition",
    "Plan",
    "PlanAbort",
    "RequestRefused",
    "RequestRow",
    "Role",
    "RowKind",
    "Scheduler",
    "SchedulerConfig",
    "Snapshot",
    "State",
    "single_request_bound",
    "transition_table",
]
