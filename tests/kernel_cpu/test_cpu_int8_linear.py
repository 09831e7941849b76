"""gemm.linear with quantised activations: only on request; one result on every instruction set and in any batch."""

import dataclasses
import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tokenspeed_kernel_cpu
from tokenspeed_kernel.binding import Bound
from tokenspeed_kernel.numerics.verify import verify_kernel
from tokenspeed_kernel.ops import bind_embedding, bind_linear
from tokenspeed_kernel.ops.gemm import ACTIVATIONS_VARIABLE, linear_signature
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.registry import Band, RegisteredKernel, active_registry
from tokenspeed_kernel.selection import OverrideError
from tokenspeed_kernel.signature import WEIGHT_FORMATS
from tokenspeed_kernel.traits import one_of
from tokenspeed_kernel_cpu import _native, int8_linear

MakeWeight = Callable[[str, int, int], QuantizedTensor]

QUANTISED = {"int8": 127, "int16": 127 * 128}
"""Activations to their largest quant."""
SHAPES = {32: ((1, 32), (37, 96), (200, 576)), 256: ((1, 256), (39, 768))}
CASES = [(name, n, k) for name in int8_linear.FORMATS for n, k in SHAPES[256 if name.endswith("_k") else 32]]


def _bind(weight: QuantizedTensor, bias: torch.Tensor | None = None, activations: str = "int8") -> Bound:
    bound = bind_linear(weight, bias, activations=activations)
    assert bound.spec.name == f"cpu_gemm_linear_{activations}"
    return bound


def _multiply(fn: Callable[..., None], x: torch.Tensor, rows: int) -> torch.Tensor:
    """The product into memory full of NaN, with NaN behind it that must stay."""
    memory = torch.full((x.shape[0] + 1, rows), torch.nan)
    fn(x, memory[:-1])
    assert bool(memory[-1].isnan().all())
    return memory[:-1]


@pytest.mark.parametrize("activations", QUANTISED)
@pytest.mark.parametrize(("weight_format", "n", "k"), CASES)
def test_every_instruction_set_and_every_batch_give_the_same_bits(
    random_weight: MakeWeight, weight_format: str, n: int, k: int, activations: str
) -> None:
    weight, bias, x = random_weight(weight_format, n, k), torch.randn(n), torch.randn(45, k)
    results = []
    for name in tokenspeed_kernel_cpu.available_instruction_sets():
        with tokenspeed_kernel_cpu.use_instruction_set(name):
            fn = _bind(weight, bias, activations).fn
            results.append(_multiply(fn, x, n))
            for tokens in (0, 1, 2, 3, 4, 5, 8, 11, 12, 13, 25, 32, 33):
                assert torch.equal(_multiply(fn, x[:tokens], n), results[-1][:tokens]), f"{name}, {tokens} tokens"
            assert torch.equal(_multiply(fn, x[44:], n), results[-1][44:])
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("activations", QUANTISED)
@pytest.mark.parametrize("weight_format", int8_linear.FORMATS)
def test_each_weight_is_packed_to_its_place(
    instruction_set: str, random_weight: MakeWeight, weight_format: str, activations: str
) -> None:
    """One column at a time: nothing else is added to a weight."""
    weight = random_weight(weight_format, 21, 512)
    found = _multiply(_bind(weight, None, activations).fn, 127.0 * torch.eye(512), 21).T / 127.0
    expected = weight.dequantize()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("activations", QUANTISED)
@pytest.mark.parametrize("weight_format", int8_linear.FORMATS)
def test_a_result_lies_within_what_rounding_may_do(
    random_weight: MakeWeight, weight_format: str, activations: str
) -> None:
    weight, x = random_weight(weight_format, 130, 512), torch.randn(17, 512)
    values = weight.dequantize().double()
    largest = x.double().unflatten(1, (-1, 32)).abs().amax(dim=-1).repeat_interleave(32, dim=1)
    bound = (largest / (2 * QUANTISED[activations])) @ values.abs().T
    product = _multiply(_bind(weight, None, activations).fn, x, 130).double()
    error = (product - x.double() @ values.T).abs()
    assert bool((error <= bound * 1.001 + 1e-6).all())
    assert float((error / bound).max()) > 0.01  # something was rounded


