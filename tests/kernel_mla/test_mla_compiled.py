"""The compiled kernels: the instructions and resources asked for, and the PTX itself, run without a GPU, against the
reference. Each check compiles in a process of its own."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CHECKS = Path(__file__).parent.parent / "support" / "mla_checks.py"

pytestmark = pytest.mark.skipif(find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl to compile")


def run(*words: object) -> None:
    done = subprocess.run([sys.executable, CHECKS, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


both_generations = pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])


@pytest.mark.parametrize(
    "kernel",
    ["hopper", "hopper_bytes", "pair", "blackwell_bytes", pytest.param("blackwell", marks=pytest.mark.long)],
)
def test_the_decode_has_the_instructions_and_is_right(kernel):
    run(kernel)


@pytest.mark.long
@pytest.mark.parametrize("kernel", ["block", "pair", "prefill", "hopper_bytes", "block_bytes"])
def test_a_wait_or_fence_that_is_missing_is_found(kernel):
    run("faults", kernel)


@pytest.mark.long
def test_the_code_of_the_second_blackwell_is_that_of_the_first():
    run("same_text")


@pytest.mark.long
@pytest.mark.parametrize(("half", "page"), [(0, 16), (0, 32), (1, 64), (0, 128)])
@both_generations
def test_every_variant_is_right(architecture, half, page):
    run("shapes", architecture, page, half, 0)


@pytest.mark.long
@pytest.mark.parametrize(("half", "page"), [(0, 16), (1, 32), (0, 64), (0, 128)])
@both_generations
def test_every_variant_over_a_cache_of_8_bits_is_right(architecture, half, page):
    run("shapes", architecture, page, half, 1)


@pytest.mark.long
@pytest.mark.parametrize("causal", [0, 1], ids=["all_keys", "causal"])
@both_generations
def test_the_prefill_has_the_instructions_and_is_right(architecture, causal):
    run("prefill", architecture, causal)


@pytest.mark.long
def test_what_one_process_compiled_the_next_one_finds():
    run("store")


@pytest.mark.long
@pytest.mark.parametrize("kernel", ["mla_decode", "mla_decode_partial", "mla_extend", "merge_partials", "ragged"])
@both_generations
def test_the_registered_kernels_pass_the_numerics_of_their_operation(architecture, kernel):
    run("numerics", architecture, f"mla_cute_{kernel}")


@pytest.mark.long
@pytest.mark.parametrize("kernel", ["mla_decode", "mla_decode_partial", "mla_extend"])
@both_generations
def test_the_kernels_over_8_bits_pass_the_numerics_of_their_operation(architecture, kernel):
    run("numerics", architecture, f"mla_cute_{kernel}_e4m3")


@pytest.mark.long
def test_the_page_says_what_the_compiler_makes_and_nothing_is_spilt():
    script = Path(__file__).parents[2] / "scripts" / "describe_mla_kernels.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
