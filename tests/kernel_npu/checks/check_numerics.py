"""Every kernel of the package through the cases of its operation, over operators that compute on CPU tensors."""

from types import ModuleType
from typing import Any

import pytest
import torch

from tokenspeed_kernel.numerics import attention_cases, mla_cases, mla_expanded_cases, verify_kernel
from tokenspeed_kernel.numerics.attention_cases import ReadShape
from tokenspeed_kernel.numerics.mla_cases import LatentShape
from tokenspeed_kernel.numerics.mla_expanded_cases import ExpandedShape
from tokenspeed_kernel.numerics.prologue_cases import Heads
from tokenspeed_kernel.ops.activation import GatedActivation
from tokenspeed_kernel.platform import PlatformInfo
from tokenspeed_kernel.plugins.loading import loaded_registry
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel_npu import attention, elementwise, fused, latent, lengths, moe, operators, pages, prologue

NPU = PlatformInfo(vendor="npu", machine="aarch64", isa="ascend910b", cores=8, memory_bytes=1 << 36)
SLOW = tuple(
    f"npu_attention_{mode}" for mode in ("decode", "extend", "mla_decode", "mla_extend", "mla_extend_expanded")
)

OURS = [kernel.spec.name for kernel in loaded_registry().kernels() if kernel.spec.solution == "npu"]


def check(name: str) -> int:
    """How many cases ran. All of them were right, called the operators that the kernel's requirement names and no
    other, and passed what the contract lists."""
    registry = loaded_registry()
    asked: dict[str, set[str]] = {}

    def noted(operator: str, **arguments: object) -> object:
        asked.setdefault(operator, set()).update(arguments)
        return operators.call(operator, **arguments)

    with pytest.MonkeyPatch.context() as patch:
        for module in (elementwise, fused, moe, prologue):
            patch.setattr(module, "call", noted)
        report = verify_kernel(registry.kernel(name), registry, platform=NPU)
    assert report.skipped is None
    assert report.passed, "\n".join(f"{failure.case}: {failure.details}" for failure in report.failures)
    needed = registry.kernel(name).spec.capability.operators
    assert set(asked) == {operator for operator in needed if not operator.startswith("aten::")}
    assert asked == {operator: set(operators.CALLS[operator]) for operator in asked}
    return report.cases


