"""The command line: what it prints, where errors go, and its exit status."""

import pytest

from tokenspeed_kernel.plugins import PATH_VARIABLE
from tokenspeed_kernel.plugins.cli import main


def run(capsys, *arguments):
    status = main(arguments)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_list_shows_every_operation_and_where_each_kernel_came_from(capsys):
    status, out, _ = run(capsys, "list")
    assert status == 0
    assert "gemm.linear\n" in out
    assert "reference_norm_rms" in out
    status, out, _ = run(capsys, "list", "norm.rms")
    assert out.splitlines()[0] == "norm.rms"
    assert "runs here  (tokenspeed_kernel.ops.norm)" in out
    assert "gemm" not in out


def test_info_shows_call_needs_traits_and_formats(capsys):
    status, out, _ = run(capsys, "info", "reference_attention_decode")
    assert status == 0
    assert "call       fn(q, k_cache, v_cache, page_table, seq_lens, scale, window, out)" in out
    assert "trait      kernel_page_size: a multiple of 1" in out
    assert "formats    input=float32, kv=bfloat16" in out


def test_explain_takes_formats_traits_and_an_override(capsys):
    status, out, _ = run(
        capsys,
        "explain",
        "attention.decode",
        "--format",
        "kv=float16",
        "--trait",
        "head_dim=80",
        "--override",
        "reference",
    )
    assert status == 0
    assert out.count("attention.decode\n") == 1
    assert "traits     causal=True, head_dim=80, kernel_page_size=64, q_per_kv=3, windowed=False" in out
    assert "-> 1. reference_attention_decode" in out


def test_explain_without_formats_shows_them_all(capsys):
    status, out, _ = run(capsys, "explain", "attention.decode")
    assert status == 0
    for dtype in ("bfloat16", "float16", "float32"):
        assert f"formats    input=float32, kv={dtype}" in out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, "say what to do: list, info NAME, explain OPERATION"),
        (["info", "nothing"], 2, "no kernel 'nothing'; `tokenspeed-kernel list` shows them all"),
        (["list", "norm"], 2, "no operation 'norm'; there are: activation.silu_and_mul"),
        (["explain", "gemm.linear", "--format", "weights=x"], 2, "no role 'weights'; it has: input, output, weight"),
        (["explain", "gemm.linear", "--format", "weight=int3"], 2, "takes these formats; there are:"),
        (["explain", "gemm.linear", "--trait", "m=3"], 2, "no trait 'm'; it declares: n, k"),
        (["explain", "gemm.linear", "--trait", "n=many"], 2, "write a whole number"),
        (["explain", "attention.decode", "--trait", "causal=1"], 2, "write true or false"),
        (["explain", "gemm.linear", "--trait", "n"], 2, "write NAME=VALUE"),
        (["explain", "norm.rms", "--override", "magic"], 1, "names no kernel and no solution of norm.rms"),
        (["--register", "/nonexistent/folder"], 1, "no kernel plugin at /nonexistent/folder"),
    ],
)
def test_errors_go_to_stderr_with_a_status(capsys, monkeypatch, arguments, status, message):
    monkeypatch.delenv(PATH_VARIABLE, raising=False)
    found, out, err = run(capsys, *arguments)
    assert (found, out) == (status, "")
    assert err.startswith("tokenspeed-kernel: ")
    assert message in err
