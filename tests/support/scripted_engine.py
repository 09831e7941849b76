"""An engine without a model: a real ZeroMQ peer that speaks the real messages and says what a script tells it to."""

import array
import asyncio
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import msgspec
import zmq
import zmq.asyncio

from tokenspeed.frontend.async_llm import AsyncLLM
from tokenspeed.frontend.connection import ZmqEngineConnection
from tokenspeed.messages import (
    PROTOCOL_VERSION,
    EngineInput,
    EngineOutput,
    EngineSnapshot,
    EngineStatus,
    Finish,
    Inspect,
    Inspected,
    Order,
    OrderDone,
    Phase,
    PromptLogprobs,
    RequestOutput,
    Submit,
    TokenLogprobs,
    decode_input,
    encode,
)
from tokenspeed.messages.snapshot import (
    STATES,
    CounterSnapshot,
    FlowSnapshot,
    GroupSnapshot,
    RequestDetail,
    StateSnapshot,
    StepSnapshot,
)
from tokenspeed.recipes.resolved import ApiSettings, ModelSource, ResolvedConfig

MODEL = "scripted"
EOS = 257
VOCABULARY = 300
CONTEXT = 512
HIDDEN = 16

Script = Callable[[Submit], Iterable[RequestOutput]]


def scripted_config(**api: object) -> ResolvedConfig:
    """A random model with the byte tokenizer: one token is one byte."""
    random_config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 256,
        "eos_token_id": EOS,
    }
    return ResolvedConfig(
        name="scripted",
        served_name=MODEL,
        model=ModelSource(kind="random", random_config=json.dumps(random_config)),
        recipe="a-recipe",
        profile="smoke",
        recipe_hash="abc123",
        seed=7,
        api=ApiSettings.model_validate(api),
    )


def say(text: str | bytes, *, ends: bool = True, each: int = 1) -> Script:
    """A script: the bytes of ``text``, ``each`` a round, then the end token unless the length is used up first."""
    tokens = list(text.encode() if isinstance(text, str) else text)

    def run(submit: Submit) -> Iterator[RequestOutput]:
        if submit.pooling is not None:
            yield pooled(submit)
            return
        room = tokens[: submit.max_new_tokens]
        stops = ends and len(room) < submit.max_new_tokens and EOS in submit.sampling.stop_token_ids
        if submit.sampling.prompt_logprobs >= 0:
            yield RequestOutput(handle=submit.handle, prompt_logprobs=prompt_logprobs(submit))
        everything = [*room, EOS] if stops else room
        if not everything:
            raise AssertionError("a script needs at least one token")
        for at in range(0, len(everything), each):
            piece = everything[at : at + each]
            last = at + each >= len(everything)
            yield RequestOutput(
                handle=submit.handle,
                token_ids=piece,
                logprobs=[logprob(token, submit.sampling.logprobs) for token in piece]
                if submit.sampling.logprobs >= 0
                else [],
                cached_tokens=3 if at == 0 else -1,
                queue_s=0.0 if at == 0 else -1.0,
                finish_reason=("stop" if stops else "length") if last else None,
                stop_token_id=EOS if last and stops else -1,
            )

    return run


def pooled(submit: Submit) -> RequestOutput:
    """The embedding of a prompt: its last token, then 1, 2, 3 and so on."""
    last = memoryview(submit.prompt).cast("i")[-1]
    vector = array.array("f", [last, *range(1, HIDDEN)])
    return RequestOutput(
        handle=submit.handle, embedding=vector.tobytes(), cached_tokens=0, queue_s=0.0, finish_reason="stop"
    )


def logprob(token: int, top: int) -> TokenLogprobs:
    """Token t has the log-probability -t/100; its alternatives are the ids after it, each a little less probable."""
    return TokenLogprobs(token, -token / 100, [token + k for k in range(top)], [-(token + k) / 100 for k in range(top)])


def prompt_logprobs(submit: Submit) -> PromptLogprobs:
    ids = memoryview(submit.prompt).cast("i").tolist()
    return PromptLogprobs(1, [logprob(token, submit.sampling.prompt_logprobs) for token in ids[1:]])


def tokens(submit: Submit, *pieces: list[int]) -> Iterator[RequestOutput]:
    """Rounds of token ids without an end."""
    for piece in pieces:
        yield RequestOutput(handle=submit.handle, token_ids=piece)


def snapshot(**changes: object) -> StateSnapshot:
    """A plausible state."""
    state = StateSnapshot(
        time=time.time(),
        uptime_s=12.5,
        role="fused",
        states={name: None if name == "Prefetching" else at for at, name in enumerate(STATES)},
        groups=[
            GroupSnapshot(
                group_id="full",
                kind="full_history",
                block_granularity=64,
                bytes_per_block=4096,
                total=100,
                held=20,
                cached=30,
                free=50,
                pinned=5,
            )
        ],
        flows=[FlowSnapshot("Submitted", "Prefilling", 4)],
        counters=CounterSnapshot(rounds=9, decode_tokens=77),
        step=StepSnapshot(plan_ms=0.1, device_ms=2.0, commit_ms=0.2, bubble_ms=0.3),
        running=2,
        waiting=1,
        last_progress=time.time(),
        has_work=True,
        requests=[],
    )
    return msgspec.structs.replace(state, **changes)