# The operations' own cases of attention take seconds of float64 and are left to the long run. These go the ways through
# the kernels that those do not, and every way once: pages of 128 tokens, queries side by side, every kind of row.
DECODES = (
    ReadShape("no rows", Heads(1, 2, 32), 16, (), ()),
    ReadShape("empty, short and long rows", Heads(3, 3, 64), 64, (1,) * 5, (0, 1, 64, 65, 150)),
    ReadShape("only empty rows", Heads(1, 2, 64), 16, (1, 1), (0, 0)),
    ReadShape("pages of 128", Heads(2, 4, 128), 128, (1, 1, 1), (300, 0, 128)),
    ReadShape("three queries a row in pages of 128", Heads(2, 2, 128), 128, (3,) * 4, (200, 0, 2, 129)),
    ReadShape("three queries a row", Heads(1, 7, 64), 32, (3, 3, 3), (70, 3, 2)),
    ReadShape("sinks, several queries", Heads(1, 2, 128), 128, (2, 2), (150, 1), sinks=True),
    ReadShape("sinks", Heads(2, 4, 64), 16, (1,) * 3, (0, 1, 40), sinks=True),
    ReadShape("window", Heads(2, 2, 80), 32, (1,) * 4, (0, 1, 37, 200), 37),
    ReadShape("window of one position", Heads(2, 2, 80), 32, (1, 1), (33, 1), 1),
    ReadShape("window and sinks, several queries", Heads(1, 2, 128), 128, (2, 2, 2), (150, 0, 40), 19, 0.0, True),
)
EXTENDS = (
    ReadShape("no rows", Heads(1, 2, 32), 16, (), ()),
    ReadShape("empty rows and rows without queries", Heads(3, 3, 64), 64, (7, 0, 0, 1, 20), (7, 0, 9, 70, 100)),
    ReadShape("pages of 128", Heads(2, 2, 128), 128, (9, 0, 1, 20), (9, 0, 130, 150)),
    ReadShape("more queries than positions in pages of 128", Heads(1, 2, 128), 128, (4, 2, 3), (3, 2, 0)),
    ReadShape("side by side", Heads(1, 2, 128), 16, (9, 5), (40, 5)),
    ReadShape("more queries than positions", Heads(1, 7, 64), 32, (4, 2), (3, 9)),
    ReadShape("window", Heads(1, 2, 128), 128, (30, 0, 1), (50, 9, 130), 19),
    ReadShape("window over small heads", Heads(2, 2, 80), 32, (3, 9), (90, 9), 20),
    ReadShape("sinks", Heads(2, 4, 64), 16, (7, 0, 4), (7, 9, 3), sinks=True),
    ReadShape("sinks in pages of 128", Heads(1, 2, 128), 128, (5, 3), (140, 3), sinks=True),
)
LATENT_DECODES = (
    LatentShape("no rows", 4, 512, 64, 16, (), ()),
    LatentShape("empty, short and long rows", 3, 512, 64, 16, (1,) * 4, (0, 1, 33, 150)),
    LatentShape("four queries a row, more than positions", 2, 512, 64, 128, (4,) * 3, (100, 4, 3)),
    LatentShape("pages that 128 is no multiple of", 1, 512, 64, 48, (1, 1), (200, 48)),
)
LATENT_EXTENDS = (
    LatentShape("no rows", 4, 512, 64, 16, (), ()),
    LatentShape("rows without queries, more than positions", 3, 512, 64, 16, (7, 0, 4), (40, 9, 3)),
)
EXPANDED = (
    ExpandedShape("no rows", 2, 512, 64, 128, 128, 16, (), ()),
    ExpandedShape("with and without a prefix", 3, 512, 64, 128, 128, 32, (7, 0, 0, 1, 9), (7, 0, 9, 70, 40)),
    ExpandedShape("more queries than positions", 2, 512, 64, 128, 128, 1, (4, 2, 3), (3, 9, 0)),
)


def take_our_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the shapes above in the place of the operations' own."""
    monkeypatch.setattr(attention_cases, "_DECODE_SHAPES", DECODES)
    monkeypatch.setattr(attention_cases, "_EXTEND_SHAPES", EXTENDS)
    monkeypatch.setattr(mla_cases, "_DECODE_SHAPES", LATENT_DECODES)
    monkeypatch.setattr(mla_cases, "_EXTEND_SHAPES", LATENT_EXTENDS)
    monkeypatch.setattr(mla_expanded_cases, "_SHAPES", EXPANDED)


@pytest.fixture
def _ways(monkeypatch: pytest.MonkeyPatch) -> None:
    take_our_ways(monkeypatch)


@pytest.mark.parametrize("name", [name for name in OURS if name not in SLOW])
def test_a_kernel_is_right_in_the_cases_of_its_operation(name: str) -> None:
    assert check(name) > 0


@pytest.mark.long
@pytest.mark.parametrize("name", SLOW)
def test_attention_is_right_in_the_cases_of_its_operation(name: str) -> None:
    assert check(name) > 0


@pytest.mark.usefixtures("_ways")
@pytest.mark.parametrize("mode", ["decode", "extend", "mla_decode", "mla_extend", "mla_extend_expanded"])
def test_every_way_through_attention_is_right(mode: str) -> None:
    expected = {"decode": DECODES, "extend": EXTENDS, "mla_decode": LATENT_DECODES, "mla_extend": LATENT_EXTENDS}
    assert check(f"npu_attention_{mode}") == len(expected.get(mode, EXPANDED))


