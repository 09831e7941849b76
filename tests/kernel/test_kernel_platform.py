"""The platform: detection, the lowered instruction set, and a stand-in for tests."""

import pytest

from tokenspeed_kernel.platform import (
    CPU_ISA_VARIABLE,
    ISA_LEVELS,
    PlatformError,
    current_platform,
    features_up_to,
    isa_of_flags,
    override_platform,
)


def test_this_machine_is_a_cpu_with_cores_and_memory(monkeypatch):
    monkeypatch.delenv(CPU_ISA_VARIABLE, raising=False)
    platform = current_platform()
    assert platform.vendor == "cpu"
    assert platform.cores >= 1
    assert platform.memory_bytes > 1 << 28
    assert platform.features == features_up_to(platform.isa)
    assert platform.key == f"cpu-{platform.machine}-{platform.isa}"


@pytest.mark.parametrize(
    ("flags", "isa"),
    [
        ("", "scalar"),
        ("avx2 fma", "scalar"),
        ("avx2 fma f16c", "avx2"),
        ("avx2 fma f16c avx512f avx512bw avx512dq", "avx2"),
        ("avx2 fma f16c avx512f avx512bw avx512dq avx512vl", "avx512"),
        ("avx512f avx512bw avx512dq avx512vl avx512_bf16 avx512_vnni", "scalar"),
        ("avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_bf16", "avx512"),
        ("avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_vnni", "avx512_vnni"),
        ("avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_bf16 avx512_vnni", "avx512_bf16"),
    ],
)
def test_a_level_needs_its_flags_and_those_below(flags, isa):
    assert isa_of_flags(frozenset(flags.split())) == isa


def test_the_environment_lowers_the_instruction_set(monkeypatch):
    monkeypatch.setenv(CPU_ISA_VARIABLE, "scalar")
    assert current_platform().isa == "scalar"
    assert current_platform().features == {"scalar"}
    monkeypatch.setenv(CPU_ISA_VARIABLE, "mmx")
    with pytest.raises(PlatformError, match="'mmx' is unknown; use one of"):
        current_platform()


def test_the_environment_cannot_raise_the_instruction_set(monkeypatch, make_platform):
    monkeypatch.setattr("tokenspeed_kernel.platform._detected", lambda: make_platform("avx2"))
    monkeypatch.setenv(CPU_ISA_VARIABLE, "avx512")
    with pytest.raises(PlatformError, match=r"asks for more than this machine has \(avx2\); lower or unset it"):
        current_platform()


def test_an_override_holds_within_its_block(make_platform):
    before = current_platform()
    other = make_platform("sm_90", vendor="nvidia", architecture=(9, 0))
    with override_platform(other):
        assert current_platform() is other
    assert current_platform() == before


def test_levels_contain_those_below():
    assert [len(features_up_to(level)) for level in ISA_LEVELS] == [1, 2, 3, 4, 5]
