"""AITER's calls, held to the real signatures and, by a stand-in that computes what these document, to the numeric cases
of the operations. The library itself needs a GPU; nothing here shows what it computes there."""

import subprocess
import sys
from dataclasses import replace
from importlib import util
from importlib.metadata import requires

import pytest
import torch
from aiter_stand_in import StandIn
from library_contracts import check_rows_behind_others, contract_beside, forget

from tokenspeed_kernel import steps, wrapped_library
from tokenspeed_kernel.numerics.verify import verify_kernel
from tokenspeed_kernel.ops import mla, norm
from tokenspeed_kernel.ops.activation import GatedActivation
from tokenspeed_kernel.platform import current_platform
from tokenspeed_kernel.plugins import load_plugins
from tokenspeed_kernel.quantized import QuantizedTensor, WeightError
from tokenspeed_kernel.recording import PLANS_ON_HOST, RecordingError
from tokenspeed_kernel.registry import RegisteredKernel, active_registry
from tokenspeed_kernel.wrapped_library import LibraryRequirement
from tokenspeed_kernel_amd import attention, latent, linear, moe, rows
from tokenspeed_kernel_amd.requirement import ON_AITER

MI355X = replace(
    current_platform(), vendor="amd", isa="gfx950", architecture=(9, 5), driver=(30, 10), features=frozenset()
)

DISTRIBUTION = "tokenspeed-appliance-kernel-amd"

NAMES = [
    "aiter_attention_decode",
    "aiter_attention_extend",
    "aiter_attention_mla_decode",
    "aiter_gemm_linear",
    "aiter_moe_experts",
    "aiter_norm_fused_add_rms",
    "aiter_norm_rms",
]


def ours() -> list[RegisteredKernel]:
    load_plugins()
    return [k for k in active_registry().kernels() if k.origin.startswith(DISTRIBUTION)]