@pytest.mark.usefixtures("_ways")
def test_a_cache_too_large_for_the_operator_is_copied_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MOST_ELEMENTS", 0)
    monkeypatch.setattr(pages, "MOST_COPIED", 20000)
    monkeypatch.setattr(attention_cases, "_DECODE_SHAPES", (DECODES[1], DECODES[7], DECODES[8]))
    monkeypatch.setattr(attention_cases, "_EXTEND_SHAPES", (EXTENDS[1], EXTENDS[8]))
    monkeypatch.setattr(mla_cases, "_DECODE_SHAPES", LATENT_DECODES[1:3])
    monkeypatch.setattr(mla_cases, "_EXTEND_SHAPES", LATENT_EXTENDS[1:])
    for mode, cases in (("decode", 3), ("extend", 2), ("mla_decode", 2), ("mla_extend", 1)):
        assert check(f"npu_attention_{mode}") == cases


@pytest.mark.parametrize("module", [attention, latent], ids=["pages", "latents"])
def test_a_captured_step_is_right_once_its_lengths_are_updated(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a graph would have it: the lengths are not read, the operator is issued for rows as long as they may be, and
    what the operator is given is replaced by the least of that and what the query sees, but at least 1."""
    real: list[int] = []

    def unread(seq_lens: torch.Tensor, capacity: int) -> list[int]:
        real[:] = seq_lens.tolist()
        return lengths_of_step(seq_lens, capacity)

    def updated(operator: str, **arguments: Any) -> object:
        issued = arguments["actual_seq_kvlen"]
        width = len(issued) // len(real)
        ends = [length - width + 1 + place for length in real for place in range(width)]
        arguments["actual_seq_kvlen"] = [min(most, max(1, end)) for most, end in zip(issued, ends, strict=True)]
        return operators.call(operator, **arguments)

    lengths_of_step = lengths.of_step
    monkeypatch.setattr(lengths, "is_capturing", lambda: True)
    monkeypatch.setattr(module, "of_step", unread)
    single = tuple(shape for shape in DECODES if set(shape.queries) <= {1})
    monkeypatch.setattr(attention_cases, "_DECODE_SHAPES", single)
    monkeypatch.setattr(mla_cases, "_DECODE_SHAPES", LATENT_DECODES)
    monkeypatch.setattr(fused, "call", updated)
    registry = loaded_registry()
    name = "npu_attention_decode" if module is attention else "npu_attention_mla_decode"
    report = verify_kernel(registry.kernel(name), registry, platform=NPU)
    assert report.passed, report.failures
    assert report.cases == len(single if module is attention else LATENT_DECODES)


@pytest.mark.parametrize("ids", [[[-1, -1], [-1, -1]], [[-1, -1], [1, -1]]], ids=["none is here", "one is here"])
def test_experts_that_are_elsewhere_add_nothing_whatever_a_padded_row_holds(ids: list[list[int]]) -> None:
    generator = torch.Generator().manual_seed(0)
    gate_up, down = (torch.randn(2 * n, k, generator=generator).to(torch.bfloat16) for n, k in ((64, 16), (16, 32)))
    weights = [QuantizedTensor.from_dense(weight, "a test") for weight in (gate_up, down)]
    experts = moe.make_experts(*weights, None, None, GatedActivation("silu"))
    x, shares, out = torch.full((2, 16), torch.nan), torch.full((2, 2), torch.nan), torch.full((2, 16), torch.nan)
    x[1], shares[1, 0] = 0.5, 2.0
    experts(x, torch.tensor(ids, dtype=torch.int32), shares, out)
    assert out[0].tolist() == [0.0] * 16
    assert bool(out[1].isfinite().all())
    assert bool((out[1] != 0.0).any()) == (ids[1][0] >= 0)


def test_rows_of_several_queries_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "is_capturing", lambda: True)
    q, cache = torch.zeros(2, 1, 128), torch.zeros(2, 1, 128, 128, dtype=torch.bfloat16)
    table, rows = torch.ones(1, 1, dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="capture steps of one query a row"):
        attention.decode(q, cache, cache, table, rows, 0.1, 0, torch.zeros_like(q))


def test_heads_are_expanded_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent, "EXPANDED_BYTES", 1)
    monkeypatch.setattr(mla_expanded_cases, "_SHAPES", EXPANDED[2:])
    assert check("npu_attention_mla_extend_expanded") == 1
