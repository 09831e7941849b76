"""FlashInfer's calls, held to the real signatures and, by a stand-in that computes what these document, to the numeric
cases of the operations. The library itself needs a GPU; nothing here shows what it computes there."""

import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib import util
from importlib.metadata import requires

import pytest
import torch
from flashinfer_stand_in import StandIn
from library_contracts import check_rows_behind_others, contract_beside, forget

from tokenspeed_kernel import steps, wrapped_library
from tokenspeed_kernel.numerics.verify import verify_kernel
from tokenspeed_kernel.ops import mla
from tokenspeed_kernel.platform import current_platform
from tokenspeed_kernel.plugins import load_plugins
from tokenspeed_kernel.recording import PLANS_ON_HOST, RecordingError
from tokenspeed_kernel.registry import RegisteredKernel, active_registry
from tokenspeed_kernel.traits import MultipleOf, Range
from tokenspeed_kernel_nvidia import by_table, library, planned, planned_mla, requirement
from tokenspeed_kernel_nvidia.requirement import BY_TABLE, PLANNED, FlashInferRequirement

H200 = replace(
    current_platform(), vendor="nvidia", isa="sm_90", architecture=(9, 0), driver=(590, 44), features=frozenset()
)
B200 = replace(H200, isa="sm_100", architecture=(10, 0))


def ours() -> list[RegisteredKernel]:
    load_plugins()
    return [k for k in active_registry().kernels() if k.origin.startswith(DISTRIBUTION)]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch):
    load_plugins()
    made = StandIn(contract_beside(__file__, "flashinfer.json"))
    made.install(monkeypatch)
    cached = (wrapped_library.library_module, library.generation_of, planned._plan_of, planned_mla._plan_of)
    forget(*cached)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(FlashInferRequirement, "refusal", lambda self, platform: None)
    yield made
    forget(*cached)


DISTRIBUTION = "tokenspeed-appliance-kernel-nvidia"

NAMES = [
    "flashinfer_attention_decode",
    "flashinfer_attention_decode_sinks",
    "flashinfer_attention_extend",
    "flashinfer_attention_extend_sinks",
    "flashinfer_attention_mla_decode",
    "flashinfer_table_attention_decode",
    "flashinfer_table_attention_extend",
    "flashinfer_table_attention_mla_decode",
]


def test_the_package_brings_the_shared_layers_and_the_library_where_it_is_asked_for():
    wanted = requires(DISTRIBUTION) or []
    for name in ("kernel", "kernel-triton", "mla[nvidia]"):
        assert any(line.startswith(f"tokenspeed-appliance-{name}<") for line in wanted), name
    (library,) = [line for line in wanted if "extra ==" in line]
    assert library.startswith(contract_beside(__file__, "flashinfer.json").distribution)


def test_every_kernel_joins_through_the_door_and_says_that_it_never_ran_on_a_gpu():
    assert [kernel.spec.name for kernel in ours()] == NAMES
    assert all({"compiled_only", "reads_whole_pages"} <= kernel.spec.tags for kernel in ours())


