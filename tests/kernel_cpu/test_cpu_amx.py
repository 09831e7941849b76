"""The products by AMX's tiles: everything but the instructions themselves, which no machine of ours has."""

import os
import subprocess
import sys

import pytest
import torch

import tokenspeed_kernel_cpu
from tokenspeed_kernel.platform import current_platform
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel_cpu.linear import make_tiled_linear


def _has_amx() -> bool:
    with open("/proc/cpuinfo") as file:
        return "amx_bf16" in file.read()


@pytest.mark.parametrize(("n", "k"), [(1, 32), (37, 96), (16, 64), (5, 7), (33, 45), (64, 160)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_emulated_tiles_multiply_what_was_rounded(n: int, k: int, with_bias: bool) -> None:
    if "avx512_bf16" not in current_platform().features:
        pytest.skip("this machine, or the set chosen for it, has no AVX-512 BF16 to round with")
    weight = QuantizedTensor.from_dense(torch.randn(n, k).bfloat16(), "random bfloat16")
    bias = torch.randn(n) if with_bias else None
    x = torch.randn(40, k)
    exact, size = weight.dequantize().double().T, weight.dequantize().double().T.abs()
    expected = x.bfloat16().double() @ exact + (0 if bias is None else bias.double())
    bound = 2.0**-24 * (k**0.5 + 8) * (x.bfloat16().double().abs() @ size) + 1e-6
    with tokenspeed_kernel_cpu.use_instruction_set("avx512_bf16"):
        fn = make_tiled_linear(weight, bias, emulated=True)
        whole = torch.full((41, n), torch.nan)
        fn(x, whole[:-1])
        assert bool(((whole[:-1].double() - expected).abs() <= bound).all())
        assert bool(whole[-1].isnan().all())
        for tokens in (0, 1, 15, 16, 17):
            part = torch.full((tokens, n), torch.nan)
            fn(x[:tokens], part)
            assert torch.equal(part, whole[:tokens]), f"{tokens} tokens"


def test_the_unit_is_not_used_unless_it_was_enabled() -> None:
    if "avx512_bf16" not in current_platform().features or os.environ.get("TOKENSPEED_CPU_AMX") == "1":
        pytest.skip("the unit was enabled, or nothing rounds here")
    weight = QuantizedTensor.from_dense(torch.ones(4, 32, dtype=torch.bfloat16), "ones")
    with (
        tokenspeed_kernel_cpu.use_instruction_set("avx512_bf16"),
        pytest.raises(RuntimeError, match="AMX was not enabled"),
    ):
        make_tiled_linear(weight, None)(torch.ones(1, 32), torch.empty(1, 4))


def _list(value: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tokenspeed_kernel.plugins.cli", "list", "gemm.linear"],
        env={**os.environ, "TOKENSPEED_CPU_AMX": value},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(_has_amx(), reason="this machine has AMX")
def test_asking_for_amx_where_there_is_none_stops_the_start() -> None:
    ended = _list("1")
    assert ended.returncode != 0
    assert "TOKENSPEED_CPU_AMX=1 asks for AMX, but this processor has no AMX with bfloat16 tiles; unset it" in (
        ended.stdout + ended.stderr
    )


def test_a_value_that_is_neither_is_an_error() -> None:
    ended = _list("maybe")
    assert ended.returncode != 0
    assert "TOKENSPEED_CPU_AMX is 'maybe'; use 1 to try AMX's tiles, or 0" in ended.stdout + ended.stderr
