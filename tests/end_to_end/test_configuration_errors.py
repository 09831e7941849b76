"""What only the engine can find out: it says so once, in one line, and is not started again."""

from pathlib import Path

from running_server import run_cli


def test_a_kernel_that_cannot_run_is_named_and_nothing_is_tried_twice(smollm2: Path) -> None:
    ended = run_cli("run", "smollm2-135m", "--port", "0", "--set", "kernels.gemm.linear=no_such_kernel")
    assert ended.returncode == 2
    assert "no_such_kernel" in ended.stderr
    assert "gemm.linear" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "started again in" not in ended.stderr


def test_a_cache_that_holds_not_one_block_is_refused_with_both_figures(smollm2: Path) -> None:
    ended = run_cli("run", "smollm2-135m", "--port", "0", "--kv-cache-gb", "0.0001")
    assert ended.returncode in (2, 3)
    assert "kv.bytes" in ended.stderr or "--kv-cache-gb" in ended.stderr
    assert "Traceback" not in ended.stderr
