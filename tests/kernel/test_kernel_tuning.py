"""Tuning: who is measured, when, and that the measured order decides."""

import pytest
from kernel_toys import SIGNATURE, ToyClock, serving, toy_workload, verified

from tokenspeed_kernel import binding, selection, timing, tuning, workloads
from tokenspeed_kernel.binding import bind, binding_objective, recording_selections
from tokenspeed_kernel.latency_table import TableError, cache_path, current_environment, read_table
from tokenspeed_kernel.oracle import SelectionOracle
from tokenspeed_kernel.platform import override_platform
from tokenspeed_kernel.registry import Band, use_registry
from tokenspeed_kernel.selection import select
from tokenspeed_kernel.serving_guard import process_guard

ESTIMATED_BEST = "a_specialised"
MEASURED_BEST = "b_portable"


@pytest.fixture
def clock(monkeypatch):
    clock = ToyClock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


@pytest.fixture
def calls():
    return []


@pytest.fixture
def here(registry, toy_spec, make_platform, clock, calls, monkeypatch, tmp_path):
    """A platform with three kernels: the band says one is best, the clock another; the third is the reference."""
    monkeypatch.setenv("TOKENSPEED_CACHE", str(tmp_path))
    monkeypatch.delenv(tuning.AUTOTUNE_VARIABLE, raising=False)
    monkeypatch.setitem(workloads._makers, "toy.copy", workloads._Maker(toy_workload, None))
    for name, band, seconds in (
        (ESTIMATED_BEST, Band.SPECIALISED, 3e-3),
        (MEASURED_BEST, Band.PORTABLE, 1e-3),
        ("reference_toy", Band.REFERENCE, 1e-4),
    ):
        solution = "reference" if band is Band.REFERENCE else name.split("_")[0]
        spec = toy_spec(name, band=band, solution=solution, tags=frozenset({"deterministic", "row_invariant"}))
        registry.register(spec, clock.kernel(seconds, calls, name), "test")
    with override_platform(make_platform()) as platform, use_registry(registry):
        yield platform


@pytest.fixture
def oracle(here, monkeypatch):
    """The process's oracle, a fresh one, with both kernels verified."""
    oracle = verified(SelectionOracle(), here, ESTIMATED_BEST, MEASURED_BEST)
    for module in (binding, selection):
        monkeypatch.setattr(module, "default_oracle", lambda: oracle)
    return oracle


def toy_bind(width=64, override=None):
    return bind("toy", "copy", SIGNATURE, {"width": width}, override=override)


def test_the_measured_order_decides_where_it_differs_from_the_estimate(oracle, calls):
    assert select("toy", "copy", SIGNATURE, {"width": 64}).spec.name == ESTIMATED_BEST
    assert calls == []
    bound = toy_bind()
    assert bound.spec.name == MEASURED_BEST
    assert [c.spec.name for c in bound.selection.ranked] == [MEASURED_BEST, ESTIMATED_BEST, "reference_toy"]
    assert "1000.0 us measured" in bound.selection.explain()
    assert "3000.0 us measured" in bound.selection.explain()
    assert "reference_toy" not in calls


def test_finalists_take_turns_and_the_median_counts(registry, oracle, clock, calls):
    toy_bind()
    timed = calls[2 * timing.WARM_RUNS :]
    assert timed == [ESTIMATED_BEST, MEASURED_BEST] * timing.RUNS
    slow_once = iter([1.0] * timing.WARM_RUNS + [9.0, 2.0, 1.0, 4.0, 3.0])

    def uneven(x, out):
        clock.now += next(slow_once)

    kernel = registry.kernels("toy", "copy")[0]
    times, _ = timing.time_kernels(
        [type(kernel)(kernel.spec, uneven, "test")], toy_workload(SIGNATURE, {"width": 8}, "decode", None), runs=5
    )
    # two seconds are the budget, of which the first run alone takes nine: the least number of runs is made
    assert times[kernel.spec.name] == [9.0, 2.0, 1.0]
    assert timing.medians(times) == {kernel.spec.name: 2.0}


def test_a_bucket_is_measured_once_and_sizes_share_one_up_to_a_power_of_two(oracle, calls):
    toy_bind(width=50)
    once = len(calls)
    assert toy_bind(width=64).spec.name == MEASURED_BEST
    assert len(calls) == once
    toy_bind(width=65)
    assert len(calls) == 2 * once


