"""What the delta rule takes beside its inputs is what the memory plan counts: every tensor that its launches make."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tokenspeed.recipes.dimensions import LinearAttention
from tokenspeed.recipes.memory import DELTA_CHUNKS, delta_rule_bytes
from tokenspeed_kernel_triton.configs import SHARED_MEMORY, delta_tile
from tokenspeed_kernel_triton.device import compiling_for
from tokenspeed_kernel_triton.gated_delta_chunks import SHORT, chunk_launches


class Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of what is allocated while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format:
            self.bytes += found.nbytes
        return found


def bytes_made(architecture: str, linear: LinearAttention, tokens: int, rows: int) -> int:
    """By the launches for ``rows`` requests of ``tokens`` tokens in all."""

    def of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    heads, key, value = linear.value_heads, linear.key_dim, linear.value_dim
    decay = (heads, key) if linear.channel_decay else (heads,)
    call = (
        of(tokens, linear.key_heads, key), of(tokens, linear.key_heads, key), of(tokens, heads, value),
        of(tokens, *decay), of(tokens, heads), of(heads), of(*decay), 1e-6, of(rows + 1, heads, 1, key * value),
        of(rows + 1, dtype=torch.int32), of(rows, dtype=torch.int32), of(rows, dtype=torch.int32),
        of(tokens, heads, value),
    )  # fmt: skip
    with compiling_for(architecture), Made() as made:
        assert len(list(chunk_launches(*call, SHORT + 1))) == 3
    return made.bytes


@pytest.mark.parametrize("channel_decay", [False, True], ids=["gated delta net", "KDA"])
@pytest.mark.parametrize(("tokens", "rows"), [(8192 + 256, 256), (40, 256), (9, 1), (1000, 3)])
@pytest.mark.parametrize("architecture", sorted(SHARED_MEMORY))
def test_the_plan_counts_what_the_launches_make(architecture: str, tokens: int, rows: int, channel_decay: bool) -> None:
    linear = LinearAttention(
        layers=3, key_heads=4, value_heads=8, key_dim=128, value_dim=64, conv_width=4, channel_decay=channel_decay
    )
    chunk = delta_tile(architecture).chunk
    assert chunk in DELTA_CHUNKS
    assert bytes_made(architecture, linear, tokens, rows) == delta_rule_bytes(linear, tokens, rows, chunk)
