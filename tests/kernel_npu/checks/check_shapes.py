"""The stand-in's results against the shapes and dtypes that torch_npu itself says its operators give.

torch_npu has a function for each operator that computes these without a device. They are read out of a wheel, where
TOKENSPEED_NPU_WHEEL names one (images/npu/constraints.txt says of which version), and run beside every call that the
kernels make in their cases.
"""

import ast
import os
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from check_numerics import NPU, OURS, SLOW, take_our_ways

from tokenspeed_kernel.numerics import verify_kernel
from tokenspeed_kernel.plugins.loading import loaded_registry
from tokenspeed_kernel_npu import elementwise, fused, moe, operators, prologue

WHEEL = os.environ.get("TOKENSPEED_NPU_WHEEL", "")
SOURCE = "torch_npu/op_plugin/meta/_meta_registrations.py"


def _stub(name: str, **members: object) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(members)
    return module


def shape_functions(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[..., Any]]:
    """Operator to torch_npu's function of its results; what these import of torch_npu is put in their place."""
    import torch_npu

    found: dict[str, Callable[..., Any]] = {}

    def impl(library: object, name: str, key: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return lambda function: found.setdefault(name, function)

    for name in ("hifloat8", "float4_e2m1fn_x2", "float4_e1m2fn_x2", "float8_e8m0fnu", "float8_e5m2", "int4"):
        monkeypatch.setattr(torch_npu, name, object(), raising=False)
    error_codes = _stub("error codes", ErrCode=types.SimpleNamespace(), ops_error=lambda code: "")
    error_codes.ErrCode = type("ErrCode", (), {"__getattr__": lambda self, name: name})()  # type: ignore[attr-defined]
    for name, module in (
        ("torch_npu.utils", _stub("utils")),
        ("torch_npu.utils._error_code", error_codes),
        ("torch_npu.npu", _stub("npu")),
        ("torch_npu.npu.utils", _stub("npu utils", get_cann_version=lambda *_: "9.1.0")),
        ("torch_npu.npu._backends", _stub("backends", get_soc_version=lambda: 220)),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.library, "impl", impl)
    monkeypatch.setattr(torch.library, "Library", lambda *_: None)
    with zipfile.ZipFile(wheel) as archive:
        tree = ast.parse(archive.read(SOURCE), SOURCE)
    # Calls on the outermost level tell torch of operators that the stand-in does not have.
    tree.body = [statement for statement in tree.body if not isinstance(statement, ast.Expr)]
    exec(compile(tree, SOURCE, "exec"), {"__name__": "shapes"})
    return found


def _to_meta(value: object) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    return [_to_meta(item) for item in value] if isinstance(value, list) else value


def _forms(results: Any) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    listed = [results] if isinstance(results, torch.Tensor) else list(results)
    return [(result.dtype, tuple(result.shape)) for result in listed]


def used(operator: str, arguments: dict[str, object]) -> int:
    """How many of the operator's results are read by us: those behind them may be left empty."""
    if operator == "npu_fused_infer_attention_score_v2":
        return 2 if arguments["return_softmax_lse"] else 1
    return {"npu_moe_init_routing_v2": 3, "npu_moe_gating_top_k": 2, "npu_moe_gating_top_k_softmax_v2": 2}.get(
        operator, 9
    )


@pytest.mark.long
@pytest.mark.skipif(not WHEEL, reason="TOKENSPEED_NPU_WHEEL names no wheel of torch-npu")
@pytest.mark.parametrize("name", OURS)
def test_results_have_the_shapes_that_torch_npu_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = shape_functions(Path(WHEEL), monkeypatch)
    compared: list[str] = []

    def beside(operator: str, **arguments: object) -> object:
        results = operators.call(operator, **arguments)
        schema = getattr(torch.ops.npu, operator).default._schema
        whole = {argument.name: argument.default_value for argument in schema.arguments} | arguments
        positional = [_to_meta(whole[argument.name]) for argument in schema.arguments if not argument.kwarg_only]
        named = {argument.name: _to_meta(whole[argument.name]) for argument in schema.arguments if argument.kwarg_only}
        count = used(operator, arguments)
        assert _forms(results)[:count] == _forms(functions[operator](*positional, **named))[:count], operator
        compared.append(operator)
        return results

    if name in SLOW:
        take_our_ways(monkeypatch)
    for module in (elementwise, fused, moe, prologue):
        monkeypatch.setattr(module, "call", beside)
    kernel = loaded_registry().kernel(name)
    report = verify_kernel(kernel, loaded_registry(), platform=NPU)
    assert report.passed, report.failures
    assert {*compared} == {
        operator for operator in kernel.spec.capability.operators if not operator.startswith("aten::")
    }
