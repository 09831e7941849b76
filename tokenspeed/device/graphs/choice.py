"""Which graphs an engine has, and what is captured with them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from tokenspeed.device.graphs.ascend_graphs import AscendGraphs
from tokenspeed.device.graphs.dispatch import DispatchGraphs
from tokenspeed.device.graphs.gpu_graphs import GpuGraphs
from tokenspeed.device.graphs.native import NativeGraphs
from tokenspeed.device.graphs.provider import GraphProvider
from tokenspeed.recipes.capture_ladder import capture_ladder
from tokenspeed.recipes.resolved import SchedulerSettings
from tokenspeed_kernel.recording import recorder_of
from tokenspeed_kernel.registry import KernelSpec

EXCHANGED = "ranks sum what they have between the kernels"
"""Why the forwards of several ranks are not captured on the CPU: gloo exchanges on the host."""


def dispatch_graphs(settings: SchedulerSettings, device: str) -> DispatchGraphs | None:
    """The dispatch recorder where it is asked for, which must be there before kernels are bound; else None. ValueError
    where the tensors are not the CPU's."""
    if settings.graphs != "dispatch":
        return None
    if device != "cpu":
        raise ValueError(
            f"scheduler.graphs is dispatch, which records tensors of the CPU, the device is {device}; set it to auto"
        )
    return DispatchGraphs()


def choose_graphs(
    settings: SchedulerSettings,
    device: str,
    *,
    world: int,
    dispatch: DispatchGraphs | None,
    kernels: Iterable[KernelSpec],
) -> GraphProvider | str:
    """What captures the forwards made of ``kernels`` by one of ``world`` ranks; or, in words, why nothing does.

    ``device``: the kind of torch device, "cpu", "cuda" or "npu".
    """
    if settings.graphs == "off":
        return "scheduler.graphs is off"
    if device == "cpu" and world > 1:
        return EXCHANGED
    if dispatch is not None:
        return dispatch
    if device == "cpu":
        recorder = recorder_of(kernels)
        return recorder if isinstance(recorder, str) else NativeGraphs(recorder)
    if device == "cuda":
        return GpuGraphs(torch.cuda) if torch.cuda.is_available() else "torch.cuda has no device here"
    npu = getattr(torch, "npu", None)
    if device == "npu" and hasattr(npu, "NPUGraph"):  # older releases of torch_npu have none
        return AscendGraphs(npu)
    return f"there are no graphs of a device {device!r} here"


@dataclass(frozen=True, slots=True)
class CaptureSizes:
    """What to capture: rows of decodes, tokens of prefills; ascending."""

    decodes: Sequence[int]
    prefills: Sequence[int]

    @staticmethod
    def of(settings: SchedulerSettings, provider: GraphProvider | str, *, longest: int) -> "CaptureSizes":
        """Those of the configuration that can come up; ``longest``: tokens of a sequence."""
        if isinstance(provider, str) or provider.as_it_runs:
            recorded = min(settings.max_recorded_seqs, settings.max_seqs)
            return CaptureSizes(range(1, recorded + 1), settings.capture_prefill_tokens)
        bound = min(settings.chunk, longest)
        prefills = [tokens for tokens in settings.capture_prefill_tokens if tokens <= bound]
        return CaptureSizes(capture_ladder(settings), prefills)