def test_the_cache_is_hit_by_the_next_process(registry, oracle, here, calls, monkeypatch):
    toy_bind()
    table = read_table(cache_path(current_environment(registry)))
    assert {m.kernel: m.seconds for m in table.measurements} == pytest.approx(
        {ESTIMATED_BEST: 3e-3, MEASURED_BEST: 1e-3}
    )
    assert {(m.operation, m.signature, m.bucket, m.runs) for m in table.measurements} == {
        ("toy.copy", "input=float32", "decode sunk=False width=64", timing.RUNS)
    }
    calls.clear()
    next_process = verified(SelectionOracle(), here, ESTIMATED_BEST, MEASURED_BEST)
    for module in (binding, selection):
        monkeypatch.setattr(module, "default_oracle", lambda: next_process)
    assert toy_bind().spec.name == MEASURED_BEST
    assert calls == []


def test_a_kernel_that_was_not_verified_here_is_no_finalist(oracle, here, calls):
    del oracle.verifications[here.key, MEASURED_BEST]
    assert toy_bind().spec.name == ESTIMATED_BEST
    assert calls == []  # one finalist leaves nothing to choose
    oracle.verifications.clear()
    with recording_selections() as selections:
        assert toy_bind().spec.name == ESTIMATED_BEST
    assert selections[0].doubts == f"its numerics were not verified on {here.key}"


def test_nothing_is_measured_where_it_must_not_be(oracle, calls, monkeypatch):
    with binding_objective("determinism"):
        assert toy_bind().spec.name == ESTIMATED_BEST
    assert toy_bind(override="b").spec.name == MEASURED_BEST
    oracle.agreed = True
    assert toy_bind().spec.name == ESTIMATED_BEST
    oracle.agreed = False
    monkeypatch.setenv(tuning.AUTOTUNE_VARIABLE, "0")
    assert toy_bind().spec.name == ESTIMATED_BEST
    assert calls == []


def test_the_cache_is_read_once_a_process(registry, oracle, here):
    toy_bind()
    cache_path(current_environment(registry)).write_text("damaged since")
    assert select("toy", "copy", SIGNATURE, {"width": 64}).spec.name == MEASURED_BEST
    oracle.own_tables.clear()
    with pytest.raises(TableError, match="not a usable latency table"):
        select("toy", "copy", SIGNATURE, {"width": 64})


@pytest.mark.parametrize(("switch", "best"), [("1", MEASURED_BEST), ("0", ESTIMATED_BEST)])
def test_switched_off_the_cache_is_not_read(registry, oracle, here, monkeypatch, switch, best):
    toy_bind()
    oracle.measurements.clear()
    oracle.own_tables.clear()
    monkeypatch.setenv(tuning.AUTOTUNE_VARIABLE, switch)
    assert select("toy", "copy", SIGNATURE, {"width": 64}).spec.name == best


def test_determinism_does_not_hang_on_what_was_measured(oracle):
    assert toy_bind().spec.name == MEASURED_BEST
    with binding_objective("determinism"):
        assert toy_bind().spec.name == ESTIMATED_BEST


def test_nothing_is_tuned_while_serving(oracle, calls):
    with serving(process_guard()):
        assert toy_bind().spec.name == ESTIMATED_BEST
    assert calls == []
    assert process_guard().violations() == {"bind toy.copy": 1, "tune toy.copy": 1}


def test_a_finalist_that_raises_is_named_loses_and_is_not_tried_again(registry, toy_spec, oracle, here, calls, caplog):
    def broken(x, out):
        raise RuntimeError("out of registers")

    registry.register(toy_spec("broken", band=Band.PLUGIN), broken, "test")
    verified(oracle, here, "broken")
    assert toy_bind().spec.name == MEASURED_BEST
    assert "tuning toy.copy: broken failed and is not measured: RuntimeError: out of registers" in caplog.text
    assert {key.kernel for key in oracle.measurements} == {ESTIMATED_BEST, MEASURED_BEST}
    once = len(calls)
    assert toy_bind().spec.name == MEASURED_BEST
    assert len(calls) == once


