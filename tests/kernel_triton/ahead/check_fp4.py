"""Products of four bits compile to the instructions that multiply blocks with their scales, fit and spill next to
nothing."""

import re

import pytest

from tokenspeed_kernel_triton import ahead
from tokenspeed_kernel_triton.ahead import compile_ahead
from tokenspeed_kernel_triton.configs import LANES, SHARED_MEMORY
from tokenspeed_kernel_triton.device import compiling_for
from tokenspeed_kernel_triton.fp4_ahead_cases import ARCHITECTURES, launches

INSTRUCTIONS = {
    ("sm_100", 16): r"tcgen05\.mma\S*\.kind::mxf4nvf4\.block_scale\.block16",
    ("sm_100", 32): r"tcgen05\.mma\S*\.kind::mxf4\.block_scale\.block32",
    ("sm_120", 16): r"mma\.sync\S*\.kind::mxf4nvf4\.block_scale\.scale_vec::4X\.f32\.e2m1\.e2m1\.f32\.ue4m3",
    ("sm_120", 32): r"mma\.sync\S*\.kind::mxf4nvf4\.block_scale\.scale_vec::2X\.f32\.e2m1\.e2m1\.f32\.ue8m0",
    ("gfx950", 32): r"v_mfma_scale_f32_(16x16x128|32x32x64)_f8f6f4",
}
OTHER_PRODUCTS = r"wgmma|mma\.sync\S*\.bf16|v_mfma_f32|tcgen05\.mma\S*kind::f16"
SPILLED_BYTES = 16
"""Of a thread, at most."""
SHORT = {("sm_100", 16, "linear, 64 x 4096"), ("gfx950", 32, "experts")}


def cases():
    for group, architectures in ARCHITECTURES.items():
        for architecture in architectures:
            with compiling_for(architecture):
                names = [name for name, _ in launches(group)]
            for name in names:
                short = (architecture, group, name) in SHORT
                yield pytest.param(group, architecture, name, marks=() if short else pytest.mark.long)


@pytest.mark.parametrize(("group", "architecture", "name"), cases())
def test_it_compiles_fits_and_multiplies_four_bits(group: int, architecture: str, name: str) -> None:
    with compiling_for(architecture):
        launch = dict(launches(group))[name]
        found = compile_ahead(launch, architecture)
    assert found.shared <= SHARED_MEMORY[architecture]
    assert found.spilled <= SPILLED_BYTES
    if launch.function in ("linear", "grouped"):
        assert re.search(INSTRUCTIONS[architecture, group], found.assembly)
        assert not re.search(OTHER_PRODUCTS, found.assembly)


@pytest.mark.long
@pytest.mark.parametrize("group", sorted(ARCHITECTURES))
def test_what_is_cut_for_sm_100_compiles_for_sm_103(monkeypatch: pytest.MonkeyPatch, group: int) -> None:
    monkeypatch.setattr(ahead, "LANES", {**LANES, "sm_103": LANES["sm_100"]})
    with compiling_for("sm_100"):
        found = compile_ahead(dict(launches(group))["linear, 512 x 4096"], "sm_103")
    assert re.search(INSTRUCTIONS["sm_100", group], found.assembly)
    assert found.spilled == 0 and ".target sm_103a" in found.assembly