@pytest.fixture(params=["gfx950"])
def stand_in(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    load_plugins()
    made = StandIn(contract_beside(__file__, "aiter.json"))
    made.install(monkeypatch)
    forget(wrapped_library.library_module, latent._lists_of)
    monkeypatch.setattr(linear, "architecture_of", lambda device: request.param)
    monkeypatch.setattr(LibraryRequirement, "refusal", lambda self, platform: None)
    # What is not the library's is the Triton layer's, which needs a device or a process that interprets.
    monkeypatch.setattr(latent.attention, "rounded_mla_decode", mla.reference_mla_decode)
    monkeypatch.setattr(rows.elementwise, "rms", norm.reference_rms)
    monkeypatch.setattr(rows.elementwise, "fused_add_rms", norm.reference_fused_add_rms)
    yield made
    forget(wrapped_library.library_module, latent._lists_of)


def test_the_package_brings_the_shared_layers_and_the_library_where_it_is_asked_for():
    wanted = requires(DISTRIBUTION) or []
    for name in ("kernel", "kernel-triton"):
        assert any(line.startswith(f"tokenspeed-appliance-{name}<") for line in wanted), name
    (library,) = [line for line in wanted if "extra ==" in line]
    assert library.startswith(contract_beside(__file__, "aiter.json").distribution)


def test_every_kernel_joins_through_the_door_and_says_that_it_never_ran_on_a_gpu():
    assert [kernel.spec.name for kernel in ours()] == NAMES
    assert all("compiled_only" in kernel.spec.tags for kernel in ours())


def verified(name: str) -> int:
    report = verify_kernel(active_registry().kernel(name), active_registry())
    assert report.passed, [(failure.case, failure.details) for failure in report.failures]
    return report.cases


@pytest.mark.parametrize("name", NAMES)
def test_what_its_documentation_says_is_right_in_every_numeric_case(stand_in, name):
    assert verified(name) >= 1


@pytest.mark.long
def test_every_call_in_the_contract_is_one_that_we_make(stand_in):
    for name in (NAMES[0], *NAMES[2:]):
        verified(name)
    assert stand_in.contract.places == stand_in.contract.used


def test_rows_may_begin_behind_queries_of_nobody(stand_in):
    check_rows_behind_others(attention.extend)


def test_an_expert_that_is_not_here_adds_nothing(stand_in):
    generator = torch.Generator().manual_seed(2)
    gate_up, down = (torch.randn(2 * n, k, generator=generator).to(torch.bfloat16) for n, k in ((64, 32), (32, 32)))
    experts = moe.make_experts(
        QuantizedTensor.from_dense(gate_up, "gate_up"), QuantizedTensor.from_dense(down, "down"), None, None,
        GatedActivation("silu"),
    )  # fmt: skip
    x, out, alone = torch.randn(1, 32, generator=generator), torch.empty(1, 32), torch.empty(1, 32)
    experts(x, torch.tensor([[1, -1]], dtype=torch.int32), torch.tensor([[0.5, 0.5]]), out)
    experts(x, torch.tensor([[1]], dtype=torch.int32), torch.tensor([[0.5]]), alone)
    assert torch.equal(out, alone)


@pytest.mark.parametrize("stand_in", ["gfx942"], indirect=True)
def test_on_gfx942_weights_are_of_its_own_float8_and_the_products_the_same(stand_in, monkeypatch):
    seen = []
    product = linear.library_module("aiter.ops.triton.gemm_a16w8_blockscale").gemm_a16w8_blockscale
    monkeypatch.setattr(
        linear.library_module("aiter.ops.triton.gemm_a16w8_blockscale"),
        "gemm_a16w8_blockscale",
        lambda x, w, *more, **named: (seen.append(w.dtype), product(x, w, *more, **named)),
    )
    assert verified("aiter_gemm_linear") >= 1
    assert set(seen) == {torch.float8_e4m3fnuz}


def test_both_float8_hold_the_same_numbers_but_for_the_scale():
    every = torch.arange(256, dtype=torch.uint8)
    every = every[(every & 0x7F) != 0x7F]
    ocp = every.view(torch.float8_e4m3fn)
    assert torch.equal(linear.as_fnuz(ocp, "all of them").float() * 2.0, ocp.float())
    with pytest.raises(WeightError, match="layer 3: a NaN among its elements"):
        linear.as_fnuz(torch.tensor([0, 0xFF], dtype=torch.uint8).view(torch.float8_e4m3fn), "layer 3")


def test_scales_are_taken_by_squares_where_the_rows_of_a_square_agree():
    squares = torch.rand(3, 2)
    rows_of_scales = squares.repeat_interleave(128, 0)
    assert torch.equal(linear.in_squares(rows_of_scales, 128), squares)
    rows_of_scales[5, 1] += 1.0
    assert linear.in_squares(rows_of_scales, 128) is rows_of_scales
    assert linear.in_squares(rows_of_scales[:100], 128).shape == (100, 2)


def latent_call(rows: int = 2, heads: int = 16, width: int = 1, layers: int = 3):
    """A decode over one of several layers that share their blocks, as an arena has them."""
    generator = torch.Generator().manual_seed(5)
    arena = torch.randn(7, layers, 1, 32, 576, generator=generator).to(torch.bfloat16)
    q, q_rope = (torch.randn(rows * width, heads, size, generator=generator) for size in (512, 64))
    table = torch.randint(1, 7, (rows, 3), dtype=torch.int32, generator=generator)
    return q, q_rope, arena[:, 1], table, torch.tensor([70, 33][:rows], dtype=torch.int32), 0.04


@pytest.mark.parametrize(
    ("heads", "width", "with_lse", "ours"),
    [(16, 1, False, 1), (128, 1, False, 1), (24, 1, False, 0), (16, 2, False, 0), (16, 1, True, 0)],
)
def test_calls_of_kinds_that_the_kernels_have_not_are_the_triton_layers(stand_in, heads, width, with_lse, ours):
    arguments = latent_call(heads=heads, width=width)
    out, lse = torch.empty_like(arguments[0]), torch.empty(arguments[0].shape[:2]) if with_lse else None
    latent.mla_decode(*arguments, out, lse)
    assert len(stand_in.tokens) == ours
    exact, total = torch.empty_like(out), torch.empty(out.shape[:2])
    mla.reference_mla_decode(*arguments, exact, total)
    assert torch.allclose(out, exact, atol=0.02)


def test_caches_beyond_the_known_reach_or_of_other_strides_are_the_triton_layers():
    q, _, cache, _, _, _ = latent_call()
    assert latent.takes(q, cache, 2, None)
    blocks = latent.REACH // (cache.stride(0) * 2) + 2
    far = torch.empty_strided(
        (blocks, 1, 32, 576), (cache.stride(0), 32 * 576, 576, 1), dtype=torch.bfloat16, device="meta"
    )
    assert not latent.takes(q, far, 2, None)
    uneven = torch.empty_strided((4, 1, 32, 576), (32 * 576 + 8, 32 * 576, 576, 1), dtype=torch.bfloat16, device="meta")
    assert not latent.takes(q, uneven, 2, None)


def test_one_list_of_tokens_serves_all_layers_of_a_forward_and_none_outlives_it(stand_in):
    *arguments, lengths, scale = latent_call()
    out = torch.empty_like(arguments[0])

    def run() -> torch.Tensor:
        latent.mla_decode(*arguments, lengths, scale, out, None)
        return stand_in.tokens[-1]

    assert run() is not run()
    with steps.one_forward():
        first = run()
        assert run() is first
    lengths[1] = 5
    with steps.one_forward():
        assert run().shape[0] == first.shape[0] - 28


def test_lists_of_tokens_are_the_hosts_work_and_no_graph_takes_them(stand_in, monkeypatch):
    tagged = [kernel.spec.name for kernel in ours() if PLANS_ON_HOST in kernel.spec.tags]
    assert tagged == ["aiter_attention_mla_decode"], "nothing else waits for the device"
    *arguments, lengths, scale = latent_call()
    out = torch.empty_like(arguments[0])
    with steps.one_forward():
        latent.mla_decode(*arguments, lengths, scale, out, None)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RecordingError, match="aiter's latent decode plans each forward on the host"):
            latent.mla_decode(*arguments, lengths, scale, out, None)


