"""Where a rank's tensors live: which device a configuration means, and that the host's own memory is never copied."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from plan_maker import ints

from tokenspeed.device import placement
from tokenspeed.device.placement import HOST, Landing, Placement, PlacementError, Twin
from tokenspeed.device.step_memory import ALIGNMENT, Packing


class Runtime(SimpleNamespace):
    """As much of ``torch.cuda`` as placing asks; ``said`` is what it was told."""

    def __init__(self, count: int) -> None:
        super().__init__(said=[], device_count=lambda: count, Stream=object, set_device=self._set)

    def _set(self, index: int) -> None:
        self.said.append(index)


def on(monkeypatch: pytest.MonkeyPatch, runtime: Any) -> None:
    monkeypatch.setattr(placement, "runtime_of", lambda kind: runtime if kind == "cuda" else None)


def test_one_rank_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(2)
    on(monkeypatch, runtime)
    found = Placement.of("cuda", 1)
    assert (found.device, found.is_host) == (torch.device("cuda", 1), False)
    found.enter()
    assert runtime.said == [1, 1]
    with pytest.raises(PlacementError, match=r"rank 2 needs a device of its own, there are 2; lower parallel\.tp"):
        Placement.of("cuda", 2)


def test_what_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, None)
    for kind in ("cuda", "npu"):
        with pytest.raises(PlacementError, match=f"device '{kind}': PyTorch .* finds none on this machine"):
            Placement.of(kind, 0)
    with pytest.raises(PlacementError, match="device 'tpu' is unknown; it is cpu, cuda, npu"):
        Placement.of("tpu", 0)


def test_every_rank_of_the_host_has_its_memory() -> None:
    assert Placement.of("cpu", 5) is HOST
    HOST.enter()
    with HOST.copying():
        HOST.mark().wait()


def test_on_the_host_nothing_is_copied() -> None:
    values = ints([1, 2, 3])
    assert HOST.upload(values).data_ptr() == values.ctypes.data
    twin = Twin(HOST, 64)
    twin.begin()
    pair = Packing(twin).take(np.int32, 3)
    pair.host[:] = values
    twin.upload(64)
    assert pair.tensor.tolist() == [1, 2, 3] and pair.on_host is pair.tensor
    landing = Landing(HOST)
    assert landing.take(pair.tensor).ctypes.data == pair.tensor.data_ptr()
    landing.wait()


def test_arrays_of_a_step_are_aligned_and_apart() -> None:
    packing = Packing(Twin(HOST, 256), 16)
    pairs = [
        packing.take(np.int32, 3),
        packing.take(np.int64, 0),
        packing.take(np.int64, 1),
        packing.take(np.float32, 5),
    ]
    starts = [pair.tensor.data_ptr() for pair in pairs]
    assert all(start % ALIGNMENT == 0 for start in starts)
    for number, pair in enumerate(pairs):
        pair.host[:] = number + 1
    assert [set(pair.tensor.tolist()) for pair in pairs] == [{1}, set(), {3}, {4.0}]
    with pytest.raises(AssertionError, match="in memory of 256"):
        packing.take(np.int64, 40)
