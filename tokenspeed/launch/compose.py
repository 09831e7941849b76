"""Brings both planes together inside one engine process."""

from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np

from tokenspeed.device.builder import DeviceBuild, Report, build_device_side
from tokenspeed.device.handle import DeviceHandle
from tokenspeed.device.specs import DeviceSpecs
from tokenspeed.engine.following import FollowingLoop
from tokenspeed.engine.journaled_scheduler import begin_record
from tokenspeed.engine.leading import LeadingHandle, leading_scheduler
from tokenspeed.engine.loop import Channel, EngineFailure, EventLoop
from tokenspeed.engine.rank_wire import FollowingLink, LeadingLink
from tokenspeed.engine.statistics import EngineStatistics
from tokenspeed.grammar.pool import GrammarPool
from tokenspeed.launch.grammars import grammar_pool
from tokenspeed.launch.scheduling import compose_scheduler, make_scheduler
from tokenspeed.layers.communication import ALONE, Communication
from tokenspeed.messages import (
    PROTOCOL_VERSION,
    EngineInput,
    EngineMessage,
    EngineOutput,
    RequestOutput,
    SamplingParameters,
    Submit,
)
from tokenspeed.recipes.capacity import scheduler_groups
from tokenspeed.recipes.model_config import read_model_config
from tokenspeed.recipes.resolved import ResolvedConfig, SchedulerSettings
from tokenspeed.telemetry.journal import Begin
from tokenspeed_kernel.serving_guard import process_guard
from tokenspeed_scheduler import Role, Scheduler, SchedulerConfig


@dataclass(frozen=True)
class Engine:
    """What a rank runs: the loop, and what it must shut down afterwards."""

    loop: EventLoop
    handle: DeviceHandle
    specs: DeviceSpecs
    grammars: GrammarPool

    def shutdown(self) -> None:
        """Ends the threads of the device side and those that compile."""
        self.handle.shutdown()
        self.grammars.close()


def scheduler_config(settings: SchedulerSettings, specs: DeviceSpecs) -> SchedulerConfig:
    """Returns the scheduler's world: the operator's settings and what the device side turned out to be."""
    return SchedulerConfig(
        role=Role.FUSED,
        groups=scheduler_groups(specs.groups),
        num_parents=specs.num_parents,
        prefix_granularity=specs.prefix_granularity,
        max_num_seqs=specs.max_num_seqs,
        max_scheduled_tokens=settings.chunk,
        max_model_len=specs.max_model_len,
        overlap_depth=settings.overlap,
        mixed_batches=settings.mixed,
        prefix_cache=settings.prefix_cache,
        headroom_tokens=settings.headroom,
        host_parents=specs.host_parents,
        host_cache=settings.prefix_cache,
        storage=specs.storage,
    )


def compose_engine(
    config: ResolvedConfig,
    channel: Channel,
    report: Report,
    *,
    communication: Communication = ALONE,
    link: LeadingLink | None = None,
) -> Engine:
    """Builds the device side, then the scheduler over it, then the loop that holds both ends. Of an engine of several
    ranks this is rank 0, whose ``link`` leads the others (compose_follower).

    Raises CheckpointError or ValueError where the configuration cannot work.
    """
    report("load", 0, 0, f"reading {config.model.path or 'random dimensions'}")
    model = read_model_config(config.model)
    grammars = grammar_pool(config, model)
    build = build_device_side(config, model, report=report, communication=communication)
    with ExitStack() as failing:
        failing.callback(build.handle.shutdown)
        if link is not None:
            build = replace(build, handle=LeadingHandle(build.handle, link))
        report("warm up", 0, 0, "a first token through every room")
        settings, world = config.scheduler, scheduler_config(config.scheduler, build.specs)

        def led(scheduler: Scheduler) -> Scheduler:
            return scheduler if link is None else leading_scheduler(scheduler, settings.implementation, world, link)

        _first_token(config, build, led(make_scheduler(settings.implementation, world)))
        loop = _loop(config, build, channel, led(compose_scheduler(settings, world)), grammars)
        failing.pop_all()
    return Engine(loop=loop, handle=build.handle, specs=build.specs, grammars=grammars)


@dataclass(frozen=True)
class Follower:
    """What any rank but rank 0 runs, and what it must shut down afterwards."""

    loop: FollowingLoop
    handle: DeviceHandle
    link: FollowingLink

    def shutdown(self) -> None:
        """Ends the threads of the device side after what was queued, then takes leave of rank 0."""
        self.handle.shutdown()
        if self.loop.stopped:
            self.link.take_leave()
        self.link.close()


def compose_follower(config: ResolvedConfig, communication: Communication, link: FollowingLink) -> Follower:
    """Builds this rank's part of the device side, and what follows rank 0. Raises as compose_engine does."""
    build = build_device_side(
        config, read_model_config(config.model), report=lambda *_: None, communication=communication
    )
    own = scheduler_config(config.scheduler, build.specs)

    def begin(record: Begin) -> Scheduler:
        mine = begin_record(config.scheduler.implementation, own, {})
        if mine != record:
            names = sorted(name for name, value in mine.config.items() if record.config.get(name) != value)
            raise EngineFailure(
                f"rank {communication.rank} has another scheduler than rank 0: {', '.join(names) or 'implementation'}"
            )
        return make_scheduler(config.scheduler.implementation, own)

    loop = FollowingLoop(
        rank=communication.rank,
        world=communication.world,
        link=link,
        handle=build.handle,
        begin=begin,
        storage=build.specs.storage,
    )
    return Follower(loop=loop, handle=build.handle, link=link)


def _loop(
    config: ResolvedConfig,
    build: DeviceBuild,
    channel: Channel,
    scheduler: Scheduler,
    grammars: GrammarPool | None,
) -> EventLoop:
    return EventLoop(
        scheduler=scheduler,
        handle=build.handle,
        channel=channel,
        statistics=EngineStatistics(
            build.specs, role="fused", late_kernel_work=lambda: sum(process_guard().violations().values())
        ),
        max_model_len=build.specs.max_model_len,
        overlap=config.scheduler.overlap,
        storage=build.specs.storage,
        grammars=grammars,
    )


class _ProbeChannel:
    """A frontend with one request to make."""

    def __init__(self, probe: Submit) -> None:
        self._inputs = [EngineInput(version=PROTOCOL_VERSION, submits=[probe], drain=True)]
        self.outputs: list[RequestOutput] = []

    def receive(self, timeout_ms: int) -> list[EngineInput]:
        del timeout_ms  # what there is to say is there
        messages, self._inputs = self._inputs, []
        return messages

    def send(self, message: EngineMessage) -> None:
        if isinstance(message, EngineOutput):
            self.outputs.extend(message.outputs)


def _first_token(config: ResolvedConfig, build: DeviceBuild, scheduler: Scheduler) -> None:
    """Runs one request through a loop and a scheduler of its own: ready means that a real token came out.

    The loop that serves starts with clean counters and an empty prefix cache. Raises EngineFailure.
    """
    probe = Submit(
        handle=1,
        request_id="warm-up",
        prompt=np.zeros(1, dtype=np.int32).tobytes(),
        max_new_tokens=2,
        sampling=SamplingParameters(top_k=1),
    )
    channel = _ProbeChannel(probe)
    _loop(config, build, channel, scheduler, None).run()
    last = channel.outputs[-1] if channel.outputs else None
    if last is None or last.finish_reason != "length":
        raise EngineFailure(f"the first token did not come: {last.error if last else 'no output at all'}")
