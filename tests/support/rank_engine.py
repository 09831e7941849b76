"""An engine of several ranks in the test's process: a thread each, real sockets between them, everything else real."""

import tempfile
import threading
from contextlib import ExitStack

from in_process_engine import Compose
from memory_channel import MemoryChannel
from thread_ranks import ThreadRank, kernels_agreed, thread_ranks

from tokenspeed.engine.loop import EngineFailure, EventLoop
from tokenspeed.engine.rank_wire import FollowingLink, LeadingLink
from tokenspeed.launch.compose import Engine, compose_engine, compose_follower
from tokenspeed.recipes.resolved import ResolvedConfig

PATIENCE_S = 15.0


def share(config: ResolvedConfig, world: int) -> ResolvedConfig:
    """``config`` among ``world`` ranks whose caches have as many blocks as that of one, each its part of a block."""
    kv = config.kv.model_copy(update={"bytes": config.kv.bytes // world, "host_bytes": config.kv.host_bytes // world})
    parallel = config.parallel.model_copy(update={"tp": world})
    return config.model_copy(update={"kv": kv, "parallel": parallel})


class RankEngine:
    """Rank 0's engine, and the other ranks on threads of their own.

    Attributes:
        loop: rank 0's.
        failures: how other ranks ended that did not end well, known after ``shutdown``.
    """

    def __init__(self, config: ResolvedConfig, channel: MemoryChannel, other: ResolvedConfig | None = None) -> None:
        """``other``: the configuration of the other ranks, where it is another."""
        world = config.parallel.tp
        self.failures: list[str] = []
        self._folder = tempfile.TemporaryDirectory()
        self._ranks = ranks = thread_ranks(world)
        self._threads = [
            threading.Thread(target=self._follow, args=(other or config, rank), daemon=True) for rank in ranks[1:]
        ]
        with kernels_agreed(), ExitStack() as failing:
            link = LeadingLink(self._folder.name, world)
            failing.callback(link.close)
            for thread in self._threads:
                thread.start()
            self._engine: Engine = compose_engine(config, channel, lambda *_: None, communication=ranks[0], link=link)
            failing.pop_all()

    @property
    def loop(self) -> EventLoop:
        return self._engine.loop

    def _follow(self, config: ResolvedConfig, rank: ThreadRank) -> None:
        link = FollowingLink(self._folder.name, rank.rank)
        try:
            follower = compose_follower(config, rank, link)
        except BaseException:
            link.close()
            raise
        try:
            follower.loop.run()
        except EngineFailure as error:
            self.failures.append(str(error))
            rank.die()
        finally:
            follower.shutdown()

    def fail(self) -> None:
        """Rank 0 is gone, as where its process ended."""
        self._ranks[0].die()

    def shutdown(self) -> None:
        self._engine.shutdown()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a rank did not end"
        self._folder.cleanup()


def composed(engines: list[RankEngine]) -> Compose:
    """For ``run_requests``; the engine is noted in ``engines``."""

    def compose(config: ResolvedConfig, channel: MemoryChannel) -> RankEngine:
        engines.append(RankEngine(config, channel))
        return engines[-1]

    return compose