SLOW = ("flashinfer_attention_extend", "flashinfer_table_attention_decode", "flashinfer_table_attention_mla_decode")
"""Whose rows, or whose calls, others of the short run share."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] if n in SLOW else []) for n in NAMES])
def test_what_its_documentation_says_is_right_in_every_numeric_case(stand_in, name):
    report = verify_kernel(active_registry().kernel(name), active_registry())
    assert report.passed, [(failure.case, failure.details) for failure in report.failures]
    assert report.cases >= (1 if "mla" in name else 2)


def test_latent_rows_of_every_kind_are_right_were_the_cache_narrower(stand_in):
    """One numeric case has the sizes that the library takes; the others are about the rows."""
    kernel = active_registry().kernel("flashinfer_attention_mla_decode")
    traits = {"latent_dim": Range(1), "rotary_dim": MultipleOf(8), "kernel_page_size": MultipleOf(1)}
    widened = replace(kernel, spec=replace(kernel.spec, traits={**kernel.spec.traits, **traits}))
    report = verify_kernel(widened, active_registry())
    assert report.passed, [(failure.case, failure.details) for failure in report.failures]
    assert report.cases >= 4


@pytest.mark.parametrize("module", [planned, by_table])
def test_rows_may_begin_behind_queries_of_nobody(stand_in, module):
    check_rows_behind_others(module.extend)


@pytest.mark.long
def test_every_call_in_the_contract_is_one_that_we_make(stand_in):
    for name in NAMES:
        verify_kernel(active_registry().kernel(name), active_registry())
    assert stand_in.contract.places == stand_in.contract.used


def latent_decode_call(kernel=planned_mla.mla_decode, heads: int = 16):
    """One latent decode over two rows, and what it fills."""
    generator = torch.Generator().manual_seed(4)
    q, q_rope = (torch.randn(2, heads, width, generator=generator) for width in (512, 64))
    cache = torch.randn(4, 1, 32, 576, generator=generator).to(torch.bfloat16)
    table, lengths = torch.tensor([[1, 2], [3, 1]], dtype=torch.int32), torch.tensor([40, 9], dtype=torch.int32)
    out = torch.empty_like(q)
    return partial(kernel, q, q_rope, cache, table, lengths, 0.04, out, None), out


def decode_call(kernel=planned.decode, width: int = 1, window: int = 0):
    """One decode over three rows, and its arguments."""
    generator = torch.Generator().manual_seed(3)
    cache = torch.randn(20, 2, 2, 16, 64, generator=generator).to(torch.bfloat16)
    table = torch.randint(1, 20, (3, 4), dtype=torch.int32, generator=generator)
    lengths = torch.tensor([64, 5, 33], dtype=torch.int32)
    q = torch.randn(3 * width, 4, 64, generator=generator)
    out = torch.empty_like(q)
    run = partial(kernel, q, cache[:, 0], cache[:, 1], table, lengths, 0.125, window, out)
    return run, lengths, table, out


def test_one_plan_serves_all_layers_of_a_forward_and_none_outlives_it(stand_in):
    run, lengths, _, out = decode_call()
    run()
    run()
    assert stand_in.plans == 2, "nobody says where a forward begins: a kept plan might be an old one"
    with steps.one_forward():
        for _layer in range(5):
            run()
    assert stand_in.plans == 3
    before = out.clone()
    lengths[0] = 17
    with steps.one_forward():
        run()
    assert stand_in.plans == 4
    assert not torch.equal(out[0], before[0]) and torch.equal(out[1:], before[1:])


@pytest.mark.parametrize("name", NAMES)
def test_what_plans_on_the_host_says_so(stand_in, name):
    """Of the contract's calls: those with a plan, and no others; of one number of heads alone that of the tables has
    one too, and refuses where a graph takes it."""
    kernel = active_registry().kernel(name)
    modes = {"decode": decode_call, "mla_decode": latent_decode_call}
    if kernel.spec.mode in modes:
        run = modes[kernel.spec.mode](kernel.fn)[0]
        run()
        assert (stand_in.plans > 0) == (PLANS_ON_HOST in kernel.spec.tags)
    else:
        check_rows_behind_others(kernel.fn)
        assert (stand_in.plans > 0) == (PLANS_ON_HOST in kernel.spec.tags)


@pytest.mark.parametrize("heads", [16, 96])
def test_a_graph_never_takes_a_plan(stand_in, monkeypatch, heads):
    """Whoever captures ran the step before, in the same forward: its plan is there, and would be every replay's."""
    calls = [decode_call(planned.decode)[0], latent_decode_call(planned_mla.mla_decode, heads)[0]]
    by_tables = latent_decode_call(by_table.mla_decode, heads)[0]
    with steps.one_forward():
        for run in (*calls, by_tables):
            run()
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for run in (*calls, *([by_tables] if heads == 96 else [])):
            with pytest.raises(RecordingError, match=r"plans each forward on the host.*scheduler\.graphs to off"):
                run()
        if heads == 16:
            by_tables()


