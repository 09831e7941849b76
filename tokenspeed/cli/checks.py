"""What ``verify`` asks a running server, one check after the other; each says what it saw."""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from tokenspeed.cli.client import Client
from tokenspeed.cli.records import ServerError

PROSE = (
    "The lighthouse stood at the end of a narrow road. Every evening the keeper climbed the stairs, lit the lamp, and "
    "wrote the weather into a large book. When the fog came in from the sea, he rang the bell until the morning, and "
    "the ships that passed knew where the rocks were and kept away from them."
)
"""Plain text of our own; a model whose weights or kernels are damaged finds it improbable."""

PROSE_CHECK = "prose_logprob"


@dataclass(frozen=True)
class Check:
    """One check and its outcome."""

    name: str
    passed: bool
    told: str


async def run_checks(client: Client) -> list[Check]:
    """All of smoke and API shape; one that fails does not keep the others from running."""
    return [await _run(name, function, client) for name, function in CHECKS.items()]


async def prose_logprob(client: Client) -> float:
    """The mean log-probability of a token of PROSE, by the model; raises ServerError."""
    choices = await client.post("/v1/completions", key="choices", prompt=PROSE, max_tokens=0, echo=True, logprobs=0)
    values = [value for value in choices[0]["logprobs"]["token_logprobs"] if value is not None]
    return float(math.fsum(values) / len(values))


async def _run(name: str, function: Callable[[Client], Awaitable[str]], client: Client) -> Check:
    try:
        return Check(name, True, await function(client))
    except (ServerError, AssertionError, KeyError, IndexError, TypeError, ValueError) as error:
        return Check(name, False, f"{type(error).__name__}: {error}" if not str(error) else str(error))


async def _answers(client: Client) -> str:
    messages = [{"role": "user", "content": "Say hello."}]
    choices = await client.post("/v1/chat/completions", key="choices", messages=messages, max_tokens=16, temperature=0)
    _hold(len(choices) == 1, "one choice")
    _hold(choices[0]["finish_reason"] in ("stop", "length"), "a finish reason")
    text = choices[0]["message"]["content"]
    _hold(isinstance(text, str), "text")
    return repr(text[:60])


async def _streams(client: Client) -> str:
    request: dict[str, Any] = {"prompt": "One two three", "max_tokens": 24, "temperature": 0, "seed": 1}
    streamed = await client.stream("/v1/completions", **request)
    plain = await client.post("/v1/completions", key="choices", **request)
    _hold(streamed.done, "the stream ends with [DONE]")
    _hold(streamed.completion_tokens > 0, "usage in the last chunk")
    _hold(streamed.finish_reason in ("stop", "length"), "a finish reason in the stream")
    # Two runs may part where the two best tokens are as good as equal; they begin alike.
    _hold(streamed.text[:1] == plain[0]["text"][:1], "the stream begins as the plain answer does")
    return f"{streamed.completion_tokens} tokens in {len(streamed.arrivals)} chunks"


async def _stops(client: Client) -> str:
    request: dict[str, Any] = {"prompt": "a b c d e f", "max_tokens": 32, "temperature": 0}
    whole = (await client.post("/v1/completions", key="choices", **request))[0]["text"]
    if len(whole) < 2:
        return "the answer is too short to be stopped in"
    stop = whole[1]
    cut = (await client.post("/v1/completions", key="choices", stop=[stop], **request))[0]
    _hold(stop not in cut["text"], f"no stop string {stop!r} in the text")
    _hold(cut["finish_reason"] == "stop", f"finish_reason stop, not {cut['finish_reason']}")
    return f"at {stop!r}"


async def _lists_models(client: Client) -> str:
    answer = (await client.http.get("/v1/models")).json()
    model = answer["data"][0]
    _hold(answer["object"] == "list" and model["object"] == "model", "the shape of a list of models")
    return f"{model['id']}, {model['max_model_len']} tokens"


async def _refuses(client: Client) -> str:
    body = {"model": "no-such-model", "prompt": "x", "max_tokens": 1}
    response = await client.http.post("/v1/completions", json=body)
    _hold(response.status_code == 404, f"404 for an unknown model, not {response.status_code}")
    error = response.json()["error"]
    _hold({"message", "type", "param", "code"} <= set(error), "the shape of an error")
    return str(error["code"])


async def _probes(client: Client) -> str:
    codes = {path: (await client.http.get(path)).status_code for path in ("/live", "/ready", "/progress", "/metrics")}
    _hold(all(code in (200, 401) for code in codes.values()), f"the probes answer: {codes}")
    return "live, ready, progress, metrics"


def _hold(condition: bool, what: str) -> None:
    if not condition:
        raise ServerError(f"expected: {what}")


CHECKS: dict[str, Callable[[Client], Awaitable[str]]] = {
    "answers": _answers,
    "streams": _streams,
    "stops": _stops,
    "lists models": _lists_models,
    "refuses": _refuses,
    "probes": _probes,
}
