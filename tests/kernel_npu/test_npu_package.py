"""Registration, refusals and their reasons, the recorded contract, and what the host's part does with tensors."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.npu_schemas import SchemaError, aten_of, schemas_of
from tokenspeed_kernel.platform import PlatformInfo, override_platform
from tokenspeed_kernel.plugins import load_plugins
from tokenspeed_kernel.registry import active_registry
from tokenspeed_kernel_npu import lengths, operators, pages
from tokenspeed_kernel_npu.pages import copied, in_place, passes, used_pages
from tokenspeed_kernel_npu.rows import Rows

ROOT = Path(__file__).parents[2]
NPU = PlatformInfo(vendor="npu", machine="aarch64", isa="ascend910b", cores=8, memory_bytes=1 << 38)


@pytest.fixture(autouse=True)
def _loaded():
    load_plugins()
    operators._absence.cache_clear()
    yield
    operators._absence.cache_clear()


def ours():
    return [kernel for kernel in active_registry().kernels() if kernel.spec.solution == "npu"]


def test_the_kernels_join_through_the_plugin_door_and_say_that_they_never_ran():
    assert len(ours()) == 17
    for kernel in ours():
        assert kernel.origin.startswith("tokenspeed-appliance-kernel-npu")
        assert "compiled_only" in kernel.spec.tags
        assert "deterministic" not in kernel.spec.tags
        assert kernel.spec.capability.operators


def test_on_another_machine_each_is_skipped_with_the_reason():
    machine = PlatformInfo(vendor="cpu", machine="x86_64", isa="avx2", cores=2, memory_bytes=1 << 33)
    assert {kernel.spec.capability.refusal(machine) for kernel in ours()} == {"runs on npu; this is cpu"}


def test_without_torch_npu_the_reason_names_its_package(monkeypatch):
    monkeypatch.setattr(operators, "find_spec", lambda name: None)
    assert {kernel.spec.capability.refusal(NPU) for kernel in ours()} == {
        "needs the package torch-npu, which is not installed"
    }


def test_a_torch_npu_that_cannot_be_imported_is_a_reason_and_no_crash(monkeypatch, tmp_path):
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text('raise OSError("libhccl.so: cannot open shared object file\\nand more")\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    assert operators.lacking(["npu_rms_norm"]) == (
        "torch_npu cannot be imported (OSError: libhccl.so: cannot open shared object file)"
    )


def test_explain_says_why_none_is_chosen(monkeypatch, capsys):
    monkeypatch.setattr(operators, "find_spec", lambda name: None)
    from tokenspeed_kernel.plugins.cli import main

    with override_platform(NPU):
        assert main(["explain", "norm.rms"]) == 0
    assert "needs the package torch-npu" in capsys.readouterr().out


def test_listing_the_kernels_imports_no_torch_npu(tmp_path):
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    code = "import sys, tokenspeed_kernel_npu as n; n.register(); sys.exit('torch_npu' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, check=False)
    assert ended.returncode == 0


def test_every_operator_that_is_called_is_recorded_and_needed_by_a_kernel():
    recorded, package = operators.recorded(), Path(operators.__file__).parent
    assert set(recorded["schemas"]) == set(operators.CALLS)
    assert set(recorded["aten"]) == set(operators.ATEN)
    pinned = (ROOT / "images/npu/constraints.txt").read_text()
    assert f"torch-npu=={recorded['torch_npu']}\n" in pinned, "run scripts/npu_schemas.py for the pinned torch-npu"
    assert recorded["wheel_sha256"] in (ROOT / "images/npu/requirements.lock").read_text()
    needed = frozenset[str]().union(*(kernel.spec.capability.operators for kernel in ours()))
    assert needed == {*operators.CALLS, *(f"aten::{name}" for name in operators.ATEN)}
    sources = "".join(path.read_text() for path in package.glob("*.py") if path.name != "operators.py")
    assert set(re.findall(r'call\(\s*"(\w+)"', sources)) == set(operators.CALLS)


@pytest.mark.parametrize("operator", sorted(operators.CALLS))
def test_what_is_passed_is_in_the_recorded_schema_and_what_must_be_is_passed(operator):
    schema = torch._C.parse_schema(f"npu::{operators.recorded()['schemas'][operator]}")
    arguments = {argument.name: argument for argument in schema.arguments}
    assert set(operators.CALLS[operator]) <= set(arguments)
    required = {name for name, argument in arguments.items() if not argument.has_default_value()}
    assert required <= set(operators.CALLS[operator])


def test_schemas_are_read_out_of_a_library_and_out_of_a_list():
    library = b"\0npu_a(Tensor x) -> Tensor\0_npu_b(Tensor y) -> ()\0npu_a.out(Tensor x) -> ()\0npu_c(int n) -> int\0"
    assert schemas_of(library, ["npu_a", "npu_c"]) == {
        "npu_a": "npu_a(Tensor x) -> Tensor",
        "npu_c": "npu_c(int n) -> int",
    }
    with pytest.raises(SchemaError, match="has 0 schemas of npu_b"):
        schemas_of(library, ["npu_b"])
    with pytest.raises(SchemaError, match="has 2 schemas of npu_a"):
        schemas_of(library + b"npu_a(int n) -> Tensor\0", ["npu_a"])
    assert aten_of("- func: mm.dtype(Tensor a) -> Tensor\n", ["mm.dtype"]) == {
        "mm.dtype": "mm.dtype(Tensor a) -> Tensor"
    }
    with pytest.raises(SchemaError, match=r"has no bmm\.dtype"):
        aten_of("- func: mm.dtype(Tensor a) -> Tensor\n", ["bmm.dtype"])


def test_lengths_of_a_device_are_read_once_until_they_are_written_to(monkeypatch):
    reads = []
    monkeypatch.setattr(lengths, "lies_on_device", lambda values: True)
    monkeypatch.setattr(lengths, "_listed", lambda values: reads.append(1) or values.tolist())
    whole = torch.tensor([1, 2, 3, 4])
    assert lengths.on_host(whole[:2]) == lengths.on_host(whole[:2]) == [1, 2]
    assert len(reads) == 1
    assert lengths.on_host(whole[2:]) == [3, 4]
    assert lengths.on_host(whole) == [1, 2, 3, 4]
    with torch.inference_mode():  # as a step runs
        assert lengths.on_host(whole[:2]) == [1, 2]
        whole[0] = 9
        assert lengths.on_host(whole[:2]) == lengths.on_host(whole[:2]) == [9, 2]
    assert len(reads) == 4
    again = whole.clone()
    assert lengths.on_host(again[:2]) == [9, 2]
    assert len(reads) == 5


def test_lengths_that_count_no_writes_are_read_at_each_call(monkeypatch):
    monkeypatch.setattr(lengths, "lies_on_device", lambda values: True)
    with torch.inference_mode():
        values = torch.tensor([1, 2])
        assert lengths.on_host(values) == [1, 2]
        values[0] = 5
        assert lengths.on_host(values) == [5, 2]


def test_lengths_of_the_host_are_read_at_each_call():
    shared = torch.tensor([1, 2])
    assert lengths.on_host(shared) == [1, 2]
    shared.numpy()[0] = 7
    assert lengths.on_host(shared) == [7, 2]


def arena(layers: int) -> torch.Tensor:
    """[blocks, layers, fields, heads, g, D], every element another value."""
    return torch.arange(4 * layers * 2 * 3 * 16 * 32).view(4, layers, 2, 3, 16, 32)


@pytest.mark.parametrize("layers", [1, 5])
def test_a_layers_pages_are_found_in_the_arena_without_a_copy(layers):
    whole = arena(layers)
    k, v = whole[:, layers - 1, 0], whole[:, layers - 1, 1]
    table = torch.tensor([[2, 1], [3, 0]], dtype=torch.int32)
    found = in_place(k, v, table)
    assert found is not None
    assert found.k.is_contiguous()
    assert found.v.is_contiguous()
    assert found.k.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    for row, page in ((0, 0), (0, 1), (1, 0), (1, 1)):
        place, block = int(found.table[row, page]), int(table[row, page])
        assert torch.equal(found.k[place], k[block])
        assert torch.equal(found.v[place], v[block])


def test_what_is_no_whole_number_of_pages_apart_is_copied():
    padded = torch.zeros(4, 2 * 3 * 16 * 32 + 8)[:, : 2 * 3 * 16 * 32].view(4, 2, 3, 16, 32)
    padded.copy_(torch.rand(padded.shape))
    k, v = padded[:, 0], padded[:, 1]
    table = torch.tensor([[2, 1], [3, -7]], dtype=torch.int32)
    used = used_pages(table, torch.tensor([20, 5]), 16)
    assert used.tolist() == [[2, 1], [3, 0]]
    assert in_place(k, v, used) is None
    assert in_place(arena(1)[:, 0, 0], arena(1)[:, 0, 1, :, :8], used) is None
    found = copied(k, v, used, 20)
    assert found.table.tolist() == [[0, 1], [2, 3]]
    assert torch.equal(found.k[2], k[3])
    assert torch.equal(found.v[1], v[1])


def test_copies_are_made_of_as_many_rows_as_fit(monkeypatch):
    monkeypatch.setattr(pages, "MOST_COPIED", 10)
    assert list(passes([4, 6, 1, 30, 5, 5, 5])) == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 6), slice(6, 7)]
    assert list(passes([11])) == [slice(0, 1)]


def test_rows_leave_out_queries_before_the_first_position():
    rows = Rows.of([0, 4, 4, 6, 9], [3, 8, 2, 0])
    assert (rows.owners, rows.begins, rows.counts, rows.lengths) == ([0, 2], [1, 4], [3, 2], [3, 2])
    assert rows.blind == [(0, 1), (6, 9)]
    values = torch.arange(10.0)
    assert rows.taken(values).tolist() == [1, 2, 3, 4, 5]
    owner, places = rows.key_places([1, 0], torch.device("cpu"))
    assert (owner.tolist(), places.tolist()) == ([0, 0, 1, 1], [1, 2, 0, 1])
    out = torch.full((10,), torch.nan)
    rows.clear_blind(out)
    rows.put(out, torch.tensor([1.0, 2, 3, 4, 5]))
    assert out[:9].tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 0]
    assert out[9].isnan()


def test_the_contract_file_is_json_with_its_origin():
    text = operators.SCHEMAS.read_text()
    assert json.loads(text) == operators.recorded()
    assert text.endswith("}\n")