def test_a_cache_that_cannot_be_written_costs_the_next_start_only(oracle, monkeypatch, tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("TOKENSPEED_CACHE", str(blocked))
    assert toy_bind().spec.name == MEASURED_BEST
    assert "cannot keep the latencies that were measured" in caplog.text


def test_an_operation_without_workload_is_timed_on_its_largest_fitting_case(registry):
    from tokenspeed_kernel.ops.sampling import SAMPLING_SIGNATURE

    taken = workloads.workload_for("sampling.has_nan", SAMPLING_SIGNATURE, {}, "decode", admits=lambda traits: True)
    assert taken is not None
    assert taken.description.startswith("numeric case ")
    assert len(taken.arguments) == 2
    refused = workloads.workload_for("sampling.has_nan", SAMPLING_SIGNATURE, {}, "decode", admits=lambda traits: False)
    assert refused is None


def test_every_standard_workload_runs_on_its_reference(reference_registry):
    for operation in sorted(workloads._makers):
        family, mode = operation.split(".")
        kernel = reference_registry.reference(family, mode)
        traits = {name: t.example for name, t in reference_registry.operation(family, mode).traits.items()}
        signature = sorted(kernel.spec.signatures, key=str)[0]
        for phase in workloads.PHASES:
            work = workloads.workload_for(operation, signature, traits, phase, admits=lambda traits: True)
            times, failures = timing.time_kernels([kernel], work, runs=1)
            assert failures == {}
            assert list(times) == [kernel.spec.name]
            assert work.work.bytes > 0


def test_a_workload_that_fails_ends_no_start(oracle, monkeypatch, caplog):
    def broken(signature, traits, phase, bound):
        raise RuntimeError("no memory for the weight")

    monkeypatch.setitem(workloads._makers, "toy.copy", workloads._Maker(broken, None))
    assert toy_bind().spec.name == ESTIMATED_BEST
    assert "no workload of toy.copy (input=float32): RuntimeError: no memory for the weight" in caplog.text


def test_the_work_of_a_product_is_its_weight_and_its_rows():
    from tokenspeed_kernel.ops.gemm import linear_signature
    from tokenspeed_kernel.signature import WEIGHT_FORMATS

    traits = {"n": 64, "k": 256}
    exact = workloads.work_of("gemm.linear", linear_signature(WEIGHT_FORMATS["bfloat16"]), traits, "decode")
    assert exact == workloads.Work(bytes=64 * 256 * 2 + 4 * (64 + 256), operations=2 * 64 * 256)
    odd = workloads.work_of("gemm.linear", linear_signature(WEIGHT_FORMATS["gguf_q4_0"]), {"n": 1, "k": 257}, "decode")
    assert odd.bytes == 288 * 18 // 32 + 4 * (1 + 288)
    q4 = workloads.work_of("gemm.linear", linear_signature(WEIGHT_FORMATS["gguf_q4_0"]), traits, "decode")
    assert q4.bytes == 64 * 256 * 18 // 32 + 4 * (64 + 256)


def test_an_estimate_with_figures_says_seconds(registry, toy_spec, make_platform, monkeypatch):
    monkeypatch.setitem(
        workloads._makers, "toy.copy", workloads._Maker(toy_workload, lambda s, t, p: workloads.Work(24_000, 1))
    )
    registry.register(toy_spec("a"), lambda x, out: None, "test")
    picked = select(
        "toy", "copy", SIGNATURE, {"width": 64}, platform=make_platform(), registry=registry, oracle=SelectionOracle()
    )
    # 24 000 bytes over two cores of 12 GB/s take 1 us; a portable kernel reaches 0.3 of that
    assert picked.ranked[0].score.speed == "estimate 0.30 of the roofline, 3.3 us"
    unknown = make_platform("sm_90", vendor="nvidia")
    other = select(
        "toy", "copy", SIGNATURE, {"width": 64}, platform=unknown, registry=registry, oracle=SelectionOracle()
    )
    assert other.ranked[0].score.speed == "estimate 0.30"


def test_a_bucket_needs_a_known_phase():
    with pytest.raises(ValueError, match="phase 'warm' is unknown; use one of"):
        workloads.shape_bucket({}, "warm")
    assert workloads.shape_bucket({"k": 577, "causal": True, "n": 0}, "prefill") == "prefill causal=True k=1024 n=0"
