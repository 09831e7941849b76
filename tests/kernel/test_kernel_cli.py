"""The command line: what it prints, where errors go, and its exit status."""

import json

import pytest
from kernel_toys import ToyClock, toy_workload, verified

from tokenspeed_kernel import selection, timing, workloads
from tokenspeed_kernel.latency_table import current_environment, read_table
from tokenspeed_kernel.oracle import SelectionOracle
from tokenspeed_kernel.platform import current_platform, override_platform
from tokenspeed_kernel.plugins import PATH_VARIABLE, cli, measuring
from tokenspeed_kernel.plugins.cli import main
from tokenspeed_kernel.registry import Band


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
    assert "traits     activations=float32, causal=True, head_dim=80, kernel_page_size=64, q_per_kv=3, " in out
    assert "-> 1. reference_attention_decode" in out


def test_explain_without_formats_shows_them_all(capsys):
    status, out, _ = run(capsys, "explain", "attention.decode")
    assert status == 0
    for dtype in ("bfloat16", "float16", "float32"):
        assert f"formats    input=float32, kv={dtype}" in out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, "say what to do: list, info NAME, explain OPERATION, verify, bench, tune"),
        (["info", "nothing"], 2, "no kernel 'nothing'; `tokenspeed-kernel list` shows them all"),
        (["list", "norm"], 2, "no operation 'norm'; there are: activation."),
        (["explain", "gemm.linear", "--format", "weights=x"], 2, "no role 'weights'; it has: input, output, weight"),
        (["explain", "gemm.linear", "--format", "weight=int3"], 2, "takes these formats; there are:"),
        (["explain", "gemm.linear", "--trait", "m=3"], 2, "no trait 'm'; it declares: n, k"),
        (["explain", "gemm.linear", "--trait", "n=many"], 2, "write a whole number"),
        (["explain", "attention.decode", "--trait", "causal=1"], 2, "write true or false"),
        (["explain", "gemm.linear", "--trait", "n"], 2, "write NAME=VALUE"),
        (["bench", "norm"], 2, "no operation 'norm'; there are: "),
        (["bench", "--trait", "k=64"], 2, "--format and --trait need an OPERATION"),
        (["tune", "gemm.linear", "--trait", "depth=1"], 2, "no trait 'depth'; it declares: n, k"),
        (["tune", "gemm.linear", "--format", "weight=int3"], 2, "takes these formats; there are:"),
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


# ---------------------------------------------------------------- verify, bench, tune


@pytest.fixture
def toys(registry, toy_spec, make_platform, monkeypatch, tmp_path):
    """Puts the toy operation in place of the process's registry: two verified kernels, one unverified, a reference."""
    clock = ToyClock()
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(timing.torch, "set_num_threads", lambda count: None)
    monkeypatch.setenv("TOKENSPEED_CACHE", str(tmp_path))
    monkeypatch.setitem(workloads._makers, "toy.copy", workloads._Maker(toy_workload, None))
    for name, band, seconds in (
        ("reference_toy", Band.REFERENCE, 8e-6),
        ("slow", Band.SPECIALISED, 4e-6),
        ("quick", Band.PORTABLE, 2e-6),
        ("unchecked", Band.PLUGIN, 1e-6),
    ):
        solution = "reference" if band is Band.REFERENCE else name
        registry.register(toy_spec(name, band=band, solution=solution), clock.kernel(seconds), "test")
    monkeypatch.setattr(cli, "loaded_registry", lambda: registry)
    with override_platform(make_platform()) as platform:
        oracle = verified(SelectionOracle(), platform, "slow", "quick")
        for module in (selection, measuring):
            monkeypatch.setattr(module, "default_oracle", lambda: oracle)
        yield registry


def test_bench_times_every_kernel_beside_the_reference(capsys, toys):
    status, out, _ = run(capsys, "bench", "toy.copy", "--phase", "decode", "--runs", "3")
    assert status == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0].startswith("platform cpu-x86_64-avx512, 2 threads; torch reads memory at ")
    assert lines[1] == "toy.copy (input=float32), decode: [1, 64]"
    assert [line.split(" us ")[0] for line in lines[2:]] == [
        "unchecked 1.0",
        "quick 2.0",
        "slow 4.0",
        "reference_toy 8.0",
    ]
    assert lines[2].endswith("8.0 x reference")


