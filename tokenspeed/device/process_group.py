"""The ranks of one engine over torch.distributed: gloo on the CPU, NCCL (RCCL under ROCm) and HCCL on devices."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch
from torch import distributed

from tokenspeed.device.handle import PeerGone
from tokenspeed.layers.communication import Communication
from tokenspeed_kernel.platform import current_platform
from tokenspeed_kernel.rank_agreement import adopt_choices, export_choices
from tokenspeed_kernel.records import default_oracle
from tokenspeed_kernel.registry import active_registry
from tokenspeed_kernel.tuning import ensure_own_tables

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}
"""By torch's name of the device. What lies on the host goes over gloo everywhere: tokens, sizes, choices of kernels."""

PATIENCE = timedelta(minutes=30)
"""How long a rank waits for its peers: the slowest may still load its weights. One that died is noticed at once."""

ENVIRONMENT: dict[str, Mapping[str, str]] = {
    "npu": {
        # How long HCCL waits for a peer at the first sum. Its own 120 s are less than loading weights takes.
        "HCCL_CONNECT_TIMEOUT": str(int(PATIENCE.total_seconds())),
        # A sum must have the same bits on every rank, or routers choose differently.
        "HCCL_DETERMINISTIC": "true",
    }
}
"""By device: variables that its library reads, and what they are where the operator says nothing else."""


class ProcessGroup:
    """See Communication. One thread at a time uses it: whoever builds the device side, then the forward thread."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world

    def all_reduce(self, x: torch.Tensor) -> None:
        with _with_peers():
            distributed.all_reduce(x)

    def minimum(self, x: torch.Tensor) -> None:
        with _with_peers():
            distributed.all_reduce(x, op=distributed.ReduceOp.MIN)

    def all_gather(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        with _with_peers():
            distributed.all_gather(list(whole.unbind(0)), part)

    def broadcast(self, x: torch.Tensor) -> None:
        with _with_peers():
            distributed.broadcast(x, src=0)


@contextlib.contextmanager
def _with_peers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerGone(f"another rank does not answer: {str(error).splitlines()[0]}") from error


def _prepare(device: str) -> None:
    """Settles the environment, and brings in the package that adds the backend. Raises RuntimeError where that package
    cannot be imported."""
    for name, value in ENVIRONMENT.get(device, {}).items():
        os.environ.setdefault(name, value)
    if device != "npu":
        return
    try:
        import_module("torch_npu")
    except Exception as error:  # without CANN it raises whatever CANN's libraries raise
        raise RuntimeError(
            f"device npu: torch_npu, which has the backend hccl, cannot be imported ({type(error).__name__}: {error}); "
            "install torch-npu and CANN, or compute on the CPU"
        ) from error


def join(meeting: str, *, rank: int, world: int, device: str) -> ProcessGroup:
    """Meets the other ranks in the folder ``meeting``, returns once all are there; ``device`` as in BACKENDS.

    The first exchange on a device takes the one that is the thread's present device then. Raises RuntimeError where
    the package that speaks to the device is missing.
    """
    _prepare(device)
    distributed.init_process_group(
        BACKENDS[device],
        init_method=f"file://{Path(meeting) / 'store'}",
        rank=rank,
        world_size=world,
        timeout=PATIENCE,
    )
    return ProcessGroup(rank, world)


def agree_on_kernels(communication: Communication) -> None:
    """Has every rank choose its kernels by rank 0's latencies; nobody measures after that. Plugins are loaded before.

    Raises AgreementError where a rank has other kernels than rank 0.
    """
    if communication.world == 1:
        return
    oracle, registry, platform = default_oracle(), active_registry(), current_platform()
    if communication.rank == 0:
        ensure_own_tables(oracle, registry, platform)
        _broadcast_bytes(communication, json.dumps(export_choices(oracle, registry, platform)).encode())
    else:
        adopt_choices(json.loads(_broadcast_bytes(communication, b"")), oracle, registry, platform)


def _broadcast_bytes(communication: Communication, data: bytes) -> bytes:
    """Rank 0's ``data``, on every rank."""
    length = torch.tensor([len(data)], dtype=torch.int64)
    communication.broadcast(length)
    buffer = torch.zeros(int(length), dtype=torch.uint8)
    if communication.rank == 0:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    communication.broadcast(buffer)
    return buffer.numpy().tobytes()
