"""A server as a load generator sees it: what it can, what it lacks (told by name), and how a request is put to it."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from tokenspeed.cli.bench.answers import Answer, Request, StreamReader
from tokenspeed.cli.bench.tiers import Counters, read_counters
from tokenspeed.cli.bench.wire import MessageReader, Wire, WireError
from tokenspeed.cli.records import ServerError

Api = Literal["completions", "chat"]

PATHS: dict[Api, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_PROBE_TEXT = "river stone paper window garden bridge winter letter"
_DETAIL = 400
_LOOK_S = 30.0
DEFAULT_TIMEOUT_S = 600.0
_EXACT = {"ignore_eos": True}
_MINIMUM = "min_tokens"
_REFUSALS = ("status 400", "status 422")
"""What servers say to a field they do not know."""


@dataclass
class Abilities:
    """What the server was seen to do.

    Attributes:
        tokenizes: the field that its /tokenize wants the text in; "" where it has none.
        token_ids: prompts may be token ids.
        exact_lengths: answers run to their full length whatever the model would say.
        usage: streams end with the server's own counts.
        max_len: longest prompt and answer together, in tokens; None where it does not say.
    """

    tokenizes: str = ""
    token_ids: bool = False
    exact_lengths: bool = True
    usage: bool = True
    max_len: int | None = None


@dataclass
class Endpoint:
    """One server and one model on it. Made by ``connect``.

    Attributes:
        timeout_s: a request that takes longer has failed.
        finished: how many requests the engine of a server of ours has ended by now, if nobody else asks it; None of
            others.
        facts: what the server says of itself, for the report.
        notes: what it lacks and what that means for the figures.
    """

    wire: Wire
    model: str
    timeout_s: float = DEFAULT_TIMEOUT_S
    finished: int | None = None
    abilities: Abilities = field(default_factory=Abilities)
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Where it is."""
        return self.wire.url

    def request(
        self,
        api: Api,
        prompt: str | list[int] | list[dict[str, str]],
        tokens: int,
        conversation: int = 0,
        turn: int = 0,
    ) -> Request:
        """A request for ``tokens`` tokens after ``prompt``, which is messages for a chat."""
        body: dict[str, Any] = {"model": self.model, "stream": True, "temperature": 0, "max_tokens": tokens}
        body["messages" if api == "chat" else "prompt"] = prompt
        if self.abilities.usage:
            body["stream_options"] = {"include_usage": True}
        if self.abilities.exact_lengths:
            body |= _EXACT | {_MINIMUM: tokens}
        payload = msgspec.json.encode(body)
        return Request(path=PATHS[api], payload=payload, tokens=tokens, conversation=conversation, turn=turn)

    async def send(
        self, request: Request, scheduled: float | None = None, watch: Callable[[Answer], None] | None = None
    ) -> Answer:
        """Sends, and returns what came of it; a failure is in the answer. Only a cancelled task raises.

        Args:
            scheduled: when it was due; now, without it.
            watch: is shown the answer, as far as it has come, whenever more of it comes.
        """
        clock = asyncio.get_running_loop().time
        sent = clock()
        answer = Answer.to(request, sent if scheduled is None else scheduled, sent)
        events, refusal = StreamReader(answer, clock), bytearray()

        def take(reader: MessageReader, data: bytes) -> None:
            if reader.status == 200:
                events.feed(data)
                if watch is not None:
                    watch(answer)
            else:
                refusal.extend(data)

        try:
            async with asyncio.timeout(self.timeout_s):
                status = await self.wire.ask("POST", request.path, request.payload, take)
        except WireError as error:
            answer.error, answer.detail = error.kind, str(error)
        except TimeoutError:
            answer.error, answer.detail = "timeout", f"not answered within {self.timeout_s:g} s"
        else:
            if status == 200:
                events.finish()
            else:
                answer.error, answer.detail = f"status {status}", _words(bytes(refusal))
        answer.ended = clock()
        if answer.ok and self.finished is not None:
            self.finished += 1
        return answer

    async def counters(self) -> Counters | None:
        """The engine's totals, those of all answers so far among them; None of a server of others."""
        return None if self.finished is None else await read_counters(self.wire, self.finished)

    async def tokenize(self, text: str) -> list[int]:
        """The token ids of a text, without those that begin a prompt. Raises ServerError."""
        assert self.abilities.tokenizes, "callers ask abilities first"
        ids = await self._tokens(self.abilities.tokenizes, text)
        if ids is None:
            raise ServerError(f"{self.url}/tokenize: no longer answers as it did at the start")
        return ids

    async def _tokens(self, name: str, text: str) -> list[int] | None:
        body = {"model": self.model, name: text, "add_special_tokens": False, "add_special": False}
        if name == "prompt":
            del body["add_special"]
        status, found = await self.json("POST", "/tokenize", body)
        ids = found.get("tokens") if status == 200 and isinstance(found, dict) else None
        return ids if isinstance(ids, list) and ids and all(isinstance(item, int) for item in ids) else None

    async def json(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON of a plain answer, None for what is no JSON; raises ServerError where nobody answers."""
        payload = b"" if body is None else msgspec.json.encode(body)
        try:
            async with asyncio.timeout(_LOOK_S):
                status, data = await self.wire.fetch(method, path, payload)
        except WireError as error:
            raise ServerError(f"{self.url}{path}: {error}; tokenspeed status shows your servers") from error
        except TimeoutError:
            raise ServerError(f"{self.url}{path}: no answer within {_LOOK_S:.0f} s") from None
        try:
            return status, json.loads(data)
        except ValueError:
            return status, data[:_DETAIL].decode(errors="replace") if status != 200 else None


async def connect(
    url: str,
    api_key: str = "",
    model: str | None = None,
    api: Api = "completions",
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Endpoint:
    """Looks at the server at ``url``: its models, what it lacks. Raises ServerError where nothing can be measured.

    Args:
        model: the id to ask for; the first of /v1/models without it.
        api: which of the two the workload will use; it is tried.
        timeout_s: of a request.
    """
    try:
        wire = Wire(url, api_key)
    except WireError as error:
        raise ServerError(str(error)) from error
    endpoint = Endpoint(wire, model or "", timeout_s)
    try:
        await _look_at_models(endpoint, model)
        await _look_at_readiness(endpoint)
        await _look_at_server(endpoint)
        await _look_at_tokenizer(endpoint)
        await _try_requests(endpoint, api)
    except BaseException:
        wire.close()
        raise
    return endpoint


async def _look_at_models(endpoint: Endpoint, wanted: str | None) -> None:
    status, found = await endpoint.json("GET", "/v1/models")
    if status in (401, 403):
        raise ServerError(f"{endpoint.url}/v1/models: status {status}: {_told(found)}; see --api-key-file")
    models = found.get("data") if status == 200 and isinstance(found, dict) else None
    if not models:
        if wanted is None:
            way_out = "say which model to ask for with --url and --model"
            raise ServerError(f"{endpoint.url}/v1/models: status {status}, names no model; {way_out}")
        endpoint.notes.append("no /v1/models: the longest request is not known")
        return
    entry = next((item for item in models if item.get("id") == wanted), None)
    if entry is None and wanted is not None:
        served = ", ".join(str(item.get("id")) for item in models)
        raise ServerError(f"{endpoint.url} serves {served}, not {wanted}")
    if entry is None:
        entry = models[0]
        if len(models) > 1:
            endpoint.notes.append(f"{len(models)} models are served: the first was taken; --model says another")
    endpoint.model = str(entry["id"])
    endpoint.facts["model"] = entry
    length = entry.get("max_model_len") or (entry.get("meta") or {}).get("n_ctx")
    endpoint.abilities.max_len = int(length) if length else None


async def _look_at_readiness(endpoint: Endpoint) -> None:
    status, found = await endpoint.json("GET", "/ready")
    if status == 503:
        raise ServerError(f"{endpoint.url}: the server is not ready: {_told(found)}")
    if status != 200:
        endpoint.notes.append("no /ready: taken to be ready because it names its models")


async def _look_at_server(endpoint: Endpoint) -> None:
    """What the server is: our own configuration, or the version of those that say one."""
    status, found = await endpoint.json("GET", "/v1/internal/configuration")
    if status == 200 and isinstance(found, dict) and "keys" in found:
        endpoint.facts["configuration"] = found
        counters = await read_counters(endpoint.wire)
        endpoint.finished = None if counters is None else counters["finished"]
        return
    for path, name in (("/version", "version"), ("/props", "props")):
        status, found = await endpoint.json("GET", path)
        if status == 200 and isinstance(found, dict):
            # llama.cpp's properties have the chat template and more: only what identifies the server is kept.
            kept = {key: found[key] for key in ("version", "build_info", "total_slots", "model_path") if key in found}
            endpoint.facts[name] = kept
            length = (found.get("default_generation_settings") or {}).get("n_ctx")
            if endpoint.abilities.max_len is None and length:
                endpoint.abilities.max_len = int(length)
    if endpoint.abilities.max_len is None:
        endpoint.notes.append("no max_model_len: requests may be longer than the server takes")


async def _look_at_tokenizer(endpoint: Endpoint) -> None:
    for name in ("prompt", "content"):  # vLLM's and ours; llama.cpp's
        with contextlib.suppress(ServerError):
            if await endpoint._tokens(name, _PROBE_TEXT):
                endpoint.abilities.tokenizes = name
                return
    endpoint.notes.append(
        "no /tokenize: prompts are text, their lengths near what was asked for; the table counts them"
    )


async def _try_requests(endpoint: Endpoint, api: Api) -> None:
    """Sends requests of a few tokens, with less in them until one is taken. Raises ServerError for the last refusal."""
    abilities = endpoint.abilities
    prompt: Any = _PROBE_TEXT
    if api == "chat":
        prompt = [{"role": "user", "content": _PROBE_TEXT}]
    answer = await endpoint.send(endpoint.request(api, prompt, 2))
    if answer.error in _REFUSALS:
        abilities.exact_lengths = False
        answer = await endpoint.send(endpoint.request(api, prompt, 2))
        if answer.error in _REFUSALS:
            abilities.usage = False
            answer = await endpoint.send(endpoint.request(api, prompt, 2))
    if not answer.ok:
        raise ServerError(f"{endpoint.url}{PATHS[api]}: {answer.error}: {answer.detail}")
    if not abilities.exact_lengths:
        endpoint.notes.append("ignore_eos and min_tokens are refused: answers end where the model ends them")
    if answer.completion_tokens is None:
        abilities.usage = False
        endpoint.notes.append("no usage in streams: generated tokens are counted chunks, prompts are not counted")
    if api == "completions" and abilities.tokenizes:
        ids = await endpoint.tokenize(_PROBE_TEXT)
        answer = await endpoint.send(endpoint.request(api, ids, 2))
        # A server may put a token before the prompt; anything else says that the ids were read as something else.
        abilities.token_ids = answer.ok and answer.prompt_tokens in (None, len(ids), len(ids) + 1)
        if not abilities.token_ids:
            endpoint.notes.append("prompts of token ids are refused: they are sent as text")


async def takes_chat(endpoint: Endpoint) -> str:
    """Why the server takes no messages; "" where it does."""
    answer = await endpoint.send(endpoint.request("chat", [{"role": "user", "content": _PROBE_TEXT}], 2))
    return "" if answer.ok else f"{answer.error}: {answer.detail}"


def _told(found: Any) -> str:
    """The message in an error's body, in any of its shapes."""
    if isinstance(found, dict):
        error = found.get("error", found)
        if isinstance(error, dict):
            error = error.get("message") or error.get("detail") or error
        return str(error)[:_DETAIL]
    return str(found)[:_DETAIL]


def _words(body: bytes) -> str:
    try:
        return _told(json.loads(body))
    except ValueError:
        return body[:_DETAIL].decode(errors="replace")
