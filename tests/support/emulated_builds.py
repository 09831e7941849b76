"""The device side of small models, on the host and on the emulated device, and what both draw."""

from collections.abc import Callable, Sequence

from plan_maker import FakePlan, Request, groups_of, run
from tiny_models import REFERENCE, build, prompt_of, random_config, resolved

from tokenspeed.device.builder import DeviceBuild
from tokenspeed.device.handle import StepResult
from tokenspeed.recipes.machine import detect_machine
from tokenspeed.recipes.resolve import model_source, resolve
from tokenspeed.recipes.resolved import ModelSource

GRANULARITY = 16
LLAMA = ModelSource(kind="random", random_config=random_config())


def smoke_model(recipe: str) -> ModelSource:
    """The random model of a recipe's smoke profile."""
    source = model_source(resolve(recipe, detect_machine(), profile="smoke"))
    assert source is not None
    return source


def built(source: ModelSource, device: str, **changes: object) -> DeviceBuild:
    """``device``: "cpu" or "npu", the emulated one; reference kernels."""
    config = resolved(
        source, kernels=REFERENCE, **{"kv_bytes": 8 << 20, "granularity": GRANULARITY, "chunk": 256, **changes}
    )
    return build(config.model_copy(update={"device": device}))


def requests() -> list[Request]:
    """Three of them, of which two are prefilled in chunks."""
    lengths = enumerate((13, 5, 20), start=1)
    return [Request(prompt=prompt_of(n, row), row=row, max_new_tokens=3, chunk=8) for row, n in lengths]


def outputs(
    made: DeviceBuild,
    batch: Sequence[Request],
    *,
    granularity: int = GRANULARITY,
    overlap: int = 1,
    watch: Callable[[FakePlan, StepResult], None] = lambda plan, result: None,
) -> list[list[int]]:
    """The requests begin one after the other, so that steps prefill, decode, and do both."""
    return run(
        made.handle,
        batch,
        granularity=granularity,
        groups=groups_of(made.specs),
        overlap=overlap,
        join=lambda step, request: step >= 2 * request.row,
        watch=watch,
    )
