"""What the stand-in refuses is what torch_npu would: the schemas are its own, the constraints its documentation's."""

import pytest
import torch
from torch_npu.needs import ConstraintError

from tokenspeed_kernel.ops.moe import Routing, make_reference_route
from tokenspeed_kernel.platform import PlatformInfo
from tokenspeed_kernel.plugins.loading import loaded_registry
from tokenspeed_kernel_npu import attention, latent, moe, operators
from tokenspeed_kernel_npu.operators import call

NPU = PlatformInfo(vendor="npu", machine="aarch64", isa="ascend910b", cores=8, memory_bytes=1 << 36)


def test_the_registered_schemas_are_the_recorded_ones() -> None:
    for name, schema in operators.recorded()["schemas"].items():
        recorded = torch._C.parse_schema(f"npu::{schema}")
        assert str(getattr(torch.ops.npu, name).default._schema) == str(recorded)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"epsilon": 1e-6, "eps": 1e-6}, "eps"),
        ({"gamma": 3.0}, "gamma"),
        ({"rotary_mode": "half"}, "rotary_mode"),
    ],
)
def test_a_call_is_bound_against_the_schema(arguments: dict[str, object], says: str) -> None:
    whole = {"input": torch.zeros(2, 8), "gamma": torch.zeros(8), **arguments}
    with pytest.raises(RuntimeError, match=says):
        call("npu_rms_norm", **whole)


def test_a_tensor_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(ConstraintError, match="input is not contiguous"):
        call("npu_rms_norm", input=torch.zeros(2, 16)[:, :8], gamma=torch.zeros(8))


def test_an_operator_or_argument_that_this_torch_npu_lacks_keeps_its_kernels_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = loaded_registry().kernel("npu_norm_rms").spec
    assert spec.capability.refusal(NPU) is None
    monkeypatch.setitem(operators.CALLS, "npu_rms_norm", ("input", "gamma", "fast"))
    assert spec.capability.refusal(NPU) == (
        "npu_rms_norm of this torch_npu takes no fast; the calls are those of torch-npu 2.10.0.post4"
    )
    assert operators.lacking(["npu_future_norm"]) == (
        "this torch_npu has no npu_future_norm; the calls are those of torch-npu 2.10.0.post4"
    )
    assert "has no kernel for aten::bmm.dtype" in str(operators.lacking(["aten::bmm.dtype"]))


def decode(heads: int, width: int = 64, window: int = 0) -> None:
    q, cache = torch.zeros(1, heads, width), torch.zeros(2, 2, 16, width, dtype=torch.bfloat16)
    table, lengths = torch.ones(1, 1, dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    attention.decode(q, cache, cache, table, lengths, 0.1, window, torch.zeros_like(q))


def test_what_the_operators_cannot_take_is_named_with_what_mends_it() -> None:
    with pytest.raises(ValueError, match="up to 256 query heads, got 257"):
        decode(257)
    with pytest.raises(ConstraintError, match="more than 64 query heads"):
        decode(130)
    with pytest.raises(ValueError, match=r"128 query heads of 512 elements.*fewer than 65535"):
        decode(128, 512, window=2)
    with pytest.raises(ValueError, match="up to 128 heads over latents, got 129; share them out"):
        latent._even_heads(129)


@pytest.mark.parametrize(("experts", "groups"), [(8, 4), (390, 65)])
def test_groups_that_the_operator_does_not_take_are_sorted(experts: int, groups: int) -> None:
    routing = Routing(
        experts=experts, top_k=3, scoring="sigmoid", corrected=True, groups=groups, top_groups=2, scale=2.5
    )
    generator = torch.Generator().manual_seed(1)
    logits, correction = torch.randn(9, experts, generator=generator), torch.rand(experts, generator=generator) - 2.0
    found = [torch.empty(9, 3, dtype=torch.int32), torch.empty(9, 3)]
    expected = [torch.empty_like(tensor) for tensor in found]
    moe.make_sigmoid_route(routing, correction)(logits, *found)
    make_reference_route(routing, correction)(logits, *expected)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1])
