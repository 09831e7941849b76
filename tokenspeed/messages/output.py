"""What the engine tells the frontend."""

from typing import Literal

import msgspec

from tokenspeed.messages.snapshot import StateSnapshot

FinishReason = Literal["stop", "length", "abort", "error"]
Phase = Literal[
    "resolve", "download", "load", "compile", "capture", "warm up", "ready", "draining", "stopped", "failed"
]

EngineFacts = dict[str, str | int | float | bool | dict[str, str | int] | None]
"""Plain values by name: what the engine says of itself when it is ready."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probability of one token, and of the most probable ones beside it."""

    token_id: int
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of prompt tokens from ``start`` on; the first token of a prompt has none."""

    start: int
    tokens: list[TokenLogprobs]


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one round did for one request.

    Attributes:
        handle: the request.
        token_ids: the new tokens, in order; the stop token that ended a request is among them.
        logprobs: one for each of ``token_ids`` where the request asked for them, else empty.
        prompt_logprobs: a slice of the prompt's, where asked for.
        embedding: float32 [hidden size], little-endian: the final hidden states (behind the last norm) as
            ``Submit.pooling`` asked for them, not normalised; with the last output of such a request, else empty.
        cached_tokens: prompt tokens that came from the prefix cache; sent with the first output, else -1.
        queue_s: seconds between its submit and its first step, by the engine's clock; sent as ``cached_tokens`` is.
        finish_reason: set in a request's last output.
        stop_token_id: the token that ended it when the reason is "stop", else -1; -1 too where a constraint is
            fulfilled and nothing may follow.
        error: what went wrong, for "error" and for an "abort" that the engine decided.
        error_code: "context_length_exceeded", "capacity", "nan_logits", "step_failed", "cache_load_failed",
            "draining", "invalid_request", "invalid_constraint", "constraint_too_costly", "constraint_busy",
            "constraint_unavailable", "constraint_failed"; "" without an error.
    """

    handle: int
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: PromptLogprobs | None = None
    embedding: bytes = b""
    cached_tokens: int = -1
    queue_s: float = -1.0
    finish_reason: FinishReason | None = None
    stop_token_id: int = -1
    error: str = ""
    error_code: str = ""


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, tag="output"):
    """The outputs of one round."""

    version: int
    round: int
    outputs: list[RequestOutput]


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="status"):
    """Where the engine process stands.

    Attributes:
        phase: the phase it is in.
        done, total: progress within the phase (shards, captures ...); total 0 where there is none.
        detail: one line for a person.
        pid: of the engine process.
        facts: with "ready": plain values the frontend and the probes show (kv_tokens, max_model_len, kernels ...).
        error: with "failed": the cause, one line; the traceback goes to the log.
    """

    version: int
    phase: Phase
    done: int = 0
    total: int = 0
    detail: str = ""
    pid: int = 0
    facts: EngineFacts = {}
    error: str = ""


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot"):
    """The engine's state, a few times a second, only while something changes or a second went by."""

    version: int
    snapshot: StateSnapshot
