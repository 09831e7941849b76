"""Every test of this folder runs once for each instruction set that this machine has."""

from collections.abc import Callable, Iterator

import pytest
import torch

import tokenspeed_kernel_cpu
from tokenspeed_kernel.gguf_blocks import BLOCK_BYTES, BLOCK_ELEMENTS
from tokenspeed_kernel.quantized import QuantizedTensor

# Where a block's float16 scale and, if it has one, its minimum lie; and what the minimum is, in scales.
SCALES = {
    "gguf_q4_0": (0, None),
    "gguf_q4_1": (0, 2),
    "gguf_q5_0": (0, None),
    "gguf_q5_1": (0, 2),
    "gguf_q8_0": (0, None),
    "gguf_q2_k": (80, 82),
    "gguf_q3_k": (108, None),
    "gguf_q4_k": (0, 2),
    "gguf_q5_k": (0, 2),
    "gguf_q6_k": (208, None),
}


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
    count = columns // BLOCK_ELEMENTS[name]
    blocks = torch.randint(0, 256, (rows, count, BLOCK_BYTES[name]), dtype=torch.uint8)
    if name == "gguf_mxfp4":
        blocks[..., 0] = torch.randint(118, 124, (rows, count), dtype=torch.uint8)
    if name == "nvfp4":
        blocks[..., :4] = torch.tensor([0.002]).view(torch.uint8)
        blocks[..., 4:8] = torch.randint(32, 80, (rows, count, 4), dtype=torch.uint8)
    if name == "fp8_blocks":
        elements = (torch.randn(rows, count, 128) * 40.0).to(torch.float8_e4m3fn).view(torch.uint8)
        blocks = torch.cat([torch.rand(rows, count, 1).mul(0.002).view(torch.uint8), elements], dim=-1)
    if name not in SCALES:
        return QuantizedTensor(name, shape, {"blocks": blocks.view(rows, -1)}, f"random {name}")
    of_scale, of_minimum = SCALES[name]
    scales = torch.randn(rows, count, 1).mul(0.02 if BLOCK_ELEMENTS[name] == 32 else 0.001).half()
    blocks[..., of_scale : of_scale + 2] = scales.view(torch.uint8)
    if of_minimum is not None:
        factor = -7.5 if BLOCK_ELEMENTS[name] == 32 else 2.5
        blocks[..., of_minimum : of_minimum + 2] = scales.float().mul(factor).half().view(torch.uint8)
    return QuantizedTensor(name, shape, {"blocks": blocks.view(rows, -1)}, f"random {name}")


@pytest.fixture
def random_weight() -> Callable[[str, int, int], QuantizedTensor]:
    """Makes a random weight [rows, columns] of a format."""
    return _random_weight
