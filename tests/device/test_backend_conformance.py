"""The one conformance test: every attention and sampling backend with the kernels of every solution that there are.

A backend is a way of preparing a cache group together with the kernels that read it. What can run here gives what the
references give, mixed, padded and replayed; what cannot is refused by name. Vendors' packages come in by registering.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_cases import CASES
from refresh import decode, extend

from tokenspeed.device.attention import backends as attention_backends
from tokenspeed.device.sampling import backends as sampling_backends
from tokenspeed.layers.kernels import KernelBinder
from tokenspeed_kernel.platform import current_platform
from tokenspeed_kernel.plugins.loading import loaded_registry
from tokenspeed_kernel.selection import SelectionError
from tokenspeed_kernel.solutions import solutions_of

ROUNDED = 3e-2
"""How far operands of bfloat16 take an output of about 1."""


def refusals(operations: tuple[str, ...]) -> dict[str, str | None]:
    return solutions_of(loaded_registry(), operations, current_platform())


ATTENTION = [
    (case, solution) for case in CASES for solution in refusals(attention_backends.backend_operations(CASES[case].file))
]
SAMPLING = [
    (name, solution)
    for name in sampling_backends.backend_names()
    for solution in refusals(sampling_backends.backend_operations(name))
]


def rounds(operations: tuple[str, ...], solution: str) -> bool:
    """Whether the solution is one that is chosen only where operands may be rounded to bfloat16."""
    kernels = [k for operation in operations for k in loaded_registry().kernels(*operation.split("."))]
    return any("activations" in k.spec.traits for k in kernels if k.spec.solution == solution)


def binder(operations: tuple[str, ...], solution: str, rounded: bool) -> KernelBinder:
    return KernelBinder(dict.fromkeys(operations, solution), activations="bfloat16" if rounded else "float32")


def memory(backend: Any) -> list[int]:
    """Where what a decode was prepared in lies."""
    if hasattr(backend, "state_rows"):
        rows = backend.state_rows
        return [x.data_ptr() for x in (rows.starts, rows.sources, rows.targets)]
    return [x.data_ptr() for x in (backend.decode.pages, backend.decode.lengths)]


def steps(case: str, operations: tuple[str, ...], solution: str, rounded: bool) -> list[torch.Tensor]:
    """What a mixed step and a decode give; the decode again, as a graph's replay would, after another one."""
    tables = CASES[case].tables
    backend, layer = CASES[case].make(
        binder(operations, solution, rounded), torch.bfloat16 if rounded else torch.float32
    )
    extend(backend, tables, [3, 1], [5, 20], [7, 0])
    decode(backend, tables, [2], [33], 2)
    mixed = layer(27)
    extend(backend, tables, [], [], [])
    decode(backend, tables, [1, 2], [30, 18], 2)
    alone, places = layer(2), memory(backend)
    decode(backend, tables, [3, 1, 2], [12, 31, 19], 3)
    decode(backend, tables, [1, 2], [30, 18], 2, replay=True)
    assert memory(backend) == places
    for one, other in zip(layer(2), alone, strict=True):
        assert torch.equal(one, other)
    real = [out[:26] if out.shape[0] == 27 else out for out in mixed]
    return [*real, *alone]


def test_every_file_has_a_case_and_every_backend_many_solutions() -> None:
    assert {case.file for case in CASES.values()} == set(attention_backends.backend_names())
    assert len(ATTENTION) >= 12
    assert {"reference", "torch", "triton"} <= {solution for _, solution in SAMPLING}
    assert len(SAMPLING) >= 8


@pytest.mark.parametrize(("case", "solution"), ATTENTION)
def test_attention_by_every_solution_is_that_of_the_reference(case: str, solution: str) -> None:
    operations = attention_backends.backend_operations(CASES[case].file)
    rounded = rounds(operations, solution)
    if refusals(operations)[solution] is not None:
        with pytest.raises(SelectionError, match=solution):
            steps(case, operations, solution, rounded)
        return
    expected = steps(case, operations, "reference", rounded)
    bound = ROUNDED if rounded else 1e-5
    for one, other in zip(steps(case, operations, solution, rounded), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound, equal_nan=True)


def sampled(backend: Any, generator: torch.Generator) -> list[torch.Tensor]:
    """One call of each of the five operations, rows of every kind."""
    rows, tokens = 5, 70
    logits = torch.randn(rows, tokens, generator=generator) * 2.0
    ints = torch.arange(rows, dtype=torch.int32)
    counts = torch.randint(0, 3, (rows + 1, tokens), generator=generator, dtype=torch.int32)
    tenths = torch.linspace(0.1, 0.5, rows)
    backend.apply_penalties(logits, counts, counts.flip(0) == 2, rows - ints, tenths, tenths, 1.0 + tenths)
    mask = torch.randint(-(2**31), 2**31 - 1, (3, 3), generator=generator, dtype=torch.int32)
    backend.apply_token_mask(logits, mask, ints - 2)
    taken = logits.clone()
    best = torch.empty(rows), torch.empty(rows, 4, dtype=torch.int32), torch.empty(rows, 4)
    backend.logprobs(taken, logits.argmax(dim=1).to(torch.int32), 4, *best)
    drawn, nan = torch.empty(rows, dtype=torch.int32), torch.empty(rows, dtype=torch.bool)
    top_k = torch.tensor([0, 1, 5, 0, 9], dtype=torch.int32)
    top_p, min_p = torch.tensor([1.0, 1.0, 0.8, 0.6, 0.9]), torch.tensor([0.0, 0.0, 0.1, 0.0, 0.2])
    rules = (0.5 + tenths, top_k, top_p, min_p, 7 * ints.long() - 9, ints % 2, ints)
    backend.sample(logits.clone(), *rules, drawn, most_kept=0)
    few = torch.empty_like(drawn)
    rules = (rules[0], torch.tensor([3, 1, 5, 16, 9], dtype=torch.int32), *rules[2:])
    backend.sample(logits.clone(), *rules, few, most_kept=16)
    logits[3, 69] = torch.nan
    backend.has_nan(logits, nan)
    return [taken, *best, drawn, few, nan]


@pytest.mark.parametrize(("name", "solution"), SAMPLING)
def test_sampling_by_every_solution_is_that_of_the_reference(name: str, solution: str) -> None:
    operations = sampling_backends.backend_operations(name)
    kernels = binder(operations, solution, rounded=False)
    if refusals(operations)[solution] is not None:
        with pytest.raises(SelectionError, match=solution):
            sampling_backends.make_backend(name, kernels)
        return
    reference = sampling_backends.make_backend(name, binder(operations, "reference", rounded=False))
    found = sampled(sampling_backends.make_backend(name, kernels), torch.Generator().manual_seed(2))
    for one, other in zip(found, sampled(reference, torch.Generator().manual_seed(2)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed")
def test_triton_conforms_in_its_interpreter() -> None:
    """This very file with the interpreter counting as a device, in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", "-k", "triton"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ended = subprocess.run(
        [*command, "-m", "not long", __file__],
        cwd=Path(__file__).parents[2], env=variables | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
