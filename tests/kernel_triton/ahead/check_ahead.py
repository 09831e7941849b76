"""Every kernel compiles for the architectures it is meant for, fits their shared memory and spills next to nothing."""

import pytest
import torch

from tokenspeed_kernel_triton.ahead import Compiled, compile_ahead
from tokenspeed_kernel_triton.ahead_cases import launches
from tokenspeed_kernel_triton.configs import SHARED_MEMORY
from tokenspeed_kernel_triton.device import compiling_for

ARCHITECTURES = ("sm_90", "sm_100", "gfx950", "gfx942")
SHORT = {
    "decode split, 128 elements, torch.bfloat16": ("sm_90", "gfx950"),
    "decode split, 128 elements, torch.float8_e4m3fn": ("sm_100", "gfx942"),
    "gated delta, step, a decay a head": ("sm_90", "gfx950"),
    "linear, 1 tokens, gguf_q4_k": ("sm_90",),
    "linear, 1 tokens, gguf_mxfp4": ("gfx950",),
}
INSTRUCTIONS = {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma", "gfx950": "v_mfma", "gfx942": "v_mfma"}

MULTIPLY = (
    "attend",
    "linear",
    "grouped",
    "head_linear",
    "index_scores",
    "attend_selected",
    "expand",
    "attend_rows",
    "pairs",
    "solve",
    "walk",
)

SPILLED_BYTES = 16
"""Of a thread, at most; what the exact kernels for checks may spill is in SPILLED_BYTES_EXACT."""
SPILLED_BYTES_EXACT = 256


def names():
    with compiling_for("sm_90"):
        return [name for name, _ in launches()]


def compiled(name: str, architecture: str) -> tuple[Compiled, str]:
    """What became of the launch, and its function."""
    with compiling_for(architecture):
        launch = dict(launches())[name]
        return compile_ahead(launch, architecture), launch.function


def cases():
    for name in names():
        for architecture in ARCHITECTURES:
            short = architecture in SHORT.get(name, ())
            yield pytest.param(name, architecture, marks=() if short else pytest.mark.long)


@pytest.mark.parametrize(("name", "architecture"), cases())
def test_it_compiles_and_fits(name: str, architecture: str) -> None:
    found, function = compiled(name, architecture)
    assert found.shared <= SHARED_MEMORY[architecture]
    exact = "float16" in name.replace("bfloat16", "") or "float32" in name
    assert found.spilled <= (SPILLED_BYTES_EXACT if exact else SPILLED_BYTES)
    if function in MULTIPLY and (not exact or architecture.startswith("gfx")):
        assert found.products > 0


@pytest.mark.long
def test_on_gfx942_chunks_of_grouped_queries_take_instructions_of_16_rows_and_decodes_fewer_registers() -> None:
    chunk, _ = compiled("extend, 128 elements, torch.bfloat16", "gfx942")
    assert "v_mfma_f32_16x16x16_bf16" in chunk.assembly and "v_mfma_f32_32x32x8_bf16" not in chunk.assembly
    assert chunk.registers <= 128
    for kind in (torch.bfloat16, torch.float8_e4m3fn):
        assert compiled(f"decode split, 128 elements, {kind}", "gfx942")[0].registers <= 96


@pytest.mark.long
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "name",
    [
        "extend, 128 elements, torch.bfloat16",
        "extend, 128 elements, torch.float8_e4m3fn",
        "MLA decode split, 128 heads, torch.bfloat16",
        "attention over what is expanded, torch.bfloat16",
        "keys and values expanded, bfloat16, torch.bfloat16",
        "linear, 512 tokens, bfloat16",
        "linear, 512 tokens, fp8_blocks, float8_e4m3fn",
        "linear, 512 tokens, gguf_q4_k",
        "linear, 512 tokens, gguf_mxfp4",
        "linear, 512 tokens, nvfp4, float8_e4m3fn scales",
    ],
)
def test_products_use_the_largest_matrix_instructions(name: str, architecture: str) -> None:
    assert INSTRUCTIONS[architecture] in compiled(name, architecture)[0].assembly


@pytest.mark.long
@pytest.mark.parametrize("tokens", [1, 512])
def test_floats_of_four_bits_are_widened_by_the_instruction_for_it(tokens: int) -> None:
    assert "v_cvt_scalef32_pk_bf16_fp4" in compiled(f"linear, {tokens} tokens, gguf_mxfp4", "gfx950")[0].assembly


@pytest.mark.long
@pytest.mark.parametrize(
    ("architecture", "read", "written"),
    [
        ("sm_90", "cvt.rn.f16x2.e4m3x2", "cvt.rn.satfinite.e4m3x2.f32"),
        ("sm_100", "cvt.rn.bf16x2.e4m3x2", "cvt.rn.satfinite.e4m3x2.f32"),
        ("gfx950", "v_cvt_scalef32_pk_bf16_fp8", "v_cvt_scalef32_pk_fp8_f32"),
    ],
)
def test_caches_of_eight_bits_are_read_and_written_by_the_instruction_for_it(architecture, read, written) -> None:
    kind = torch.float8_e4m3fn
    assert read in compiled(f"decode split, 128 elements, {kind}", architecture)[0].assembly
    assert written in compiled(f"GQA prologue with head norms, {kind}", architecture)[0].assembly


@pytest.mark.long
def test_on_gfx942_they_are_not_for_its_instructions_mean_another_float() -> None:
    """Its e4m3 has another bias and one NaN, where -0 is here."""
    for name in ("decode split, 128 elements", "GQA prologue with head norms", "MLA prologue", "entries written"):
        assembly = compiled(f"{name}, {torch.float8_e4m3fn}", "gfx942")[0].assembly
        assert "_fp8" not in assembly, name