@pytest.mark.parametrize("activations", QUANTISED)
@pytest.mark.parametrize("weight_format", ["gguf_q8_0", "gguf_q6_k"])
def test_the_largest_quants_of_all_fit(
    instruction_set: str, random_weight: MakeWeight, weight_format: str, activations: str
) -> None:
    """Every pair of products at its largest, of either sign: 16 bits must not saturate."""
    weight = random_weight(weight_format, 32, 512)
    for sign in (1.0, -1.0):
        x = sign * weight.dequantize().sign()
        product = _multiply(_bind(weight, None, activations).fn, x, 32)
        expected = x.double() @ weight.dequantize().double().T
        torch.testing.assert_close(product.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_number_of_threads_changes_no_bit(random_weight: MakeWeight) -> None:
    fn = _bind(random_weight("gguf_q4_k", 1537, 768), None, "int16").fn
    x = torch.randn(40, 768)
    before = tokenspeed_kernel_cpu.num_threads()
    try:
        tokenspeed_kernel_cpu.set_num_threads(1)
        alone = [_multiply(fn, x[:tokens], 1537) for tokens in (1, 8, 40)]
        for count in (2, 3, 7):
            tokenspeed_kernel_cpu.set_num_threads(count)
            for result in alone:
                assert torch.equal(_multiply(fn, x[: result.shape[0]], 1537), result), f"{count} threads"
    finally:
        tokenspeed_kernel_cpu.set_num_threads(before)


def test_more_tokens_than_one_pass_takes(random_weight: MakeWeight) -> None:
    fn = _bind(random_weight("gguf_q8_0", 5, 32)).fn
    x = torch.randn(2100, 32)
    whole = _multiply(fn, x, 5)
    for start in (0, 1020, 1024, 2047, 2095):
        assert torch.equal(_multiply(fn, x[start : start + 5], 5), whole[start : start + 5])


@pytest.mark.parametrize("activations", QUANTISED)
@pytest.mark.parametrize("weight_format", int8_linear.FORMATS)
def test_what_is_not_finite_stays_in_its_row_and_what_is_tiny_is_zero(
    instruction_set: str, random_weight: MakeWeight, weight_format: str, activations: str
) -> None:
    fn = _bind(random_weight(weight_format, 40, 256), None, activations).fn
    x = torch.randn(9, 256)
    x[4, 63], x[6, 0], x[7], x[8] = torch.nan, -torch.inf, 1e-31, -0.0
    out = _multiply(fn, x, 40)
    assert out.isnan().all(dim=1).tolist() == [row in (4, 6) for row in range(9)]
    assert out.isnan().any(dim=1).tolist() == [row in (4, 6) for row in range(9)]
    assert not out[7:].any()


@pytest.mark.parametrize("activations", QUANTISED)
def test_none_quantises_unless_it_is_asked_to(
    monkeypatch: pytest.MonkeyPatch, random_weight: MakeWeight, activations: str
) -> None:
    weight, name = random_weight("gguf_q8_0", 8, 64), f"cpu_gemm_linear_{activations}"
    monkeypatch.delenv(ACTIVATIONS_VARIABLE, raising=False)
    assert bind_linear(weight, None).spec.name == "cpu_gemm_linear"
    with pytest.raises(OverrideError, match="activations"):
        bind_linear(weight, None, override=name)
    assert bind_linear(weight, None, activations="bfloat16").spec.name == "cpu_gemm_linear"
    monkeypatch.setenv(ACTIVATIONS_VARIABLE, activations)
    assert bind_linear(weight, None).spec.name == name
    assert bind_linear(weight, None, activations="float32").spec.name == "cpu_gemm_linear"
    for not_packed in ("gguf_q2_k", "gguf_q3_k", "bfloat16", "float32"):
        assert bind_linear(random_weight(not_packed, 8, 256), None).spec.name == "cpu_gemm_linear"


def test_a_packed_weight_takes_about_what_the_blocks_take(random_weight: MakeWeight) -> None:
    for name in int8_linear.FORMATS:
        weight = random_weight(name, 64, 512)
        assert weight.nbytes <= int8_linear.pack(weight).matrix.nbytes <= weight.nbytes * 1.03
    with pytest.raises(ValueError, match="'gguf_q2_k' is not packed"):
        _native.PackedMatrix("gguf_q2_k", 1, 256, 0)
    with pytest.raises(ValueError, match="33 columns do not divide"):
        _native.PackedMatrix("gguf_q8_0", 1, 33, 0)


def _resident(address: int) -> int:
    """Bytes of the mapping that holds ``address`` which are resident in this process."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        field = line.split()[0]
        if not field.endswith(":"):
            first, behind = (int(part, 16) for part in field.split("-"))
            inside = first <= address < behind
        elif inside and field == "Rss:":
            return int(line.split()[1]) * 1024
    raise AssertionError("no such mapping")


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_one_copy_stays_of_a_mapped_weight(tmp_path: Path, random_weight: MakeWeight) -> None:
    original = random_weight("gguf_q8_0", 1024, 1024)
    path = tmp_path / "weights"
    path.write_bytes(original.plane.numpy().tobytes())
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    plane = torch.frombuffer(mapped, dtype=torch.uint8).view_as(original.plane)
    weight = QuantizedTensor("gguf_q8_0", (1024, 1024), {"blocks": plane}, "mapped")
    assert int(plane.long().sum()) == int(original.plane.long().sum())
    assert _resident(plane.data_ptr()) == weight.nbytes
    x, row = torch.randn(3, 1024), torch.empty(1, 1024)
    product = _multiply(_bind(weight).fn, x, 1024)
    assert _resident(plane.data_ptr()) == 0
    bind_embedding(weight).fn(torch.tensor([700], dtype=torch.int32), row)
    assert torch.equal(row[0], original.dequantize()[700])
    assert torch.equal(plane, original.plane)
    before = original.plane.clone()
    assert torch.equal(_multiply(_bind(original).fn, x, 1024), product)
    assert torch.equal(original.plane, before)  # memory that is nobody's file stays as it is
    assert _native.release_mapped(original.plane.data_ptr(), original.nbytes) == 0


def test_memory_goes_back_with_its_weight(random_weight: MakeWeight) -> None:
    """Weights share stretches of memory: one that outlives the others keeps its values."""
    weight, x = random_weight("gguf_q8_0", 300, 512), torch.randn(2, 512)
    kernels = [_bind(weight).fn for _ in range(8)]
    expected = _multiply(kernels[0], x, 300)
    last = kernels.pop()
    kernels.clear()
    others = [_bind(random_weight("gguf_q4_0", 300, 512)).fn for _ in range(8)]
    assert torch.equal(_multiply(last, x, 300), expected)
    assert not torch.equal(_multiply(others[0], x, 300), expected)


def _plain(block: int, whole: Callable[[torch.Tensor], torch.Tensor], levels: float) -> Callable[..., object]:
    """A kernel in PyTorch with a scale for each ``block`` columns, whose quants are ``whole(x / scale)``."""

    def make(weight: QuantizedTensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor, torch.Tensor], None]:
        matrix = weight.dequantize().T

        def linear(x: torch.Tensor, out: torch.Tensor) -> None:
            columns = min(block, x.shape[1])
            parts = torch.nn.functional.pad(x, (0, -x.shape[1] % columns)).unflatten(1, (-1, columns))
            scale = parts.abs().amax(dim=-1, keepdim=True) / levels
            quants = whole(torch.where(scale > 0.0, parts / scale, 0.0))
            torch.mm((quants * scale).flatten(1)[:, : x.shape[1]], matrix, out=out)
            if bias is not None:
                out += bias

        return linear

    return make


@pytest.fixture
def planted() -> Callable[..., list[str]]:
    """Verifies a kernel that says it quantises its activations; what was wrong."""
    registry = active_registry()
    spec = registry.reference("gemm", "linear").spec

    def verify(make: Callable[..., object], activations: str) -> list[str]:
        wrong = dataclasses.replace(
            spec,
            name="planted",
            solution="planted",
            band=Band.PLUGIN,
            signatures=frozenset({linear_signature(WEIGHT_FORMATS["gguf_q8_0"])}),
            traits={**spec.traits, "activations": one_of(activations)},
        )
        report = verify_kernel(RegisteredKernel(wrong, make, "test"), registry)
        assert report.cases > 0
        return [line for failure in report.failures for line in failure.details]

    return verify


@pytest.mark.parametrize(("activations", "levels"), QUANTISED.items())
def test_the_cases_let_pass_what_keeps_the_contract_and_nothing_else(
    planted: Callable[..., list[str]], activations: str, levels: int
) -> None:
    assert planted(_plain(32, torch.round, levels), activations) == []
    for wrong in (
        _plain(32, torch.trunc, levels),
        _plain(32, lambda quants: quants, levels),
        _plain(64, torch.round, levels),
        _plain(1 << 20, torch.round, levels),
        _plain(32, torch.round, levels / 2),
        _plain(32, torch.round, levels + 1),
    ):
        lines = planted(wrong, activations)
        assert "elements wrong" in "\n".join(lines)
        assert not any("raised" in line for line in lines), lines