def test_numbers_of_heads_that_the_tables_kernels_lack_are_the_planned_ones(stand_in):
    generator = torch.Generator().manual_seed(4)
    q, q_rope = (torch.randn(2, 96, width, generator=generator) for width in (512, 64))
    cache = torch.randn(4, 1, 32, 576, generator=generator).to(torch.bfloat16)
    table, lengths = torch.tensor([[1, 2], [3, 1]], dtype=torch.int32), torch.tensor([40, 9], dtype=torch.int32)
    outs = []
    for kernel in (by_table.mla_decode, mla.reference_mla_decode):
        out, lse = torch.empty_like(q), torch.empty(2, 96)
        kernel(q, q_rope, cache, table, lengths, 0.04, out, lse)
        outs.append((out, lse))
    assert stand_in.plans == 1
    assert torch.allclose(outs[0][0], outs[1][0], atol=0.05) and torch.allclose(outs[0][1], outs[1][1], atol=0.05)


def test_several_queries_of_odd_numbers_of_heads_go_in_one_by_one(stand_in):
    """24 heads: the library refuses rows of which a tile ends within a query where a tile of keys begins."""
    q = torch.randn(6, 24, 512)
    q_rope = torch.randn(6, 24, 64)
    cache = torch.randn(9, 1, 16, 576).to(torch.bfloat16)
    table = torch.arange(1, 9, dtype=torch.int32).view(1, 8)
    outs = []
    for width in (6, 1):
        out, lse = torch.empty(6, 24, 512), torch.empty(6, 24)
        rows = table.expand(6 // width, 8)
        lengths = torch.tensor([70] if width == 6 else range(65, 71), dtype=torch.int32)
        planned_mla.mla_decode(q, q_rope, cache, rows, lengths, 0.04, out, lse)
        outs.append((out, lse))
    assert torch.equal(outs[0][0], outs[1][0]) and torch.equal(outs[0][1], outs[1][1])


@pytest.mark.parametrize(
    ("platform", "version", "cuda", "reason"),
    [
        (current_platform(), "0.7.4", "", "runs on nvidia; this is cpu"),
        (
            replace(H200, isa="sm_75", architecture=(7, 5)),
            "0.7.4",
            "",
            "needs architecture from (8, 0); this is (7, 5)",
        ),
        (
            replace(H200, driver=(570, 1)),
            "0.7.4",
            "13.0",
            "needs driver 580.65.6 or newer, for this PyTorch is built for",
        ),
        (replace(H200, driver=(570, 1)), "0.7.4", "12.8", None),
        (H200, None, "13.0", "needs the package flashinfer-python from 0.7.4 to below 0.8, which is not installed"),
        (H200, "0.6.13", "13.0", "needs the package flashinfer-python from 0.7.4 to below 0.8; installed is 0.6.13"),
        (H200, "0.8.0", "13.0", "installed is 0.8.0"),
        (H200, "0.7.9.post1", "13.0", None),
        (replace(H200, driver=None), "0.7.4", "13.0", None),
    ],
)
def test_where_it_runs_and_why_not_elsewhere(monkeypatch, platform, version, cuda, reason):
    monkeypatch.setattr(wrapped_library, "installed_version", lambda distribution: version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(requirement, "has_compiler", lambda: True)
    told = PLANNED.refusal(platform)
    assert told is None if reason is None else reason in str(told)


def test_kernels_that_would_be_fetched_or_compiled_without_a_compiler_are_refused(monkeypatch):
    monkeypatch.setattr(wrapped_library, "installed_version", lambda distribution: "0.7.4")
    for module in (requirement, wrapped_library):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    monkeypatch.setattr(requirement.shutil, "which", lambda name: None)
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    assert "needs nvcc" in str(PLANNED.refusal(H200))
    assert "needs the package flashinfer-cubin" in str(BY_TABLE.refusal(B200))
    assert "needs architecture from (10, 0)" in str(BY_TABLE.refusal(H200))
    for module in (requirement, wrapped_library):
        monkeypatch.setattr(module, "find_spec", lambda name: object())
    assert PLANNED.refusal(H200) is None and BY_TABLE.refusal(B200) is None


@pytest.mark.skipif(util.find_spec("flashinfer") is None, reason="FlashInfer is not installed")
def test_the_installed_library_has_the_signatures_we_know():
    spec = util.find_spec("flashinfer")
    assert spec is not None and spec.origin is not None
    site = spec.origin.removesuffix("/flashinfer/__init__.py")
    command = [sys.executable, "scripts/library_signatures.py", site, "--check", "tests/kernel_nvidia/flashinfer.json"]
    assert subprocess.run(command, check=False).returncode == 0
