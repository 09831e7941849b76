"""One engine rank's life: its endpoints and its configuration come on standard input.

Started by the API process, never by hand, and before that knows what is to be served: libraries load meanwhile. It ends
when its standard input closes: an engine without its API process would hold the memory for nobody.
"""

import contextlib
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from tokenspeed.device.guard import control_plane_guard
from tokenspeed.device.handle import peer_is_gone
from tokenspeed.device.process_group import join
from tokenspeed.engine.channel import EngineChannel, OutputChannel
from tokenspeed.engine.loop import EngineFailure, PeerLost
from tokenspeed.engine.process import TRACEBACK_VARIABLE
from tokenspeed.engine.rank_processes import EXIT_PEER_LOST
from tokenspeed.engine.rank_wire import FollowingLink, LeadingLink
from tokenspeed.engine.supervisor import EXIT_CONFIGURATION, EXIT_FAILURE
from tokenspeed.launch.compose import Engine, Follower, compose_engine, compose_follower
from tokenspeed.launch.facts import redactor_of
from tokenspeed.launch.memory_nodes import spread_memory
from tokenspeed.launch.memory_report import memory_account, proportional_bytes
from tokenspeed.layers.communication import Communication
from tokenspeed.messages import PROTOCOL_VERSION, EngineFacts, EngineStatus, Phase
from tokenspeed.recipes.resolved import ResolvedConfig
from tokenspeed.recipes.topology import cpu_places
from tokenspeed.telemetry.logs import engine_logs
from tokenspeed_kernel.platform import current_platform
from tokenspeed_kernel.plugins.discovery import PluginError
from tokenspeed_kernel.rank_agreement import AgreementError
from tokenspeed_kernel.selection import SelectionError
from tokenspeed_kernel.serving_guard import begin_serving

logger = logging.getLogger("tokenspeed.engine")

CONFIGURATION_ERRORS = (ValueError, SelectionError, PluginError, AgreementError)
"""What building an engine raises where the configuration, the checkpoint or a plugin must change first."""

LIFE_LINE = 0
"""The file descriptor of standard input."""

SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep the GIL from another: the loop and the forward thread hand over many times a step."""


class _Told(BaseModel):
    """What an engine is told: where it listens and where it speaks, and what it serves."""

    endpoints: tuple[str, str]
    configuration: ResolvedConfig


@dataclass(frozen=True)
class Place:
    """Which rank this process is, of how many, and the folder in which they meet."""

    rank: int = 0
    world: int = 1
    meeting: str = ""

    @classmethod
    def of(cls, arguments: Sequence[str]) -> "Place":
        """As the command line says it; nothing: a rank alone."""
        return cls(int(arguments[0]), int(arguments[1]), arguments[2]) if arguments else cls()

    @property
    def name(self) -> str:
        return "engine" if self.world == 1 else f"rank {self.rank}"


def main(arguments: Sequence[str]) -> int:
    """Runs one rank to its end and returns the process's exit status; 0 where it was never told what to serve."""
    place = Place.of(arguments)
    _leave_traceback()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    line = _first_line()
    if not line:
        return 0
    told = _Told.model_validate_json(line)
    config = told.configuration
    _end_with_parent()
    with engine_logs(place.name, config.log.level, redactor_of(config)):
        return _run(config, place, *told.endpoints)


def _run(config: ResolvedConfig, place: Place, input_endpoint: str, output_endpoint: str) -> int:
    if place.rank > 0:
        silent = OutputChannel(output_endpoint)
        with contextlib.closing(silent):
            return _serve(silent, lambda: _follow(config, place), who=f"rank {place.rank} of {place.world}: ")
    channel = EngineChannel(input_endpoint, output_endpoint)
    with contextlib.closing(channel):
        status = _serve(channel, lambda: _start(config, channel, place))
        if status == 0:
            channel.send(_status("stopped"))
        return status


def _serve(channel: OutputChannel, start: Callable[[], Engine | Follower], who: str = "") -> int:
    """Builds and runs; returns the exit status. ``who`` stands before what a failure says."""
    try:
        engine = start()
    except CONFIGURATION_ERRORS as error:
        # The configuration or the checkpoint is at fault, and the message says how: no traceback helps.
        return _failed(channel, f"{who}{error}", EXIT_CONFIGURATION)
    except Exception as error:
        if peer_is_gone(error):
            return _alone(f"{who}{error}")
        logger.exception("the engine could not start")
        return _failed(channel, f"{who}{type(error).__name__}: {error}", EXIT_FAILURE)
    try:
        with control_plane_guard():
            engine.loop.run()
    except PeerLost as error:
        return _alone(str(error))
    except EngineFailure as error:  # of several ranks it says which
        return _failed(channel, str(error), EXIT_FAILURE)
    except Exception as error:
        logger.exception("the engine failed")
        return _failed(channel, f"{who}{type(error).__name__}: {error}", EXIT_FAILURE)
    finally:
        engine.shutdown()
    return 0


