"""The frontend over a supervised engine process: what the server and offline users both stand on."""

from collections.abc import Callable

from tokenspeed.engine.supervisor import Supervisor, engine_command
from tokenspeed.frontend.async_llm import AsyncLLM
from tokenspeed.frontend.connection import ZmqEngineConnection
from tokenspeed.launch.environment import engine_environment
from tokenspeed.messages import EngineOutput, EngineSnapshot, EngineStatus
from tokenspeed.recipes.resolved import ResolvedConfig


class Service:
    """An AsyncLLM, its connection, and the supervisor of its engine. Lives in one event loop.

    Attributes:
        llm: what callers use.
        supervisor: watches the engine process.
    """

    def __init__(self, config: ResolvedConfig, on_give_up: Callable[[str, bool], None] | None = None) -> None:
        self._config = config
        self._connection = ZmqEngineConnection()
        self.supervisor = Supervisor(
            command=engine_command(),
            first_line=config.model_dump_json().encode(),
            environment=engine_environment(config),
            link=self._connection,
            on_give_up=on_give_up,
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
        self.supervisor.start()
        await self.supervisor.first_start()
        self._llm = AsyncLLM(self._config, self._connection)
        self._connection.listen(_Listeners(self._llm, self.supervisor))

    async def close(self) -> None:
        """Ends the engine process and leaves nothing behind."""
        await self.supervisor.stop()
        self._connection.close()


class _Listeners:
    """Passes what the engine says to the frontend, and its status to the supervisor too."""

    def __init__(self, llm: AsyncLLM, supervisor: Supervisor) -> None:
        self._llm = llm
        self._supervisor = supervisor
        self.on_output: Callable[[EngineOutput], None] = llm.on_output
        self.on_snapshot: Callable[[EngineSnapshot], None] = llm.on_snapshot
        self.on_engine_lost: Callable[[str], None] = llm.on_engine_lost
        self.on_engine_given_up: Callable[[str], None] = llm.on_engine_given_up

    def on_status(self, status: EngineStatus) -> None:
        self._supervisor.status_received(status)
        self._llm.on_status(status)
