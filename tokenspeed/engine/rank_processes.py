"""The processes of an engine of several ranks, held as one: they start together, and where one ends all end."""

import asyncio
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from tokenspeed.engine.process import EngineProcess, EngineStreams

EXIT_PEER_LOST = 71
"""The exit status of a rank that ended because another was gone."""

CAUSE_S = 2.0
"""How long the end of another is waited for, where one says that another was gone."""

ALONE_S = 2.0
"""How long a rank may take to end by itself once another has."""


class RankProcesses:
    """As EngineProcess, of all ranks. Raises OSError where one of them cannot be started.

    Args:
        command: of one rank; which one it is, of how many, and where they meet are added.
        environments, streams: of each rank.

    Attributes:
        name: of the process whose end was the engine's, for messages; ``pid`` is its id, rank 0's before.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        streams: Sequence[EngineStreams | None],
    ) -> None:
        self._folder = tempfile.mkdtemp(prefix="tokenspeed-ranks-")
        self._ranks: list[EngineProcess] = []
        self._ended = 0
        world = len(environments)
        with ExitStack() as begun:
            begun.callback(self._remove)
            for rank, (environment, own) in enumerate(zip(environments, streams, strict=True)):
                place = [str(rank), str(world), self._folder]
                self._ranks.append(EngineProcess([*command, *place], environment, own))
                begun.callback(self._ranks[-1].discard)
            begun.pop_all()

    @property
    def name(self) -> str:
        return f"rank {self._ended} of {len(self._ranks)} of the engine"

    @property
    def pid(self) -> int:
        return self._ranks[self._ended].pid

    @property
    def is_alive(self) -> bool:
        """Whether one of them is."""
        return any(rank.is_alive for rank in self._ranks)

    def tell(self, line: bytes) -> None:
        """Tells every rank the same."""
        for rank in self._ranks:
            rank.tell(line)

    def cut(self) -> None:
        """Closes the life lines."""
        for rank in self._ranks:
            rank.cut()

    async def wait(self) -> int:
        """Waits for rank 0 to end or another to fail, ends all others, and returns that one's exit status."""
        waits = {asyncio.create_task(rank.wait()): number for number, rank in enumerate(self._ranks)}
        try:
            status = await self._first_end(waits)
        finally:
            for wait in waits:
                wait.cancel()
        await self.end(ALONE_S)
        return status

    async def _first_end(self, waits: "dict[asyncio.Task[int], int]") -> int:
        """The status of the rank whose end is the cause of the others'; sets ``_ended``."""
        failed: dict[int, int] = {}
        while waits:
            patience = CAUSE_S if failed else None
            done, _ = await asyncio.wait(waits, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            ends = {waits.pop(wait): wait.result() for wait in done}
            failed |= {rank: status for rank, status in ends.items() if status != 0}
            if 0 in ends and not failed:
                return 0
            causes = [rank for rank, status in failed.items() if status != EXIT_PEER_LOST]
            if causes or (failed and not done):
                break
        # One that was killed goes before one that says what ails it, and that before those who lost another.
        self._ended = min(failed, key=lambda rank: (failed[rank] == EXIT_PEER_LOST, failed[rank] > 0, rank), default=0)
        return failed.get(self._ended, 0)

    def send_signal(self, number: int) -> None:
        """Sends it to every rank."""
        for rank in self._ranks:
            rank.send_signal(number)

    async def end(self, patience_s: float) -> None:
        """Ends every rank as EngineProcess.end does; returns once all are gone."""
        await asyncio.gather(*(rank.end(patience_s) for rank in self._ranks))
        self._remove()

    def discard(self) -> None:
        """Ends them and does not wait."""
        for rank in self._ranks:
            rank.discard()
        self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
