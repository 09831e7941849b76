"""Recorded kernel calls: made again they do the same over what the memory holds by then; other work is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tokenspeed_kernel.ops import bind_fused_add_rms_norm, bind_linear, bind_silu_and_mul
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.recording import Recorder, RecordingError, recorder_of

HIDDEN, WIDTH = 96, 64


class Block:
    """A few kernels in a row over buffers that stay."""

    def __init__(self, tokens: int) -> None:
        weight = QuantizedTensor.from_dense(torch.randn(2 * WIDTH, HIDDEN), "test")
        bound = [bind_fused_add_rms_norm(), bind_linear(weight, torch.randn(2 * WIDTH)), bind_silu_and_mul()]
        self.specs = [kernel.spec for kernel in bound]
        self._norm, self._linear, self._silu = (kernel.fn for kernel in bound)
        self.x, self.residual = torch.randn(tokens, HIDDEN), torch.randn(tokens, HIDDEN)
        self._normed, self._gate_up = torch.empty(tokens, HIDDEN), torch.empty(tokens, 2 * WIDTH)
        self._gain = torch.rand(HIDDEN)
        self.out = torch.empty(tokens, WIDTH)

    def run(self) -> str:
        gate, up = self._gate_up.chunk(2, dim=1)
        self._norm(self.x, self.residual, self._gain, 1e-5, self._normed)
        self._linear(self._normed, self._gate_up)
        self._silu(gate, up, self.out)
        return "done"


@pytest.fixture
def record() -> Callable[..., Any]:
    found = recorder_of(Block(1).specs)
    assert not isinstance(found, str), found
    recorder: Recorder = found
    return recorder


@pytest.mark.parametrize("inference", [False, True])
def test_a_replay_computes_anew_from_the_same_memory(record: Callable[..., Any], inference: bool) -> None:
    with torch.inference_mode(inference):
        block = Block(5)
        before = block.residual.clone()
        result, replay = record(block.run)
        assert result == "done"
        recorded = block.out.clone()
        block.residual.copy_(before)
        block.out.fill_(torch.nan)
        replay()
        torch.testing.assert_close(block.out, recorded, rtol=0, atol=0)

        block.x.copy_(torch.randn_like(block.x))
        before = block.residual.clone()
        replay()
        replayed = block.out.clone()
        block.residual.copy_(before)
        block.run()
        torch.testing.assert_close(replayed, block.out, rtol=0, atol=0)
        assert not torch.equal(replayed, recorded)


def test_work_that_a_replay_would_leave_out_is_refused_and_recording_ends(record: Callable[..., Any]) -> None:
    block = Block(2)

    def body() -> None:
        block.run()
        block.out.add_(1.0)

    with pytest.raises(RecordingError, match=r"add_.* ran beside the kernels .*make it a kernel"):
        record(body)
    _, replay = record(block.run)
    block.out.fill_(torch.nan)
    replay()
    assert not block.out.isnan().any()


@pytest.mark.parametrize("inference", [False, True])
def test_a_conversion_is_work_and_a_view_is_none(record: Callable[..., Any], inference: bool) -> None:
    """Of ``to`` the schema says that the result may be a view."""
    with torch.inference_mode(inference):
        block, ids = Block(2), torch.ones(3, dtype=torch.int32)

        def body() -> None:
            block.run()
            ids.long()

        with pytest.raises(RecordingError, match=r"to.* ran beside the kernels"):
            record(body)

        def views() -> None:
            block.run()
            ids.int().view(1, 3).unbind(0)

        record(views)


def test_an_error_of_the_body_comes_through(record: Callable[..., Any]) -> None:
    def body() -> None:
        raise KeyError("weights")

    with pytest.raises(KeyError, match="weights"):
        record(body)
