"""Every test of this folder runs once for each instruction set that this machine has."""

from collections.abc import Callable, Iterator

import pytest
import torch

import tokenspeed_kernel_cpu
from tokenspeed_kernel.quantized import QuantizedTensor

BLOCK_BYTES = {"gguf_q4_0": 18, "gguf_q4_1": 20, "gguf_q8_0": 34}


@pytest.fixture(params=tokenspeed_kernel_cpu.available_instruction_sets())
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Puts one instruction set in force."""
    with tokenspeed_kernel_cpu.use_instruction_set(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20261129)


def _random_weight(name: str, rows: int, columns: int) -> QuantizedTensor:
    shape = (rows, columns)
    if name not in BLOCK_BYTES:
        return QuantizedTensor.from_dense(torch.randn(shape).to(getattr(torch, name)), f"random {name}")
    blocks = torch.randint(0, 256, (rows, columns // 32, BLOCK_BYTES[name]), dtype=torch.uint8)
    scales = torch.randn(rows, columns // 32, 1).mul(0.02).half()
    blocks[..., 0:2] = scales.view(torch.uint8)
    if name == "gguf_q4_1":
        blocks[..., 2:4] = scales.float().mul(-7.5).half().view(torch.uint8)
    return QuantizedTensor(name, shape, {"blocks": blocks.view(rows, -1)}, f"random {name}")


@pytest.fixture
def random_weight() -> Callable[[str, int, int], QuantizedTensor]:
    """Makes a random weight [rows, columns] of a format."""
    return _random_weight