@dataclass
class ScriptedEngine:
    """One engine process, played inside the test. ``script`` may be changed at any time; it is read at each submit.

    Attributes:
        submits, finishes, aborts: everything the frontend said, in order.
        orders: what an operator ordered; answered at once with ``refusal``.
        watched: for how many seconds somebody said to look, each time; answered at once with ``state``, if any.
        inspects: questions about requests; answered at once out of ``details`` unless ``is_busy``.
        messages: the number of messages it came in.
        round_s: how long a round takes at least.
    """

    script: Script = field(default_factory=lambda: say("hello"))
    submits: list[Submit] = field(default_factory=list)
    finishes: list[Finish] = field(default_factory=list)
    aborts: list[int] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)
    refusal: str = ""
    watched: list[float] = field(default_factory=list)
    state: StateSnapshot | None = None
    inspects: list[Inspect] = field(default_factory=list)
    details: dict[str, RequestDetail] = field(default_factory=dict)
    is_busy: bool = False
    messages: int = 0
    drained: bool = False
    round_s: float = 0.0

    def __post_init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._live: dict[int, Iterator[RequestOutput]] = {}
        self._heard = asyncio.Event()
        self._running = asyncio.Event()
        self._running.set()
        self._tasks: list[asyncio.Task[None]] = []
        self._round = 0

    def connect(self, endpoints: tuple[str, str]) -> None:
        self._input = self._context.socket(zmq.PULL)
        self._output = self._context.socket(zmq.PUSH)
        self._input.connect(endpoints[0])
        self._output.connect(endpoints[1])
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._rounds())]

    async def send_status(self, phase: Phase, **more: object) -> None:
        await self._output.send(encode(EngineStatus(version=PROTOCOL_VERSION, phase=phase, **more)))  # type: ignore[arg-type]

    async def send_snapshot(self, state: StateSnapshot) -> None:
        await self._output.send(encode(EngineSnapshot(version=PROTOCOL_VERSION, snapshot=state)))

    async def send_raw(self, data: bytes) -> None:
        await self._output.send(data)

    def pause(self) -> None:
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    async def heard(self, condition: Callable[[], object]) -> None:
        """Returns once ``condition`` is true; it is looked at after each message from the frontend."""
        async with asyncio.timeout(10):
            while not condition():
                self._heard.clear()
                await self._heard.wait()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _listen(self) -> None:
        while True:
            message: EngineInput = decode_input(await self._input.recv())
            self.messages += 1
            for submit in message.submits:
                self.submits.append(submit)
                self._live[submit.handle] = iter(self.script(submit))
            for finish in message.finishes:
                self.finishes.append(finish)
                self._live.pop(finish.handle, None)
            for handle in message.aborts:
                self.aborts.append(handle)
                self._live.pop(handle, None)
            for order in message.orders:
                self.orders.append(order)
                done = OrderDone(version=PROTOCOL_VERSION, number=order.number, refused=self.refusal)
                await self._output.send(encode(done))
            await self._show(message)
            self.drained = self.drained or message.drain
            self._heard.set()

    async def _show(self, message: EngineInput) -> None:
        if message.watch_s:
            self.watched.append(message.watch_s)
            if self.state is not None:
                await self.send_snapshot(self.state)
        for inspect in message.inspects:
            self.inspects.append(inspect)
            if not self.is_busy:
                detail = self.details.get(inspect.name)
                await self._output.send(
                    encode(Inspected(version=PROTOCOL_VERSION, number=inspect.number, detail=detail))
                )

    async def _rounds(self) -> None:
        while True:
            await self._running.wait()
            outputs = []
            for handle, script in list(self._live.items()):
                output = next(script, None)
                if output is None or output.finish_reason is not None:
                    self._live.pop(handle, None)
                if output is not None:
                    outputs.append(output)
            if outputs:
                self._round += 1
                await self._output.send(
                    encode(EngineOutput(version=PROTOCOL_VERSION, round=self._round, outputs=outputs))
                )
                await asyncio.sleep(self.round_s)
            else:
                self._heard.clear()
                await self._heard.wait()


class Stack:
    """Frontend, connection and scripted engine, wired up. ``engine`` is replaced by ``new_engine``."""

    def __init__(self, config: ResolvedConfig | None = None) -> None:
        self.connection = ZmqEngineConnection()
        self.llm = AsyncLLM(config or scripted_config(), self.connection)
        self.engine = ScriptedEngine()
        self._engines: list[ScriptedEngine] = []

    async def new_engine(self, *, ready: bool = True) -> ScriptedEngine:
        """Starts another engine on fresh endpoints, as a supervisor would."""
        self.engine = ScriptedEngine()
        self._engines.append(self.engine)
        self.engine.connect(self.connection.rebind())
        if ready:
            await self.engine.send_status("ready", facts={"max_model_len": CONTEXT, "kv_tokens": 4096})
            await self.llm.engine.wait_ready()
        return self.engine

    async def close(self) -> None:
        for engine in self._engines:
            await engine.close()
        self.connection.close()
