"""The frontend over a supervised engine process: what the server and offline users both stand on."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from tokenspeed.engine.process import engine_command
from tokenspeed.engine.rank_processes import RankProcesses
from tokenspeed.engine.supervisor import Supervisor
from tokenspeed.frontend.async_llm import AsyncLLM
from tokenspeed.frontend.connection import ZmqEngineConnection
from tokenspeed.launch import engine_streams
from tokenspeed.launch.crash import CrashReporter
from tokenspeed.launch.early_engine import EarlyEngine
from tokenspeed.launch.environment import engine_environment
from tokenspeed.launch.facts import redactor_of
from tokenspeed.messages import EngineOutput, EngineSnapshot, EngineStatus, Inspected, OrderDone
from tokenspeed.recipes.resolved import ResolvedConfig
from tokenspeed.telemetry.snapshot import StateSnapshot

BUNDLE_S = 5.0
"""How long the end of a server waits for a crash bundle that is being written."""


class Service:
    """An AsyncLLM, its connection, and the supervisor of its engine. Lives in one event loop.

    Attributes:
        llm: what callers use.
        supervisor: watches the engine process.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        on_give_up: Callable[[str, bool], None] | None = None,
        server_log: Callable[[], str] = str,
        early: EarlyEngine | None = None,
    ) -> None:
        """``server_log`` returns the last lines of this process's own log, for a crash bundle; ``early`` is an engine
        process that loads its libraries already."""
        self._config = config
        self._connection = ZmqEngineConnection()
        redact = redactor_of(config)
        environment = engine_environment(config)
        if early is not None and config.parallel.tp > 1:
            early.discard()  # it is a rank that is alone
            early = None
        begun = early.take(environment) if early is not None else None
        ranks = config.parallel.tp
        names = ["engine"] if ranks == 1 else [f"rank {rank}" for rank in range(ranks)]
        self._outputs = [engine_streams.EngineOutput(redact, name) for name in names]
        self._output = self._outputs[0]
        if begun is not None:
            self._output.adopt(begun.output, begun.traceback)
        self._reporter = CrashReporter(
            config=config,
            output=self._output,
            other_outputs=self._outputs[1:],
            redact=redact,
            server_log=server_log,
            engine_facts=self._engine_facts,
            on_written=self._bundle_written,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self.supervisor = Supervisor(
            command=engine_command(),
            configuration=config.model_dump_json().encode(),
            environment=environment,
            link=self._connection,
            on_give_up=on_give_up,
            streams=self._output.open,
            on_death=self._reporter.engine_died,
            early=begun.process if begun is not None else None,
            ranks=self._start_ranks if ranks > 1 else None,
        )
        self._llm: AsyncLLM | None = None

    @property
    def llm(self) -> AsyncLLM:
        assert self._llm is not None, "the service is not open"
        return self._llm

    async def open(self) -> None:
        """Starts the engine process, then reads tokenizer and template beside it. Raises what AsyncLLM raises.

        Nothing the engine says is lost: between the start and ``listen`` this event loop has no turn.
        """
        self._loop = asyncio.get_running_loop()
        self.supervisor.start()
        await self.supervisor.first_start()
        self._llm = AsyncLLM(self._config, self._connection)
        self._connection.listen(_Listeners(self._llm, self.supervisor))

    async def close(self) -> None:
        """Ends the engine process and leaves nothing behind."""
        await self.supervisor.stop()
        self._connection.close()
        self._reporter.finish(BUNDLE_S)
        for output in self._outputs:
            output.close()

    def _start_ranks(self) -> RankProcesses:
        with contextlib.ExitStack() as stack:
            streams = [stack.enter_context(output.open()) for output in self._outputs]
            environments = [engine_environment(self._config, rank) for rank in range(len(streams))]
            return RankProcesses(engine_command(), environments, streams)

    def _engine_facts(self) -> tuple[Mapping[str, object], StateSnapshot | None]:
        if self._llm is None:
            return {}, None
        engine, snapshot = self._llm.engine, self._llm.engine.snapshot
        if snapshot is not None:
            snapshot = msgspec.structs.replace(snapshot, events=engine.events.all())
        return engine.facts, snapshot

    def _bundle_written(self, path: Path) -> None:
        """Tells the probes where the bundle is. Comes from the thread that wrote it, perhaps after the loop's end."""
        if self._llm is not None and self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._llm.engine.set_crash_bundle, str(path))


class _Listeners:
    """Passes what the engine says to the frontend, and its status to the supervisor too."""

    def __init__(self, llm: AsyncLLM, supervisor: Supervisor) -> None:
        self._llm = llm
        self._supervisor = supervisor
        self.on_output: Callable[[EngineOutput], None] = llm.on_output
        self.on_snapshot: Callable[[EngineSnapshot], None] = llm.on_snapshot
        self.on_inspected: Callable[[Inspected], None] = llm.on_inspected
        self.on_order_done: Callable[[OrderDone], None] = llm.on_order_done
        self.on_engine_lost: Callable[[str], None] = llm.on_engine_lost
        self.on_engine_given_up: Callable[[str], None] = llm.on_engine_given_up

    def on_status(self, status: EngineStatus) -> None:
        self._supervisor.status_received(status)
        self._llm.on_status(status)