def test_bench_as_json(capsys, toys):
    status, out, _ = run(capsys, "bench", "--json")
    document = json.loads(out)
    assert (status, document["platform"], document["failures"]) == (0, "cpu-x86_64-avx512", [])
    assert {(r["kernel"], r["phase"]) for r in document["results"]} == {
        (name, phase) for name in ("reference_toy", "slow", "quick", "unchecked") for phase in ("decode", "prefill")
    }
    assert document["results"][0]["bytes"] == 512


def test_bench_tells_a_kernel_that_fails_by_its_status(capsys, toys, toy_spec):
    def broken(x, out):
        raise RuntimeError("out of registers")

    toys.register(toy_spec("broken"), broken, "test")
    status, out, _ = run(capsys, "bench", "--phase", "decode")
    assert status == 1
    assert "broken failed: RuntimeError: out of registers" in out


def test_tune_writes_what_selection_then_goes_by(capsys, toys, tmp_path):
    path = tmp_path / "tuned.json"
    status, out, _ = run(capsys, "tune", "--phase", "decode", "--output", str(path))
    assert status == 0
    assert out.splitlines() == [
        "toy.copy (input=float32), decode: [1, 64]",
        "-> quick  2.0 us",
        "   slow  4.0 us",
        "  unchecked is no finalist: its numerics were not verified on cpu-x86_64-avx512",
        f"2 latencies written to {path}",
    ]
    table = read_table(path)
    assert table.environment == current_environment(toys, current_platform())
    assert {m.kernel for m in table.measurements} == {"quick", "slow"}
    _, out, _ = run(capsys, "explain", "toy.copy")
    assert "-> 1. quick [portable]  2.0 us measured" in out


def test_tune_passes_over_what_leaves_nothing_to_choose(capsys, toys):
    selection.default_oracle().verifications.pop((current_platform().key, "slow"))
    status, out, _ = run(capsys, "tune", "toy.copy", "--phase", "decode")
    assert status == 0
    assert "1 requests leave nothing to choose; --all measures them too" in out
    assert "written" not in out
    status, out, _ = run(capsys, "tune", "toy.copy", "--phase", "decode", "--all")
    assert "-> quick  2.0 us" in out
    assert "1 latencies written to " in out


def test_a_stale_table_stops_every_command_that_selects_by_name(capsys, toys, monkeypatch, tmp_path):
    path = tmp_path / "old.json"
    run(capsys, "tune", "--phase", "decode", "--output", str(path))
    path.write_text(path.read_text().replace('"cores": 2', '"cores": 96'))
    monkeypatch.setenv("TOKENSPEED_KERNEL_TABLES", str(path))
    fresh = SelectionOracle()
    monkeypatch.setattr(selection, "default_oracle", lambda: fresh)
    for command in (["explain", "toy.copy"], ["bench"], ["tune"]):
        status, out, err = run(capsys, *command)
        assert (status, out) == (1, "")
        assert err.startswith(
            f"tokenspeed-kernel: {path}: this latency table is stale or foreign: cores was 96 and is 2"
        )


def test_verify_takes_names_and_the_options_of_the_numerics(capsys, tmp_path):
    path = tmp_path / "records.json"
    status, out, _ = run(capsys, "verify", "reference_norm_rms", "--seed", "3", "--write", str(path))
    assert status == 0
    assert "reference_norm_rms  right, error " in out
    assert json.loads(path.read_text())["records"][0]["kernel"] == "reference_norm_rms"
    status, out, _ = run(capsys, "verify", "activation.silu_and_mul", "reference_norm_rms")
    assert status == 0
    assert "reference_norm_rms " in out and "reference_activation_silu_and_mul " in out
    status, _, err = run(capsys, "verify", "reference_norm_rms", "nothing")
    assert status == 2
    assert "no kernel or operation 'nothing'" in err


@pytest.mark.parametrize("arguments", [["bench", "--runs", "0"], ["list", "--fast"], ["tune", "--phase", "warm"]])
def test_what_cannot_be_parsed_ends_with_status_2(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: tokenspeed-kernel" in capsys.readouterr().err
