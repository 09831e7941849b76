"""The wire between the processes: msgspec structs in msgpack, versioned, no pickle.

One message a round crosses each way, never one a request: the frontend sends an ``EngineInput`` with everything that
happened since the last one, the engine answers with an ``EngineOutput`` for the round, and beside it, seldom, an
``EngineStatus`` (start-up phases, readiness, the end), an ``EngineSnapshot`` (telemetry), an ``OrderDone``
(what became of an operator's order) or an ``Inspected`` (what is known of one request).
"""

from tokenspeed.messages.constraint import (
    CONSTRAINT_KINDS,
    MAX_BEGIN_BYTES,
    MAX_CONSTRAINT_BYTES,
    Constraint,
    ConstraintError,
    ConstraintKind,
)
from tokenspeed.messages.input import EngineInput, Finish, Pooling, Submit
from tokenspeed.messages.inspect import Inspect, Inspected
from tokenspeed.messages.order import Action, Order, OrderDone
from tokenspeed.messages.output import (
    EngineFacts,
    EngineOutput,
    EngineSnapshot,
    EngineStatus,
    FinishReason,
    Phase,
    PromptLogprobs,
    RequestOutput,
    TokenLogprobs,
)
from tokenspeed.messages.rules import MAX_BAD_WORD_CHARACTERS, MAX_BAD_WORDS, BadWords, Rule, ThinkingBudget
from tokenspeed.messages.sampling import SamplingParameters
from tokenspeed.messages.wire import (
    PROTOCOL_VERSION,
    EngineMessage,
    WireError,
    decode_input,
    decode_output,
    encode,
)

__all__ = [
    "CONSTRAINT_KINDS",
    "MAX_BAD_WORDS",
    "MAX_BAD_WORD_CHARACTERS",
    "MAX_BEGIN_BYTES",
    "MAX_CONSTRAINT_BYTES",
    "PROTOCOL_VERSION",
    "Action",
    "BadWords",
    "Constraint",
    "ConstraintError",
    "ConstraintKind",
    "EngineFacts",
    "EngineInput",
    "EngineMessage",
    "EngineOutput",
    "EngineSnapshot",
    "EngineStatus",
    "Finish",
    "FinishReason",
    "Inspect",
    "Inspected",
    "Order",
    "OrderDone",
    "Phase",
    "Pooling",
    "PromptLogprobs",
    "RequestOutput",
    "Rule",
    "SamplingParameters",
    "Submit",
    "ThinkingBudget",
    "TokenLogprobs",
    "WireError",
    "decode_input",
    "decode_output",
    "encode",
]
