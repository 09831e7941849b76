"""The launches of layers with a state that are compiled ahead of time: in the sizes of Qwen3-Next and Kimi-Linear."""

from collections.abc import Iterator

import torch

from tokenspeed_kernel_triton import elementwise, gated_delta_chunks, recurrent
from tokenspeed_kernel_triton.loading import Launch

_ROWS, _TOKENS = 4, 512
_BLOCKS = 64


def _of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def recurrent_launches() -> Iterator[tuple[str, Launch]]:
    """32 value heads of 128 x 128, on 16 key heads with a decay a head (Qwen3-Next) and on 32 with one a channel
    (Kimi-Linear); a convolution over 8192 channels."""
    counts = _of(_ROWS, dtype=torch.int32)
    rows = (_of(_ROWS + 1, dtype=torch.int32), counts, counts)
    for key_heads, decayed in ((16, (32,)), (32, (32, 128))):
        q, k = _of(_TOKENS, key_heads, 128), _of(_TOKENS, key_heads, 128)
        v, state = _of(_TOKENS, 32, 128), _of(_BLOCKS, 32, 1, 128 * 128)
        weights = (_of(32), _of(*decayed), 1e-6)
        call = (q, k, v, _of(_TOKENS, *decayed), _of(_TOKENS, 32), *weights, state, *rows, v)
        name = f"a decay a {'channel' if len(decayed) == 2 else 'head'}"
        yield f"gated delta, step, {name}", recurrent.gated_delta_of(*call, _TOKENS)
        for launch in gated_delta_chunks.chunk_launches(*call, gated_delta_chunks.SHORT + 1):
            yield f"gated delta, chunks, {launch.function}, {name}", launch
    x, weight, state = _of(_TOKENS, 8192), _of(4, 8192), _of(_BLOCKS, 3, 1, 8192)
    yield "causal convolution, chunk", recurrent.causal_conv_of(x, weight, None, state, *rows, x)
    step = x[:_ROWS]
    yield "causal convolution, step, bias", recurrent.causal_conv_of(step, weight, weight[0], state, *rows, step)
    heads = _of(_TOKENS, 32, 128)
    yield "norm under a gate", elementwise.gated_rms_of(heads, heads, _of(128), 1e-6, True, heads)
