"""What the frontend tells the engine."""

from typing import Literal

import msgspec

from tokenspeed.messages.constraint import Constraint
from tokenspeed.messages.inspect import Inspect
from tokenspeed.messages.order import Order
from tokenspeed.messages.rules import BadWords, Rule, ThinkingBudget
from tokenspeed.messages.sampling import SamplingParameters

Pooling = Literal["last", "mean"]
"""How the hidden states of a prompt become one vector: that of its last token, or the mean of all."""


class Submit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A new request: one choice (``n`` choices are ``n`` requests that share a prefix).

    Attributes:
        handle: the integer that names the request inside; chosen by the frontend, positive, never used twice.
        request_id: the name at the edge; for logs and the dashboard only.
        prompt: int32 token ids in the machine's byte order; at least one token.
        max_new_tokens: the most tokens to generate; at least 1.
        declared: whether the client asked for ``max_new_tokens`` (a default of the API counts as undeclared).
        priority: larger runs first; age breaks ties.
        namespace: what keeps equal token ids apart in the prefix cache (cache salt, adapter, image hashes).
        deadline: seconds since the epoch when the frontend will end it, 0 for none; for the dashboard only.
        pooling: the request asks for the embedding of its prompt: no token is drawn, and it ends when the prompt is
            computed. ``max_new_tokens`` is 1 then. None generates.
        constraint: what the output must look like; None is free text.
        bad_words: what it may not hold; None is nothing.
        thinking: how long it may reason; None is no bound.

    The last three are compiled before the request is scheduled. The stop token ids of the sampling parameters end the
    request inside the engine; stop strings are found in the frontend, which sends ``Finish``.
    """

    handle: int
    request_id: str
    prompt: bytes
    max_new_tokens: int
    sampling: SamplingParameters
    declared: bool = True
    priority: int = 0
    namespace: bytes = b""
    constraint: Constraint | None = None
    deadline: float = 0.0
    pooling: Pooling | None = None
    bad_words: BadWords | None = None
    thinking: ThinkingBudget | None = None

    @property
    def rules(self) -> tuple[Rule, ...]:
        """What says which tokens it may draw, beyond the sampling parameters."""
        return tuple(rule for rule in (self.constraint, self.bad_words, self.thinking) if rule is not None)


class Finish(msgspec.Struct, frozen=True, array_like=True):
    """The frontend found a stop string: the request ends, and only ``keep`` of its output tokens count."""

    handle: int
    keep: int


class EngineInput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="input"):
    """Everything the frontend has to say since its last message. Order inside: submits, finishes, aborts, orders.

    Attributes:
        version: PROTOCOL_VERSION of the sender.
        submits: new requests.
        finishes: requests ended by a stop string.
        aborts: handles whose client went away; an unknown handle is ignored.
        orders: what an operator wants done.
        inspects: questions about single requests.
        watch_s: for so many seconds from now somebody looks: snapshots are to be complete.
        drain: when true the engine refuses new requests and exits after the last one ended.
    """

    version: int
    submits: list[Submit] = []
    finishes: list[Finish] = []
    aborts: list[int] = []
    orders: list[Order] = []
    inspects: list[Inspect] = []
    watch_s: float = 0.0
    drain: bool = False