def _start(config: ResolvedConfig, channel: EngineChannel, place: Place) -> Engine:
    before = proportional_bytes()
    spread_memory(cpu.node for cpu in cpu_places())

    def report(phase: Phase, done: int = 0, total: int = 0, detail: str = "") -> None:
        channel.send(_status(phase, done=done, total=total, detail=detail))

    if place.world == 1:
        engine = compose_engine(config, channel, report)
    else:
        report("load", 0, 0, f"meeting {place.world - 1} other ranks")
        with contextlib.ExitStack() as failing:
            link = LeadingLink(place.meeting, place.world)
            failing.callback(link.close)
            engine = compose_engine(config, channel, report, communication=_join(config, place), link=link)
            failing.pop_all()
    _begin_to_serve()
    channel.send(_status("ready", facts=_facts(engine, memory_account(engine.specs, before, proportional_bytes()))))
    return engine


def _follow(config: ResolvedConfig, place: Place) -> Follower:
    spread_memory(cpu.node for cpu in cpu_places())
    with contextlib.ExitStack() as failing:
        link = FollowingLink(place.meeting, place.rank)
        failing.callback(link.close)
        follower = compose_follower(config, _join(config, place), link)
        failing.pop_all()
    _begin_to_serve()
    return follower


def _join(config: ResolvedConfig, place: Place) -> Communication:
    return join(place.meeting, rank=place.rank, world=place.world, device=config.device)


def _begin_to_serve() -> None:
    """What lives now lives until the end: the collector, off so far (launch/rank.py), need not look at it."""
    gc.freeze()
    gc.enable()
    begin_serving()


def _alone(error: str) -> int:
    """Ends a rank whose peer is gone; what the peer said, or how it ended, is the cause."""
    logger.error("%s", error)
    return EXIT_PEER_LOST


def _failed(channel: OutputChannel, error: str, status: int) -> int:
    logger.error("%s", error)
    channel.send(_status("failed", error=error))
    return status


def _status(
    phase: Phase,
    *,
    done: int = 0,
    total: int = 0,
    detail: str = "",
    error: str = "",
    facts: EngineFacts | None = None,
) -> EngineStatus:
    return EngineStatus(
        version=PROTOCOL_VERSION,
        phase=phase,
        done=done,
        total=total,
        detail=detail,
        pid=os.getpid(),
        facts=facts or {},
        error=error,
    )


def _facts(engine: Engine, memory: dict[str, int]) -> EngineFacts:
    specs = engine.specs
    return {
        "device": specs.device,
        "vendor": current_platform().vendor,
        "max_model_len": specs.max_model_len,
        "max_num_seqs": specs.max_num_seqs,
        "kv_tokens": specs.kv_tokens,
        "kv_bytes": specs.arena_bytes,
        "host_bytes": specs.host_bytes,
        "storage": specs.storage,
        "weight_bytes": specs.weight_bytes,
        "workspace_bytes": specs.workspace_bytes,
        "vocab_size": specs.vocab_size,
        "kernels": dict(specs.kernels),
        "kernel_doubts": dict(specs.kernel_doubts),
        "memory": dict(memory),
    }


def _first_line() -> bytes:
    """Returns the first line of standard input. Unbuffered, as the life line's thread reads on where this ends."""
    line = bytearray()
    while not line.endswith(b"\n"):
        data = os.read(LIFE_LINE, 1 << 16)
        if not data:
            break
        line += data
    return bytes(line)


def _leave_traceback() -> None:
    """Has a fatal signal write the stacks of all threads to where the supervisor's side looks for them."""
    descriptor = os.environ.pop(TRACEBACK_VARIABLE, "")
    if descriptor:
        os.set_inheritable(int(descriptor), False)
        faulthandler.enable(int(descriptor))


def _end_with_parent() -> None:
    """Ends this process at once when standard input closes."""

    def watch() -> None:
        while os.read(LIFE_LINE, 1):
            pass
        os._exit(EXIT_FAILURE)

    threading.Thread(target=watch, name="life line", daemon=True).start()