@pytest.mark.parametrize(
    ("platform", "version", "hip", "reason"),
    [
        (current_platform(), "0.1.7", "7.2", "runs on amd; this is cpu"),
        (replace(MI355X, isa="gfx90a"), "0.1.7", "7.2", "runs on gfx942, gfx950; this is gfx90a"),
        (replace(MI355X, driver=(6, 12)), "0.1.7", "7.2", "needs driver 30.10 or newer, for this PyTorch is built for"),
        (MI355X, None, "7.2", "needs the package amd-aiter from 0.1.7 to below 0.1.8, which is not installed"),
        (MI355X, "0.1.9", "7.2", "installed is 0.1.9"),
        (MI355X, "0.1.7.post2.dev18", "7.2", None),
        (replace(MI355X, driver=None), "0.1.7", "7.2", None),
    ],
)
def test_where_it_runs_and_why_not_elsewhere(monkeypatch, platform, version, hip, reason):
    monkeypatch.setattr(wrapped_library, "installed_version", lambda distribution: version)
    monkeypatch.setattr(torch.version, "hip", hip)
    told = ON_AITER.refusal(platform)
    assert told is None if reason is None else reason in str(told)


@pytest.mark.skipif(util.find_spec("aiter") is None, reason="AITER is not installed")
def test_the_installed_library_has_the_signatures_we_know():
    spec = util.find_spec("aiter")
    assert spec is not None and spec.origin is not None
    site = spec.origin.removesuffix("/aiter/__init__.py")
    command = [sys.executable, "scripts/library_signatures.py", site, "--check", "tests/kernel_amd/aiter.json"]
    assert subprocess.run(command, check=False).returncode == 0
