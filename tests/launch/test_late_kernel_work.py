"""What kernels do too late shows in the engine's counters."""

from in_process_engine import run_requests
from memory_channel import MemoryChannel
from tiny_models import random_config, resolved

from tokenspeed.launch.compose import compose_engine
from tokenspeed.recipes.resolved import ModelSource
from tokenspeed_kernel.ops import bind_rms_norm
from tokenspeed_kernel.serving_guard import begin_serving, process_guard

CONFIG = resolved(ModelSource(kind="random", random_config=random_config()))


def test_a_binding_while_serving_is_counted() -> None:
    channel = MemoryChannel()
    engine = compose_engine(CONFIG, channel, lambda phase, done=0, total=0, detail="": None)
    begin_serving()
    try:
        engine.loop.publish_snapshot()
        bind_rms_norm()
        bind_rms_norm()
        engine.loop.publish_snapshot()
    finally:
        process_guard().end()
        engine.handle.shutdown()
    assert [snapshot.counters.late_kernel_work for snapshot in channel.snapshots] == [0, 2]


def test_an_engine_that_does_its_work_before_counts_none() -> None:
    begin_serving()  # clears what others left
    process_guard().end()
    assert run_requests(CONFIG, []).counters.late_kernel_work == 0
