"""Selection: the steps, the rank, and the words of explain."""

import itertools

import pytest

from tokenspeed_kernel.oracle import MeasurementKey, SelectionOracle, VerificationRecord
from tokenspeed_kernel.registry import Band, CapabilityRequirement, KernelRegistry
from tokenspeed_kernel.selection import SelectionError, select
from tokenspeed_kernel.signature import BFLOAT16, FLOAT32, FormatSignature
from tokenspeed_kernel.traits import MultipleOf, Range, TraitError, one_of

SIGNATURE = FormatSignature.of(input=FLOAT32)
BOTH = frozenset({"deterministic", "row_invariant"})


def kernel(x, out):
    out.copy_(x)


def filled(registry, *specs):
    for spec in specs:
        registry.register(spec, kernel, "test")
    return registry


def chosen(registry, platform, oracle=None, **keywords):
    keywords.setdefault("traits", {"width": 64})
    traits = keywords.pop("traits")
    return select(
        "toy",
        "copy",
        SIGNATURE,
        traits,
        platform=platform,
        registry=registry,
        oracle=oracle or SelectionOracle(),
        **keywords,
    )


def record(name, platform, *, passed=True, version="1", error=0.1):
    return VerificationRecord(name, version, platform.key, passed, error, 10)


def oracle_with(*records):
    oracle = SelectionOracle()
    for one in records:
        oracle.add_verification(one)
    return oracle


def test_each_step_drops_with_its_reason(registry, toy_spec, make_platform):
    filled(
        registry,
        toy_spec("runs"),
        toy_spec("formats", signatures=frozenset({FormatSignature.of(input=BFLOAT16)})),
        toy_spec("vendor", capability=CapabilityRequirement(vendors=frozenset({"amd"}))),
        toy_spec("narrow", traits={"width": Range(1, 32)}),
        toy_spec("sunken", traits={"width": Range(1), "sunk": one_of(True)}),
    )
    selection = chosen(registry, make_platform())
    assert selection.spec.name == "runs"
    assert selection.fn is kernel
    assert {c.spec.name: c.dropped_at for c in selection.dropped} == {
        "formats": "signature",
        "vendor": "platform",
        "narrow": "traits",
        "sunken": "traits",
    }
    assert selection.explain() == "\n".join(
        [
            "toy.copy",
            "  formats    input=float32",
            "  traits     sunk=False, width=64",
            "  platform   cpu-x86_64-avx512",
            "  objective  latency",
            "-> 1. runs [portable]  estimate 0.30; workspace 0 B; numerics not verified here",
            "   -  formats: dropped at signature: takes (input=bfloat16)",
            "   -  narrow: dropped at traits: width is 64; it must be 1 to 32",
            "   -  sunken: dropped at traits: sunk is False; it must be one of True",
            "   -  vendor: dropped at platform: runs on amd; this is cpu",
        ]
    )


def test_the_rank_does_not_depend_on_the_order_of_registration(toy_spec, make_platform, registry):
    specs = [
        toy_spec("reference_toy", solution="reference", band=Band.REFERENCE),
        toy_spec("portable"),
        toy_spec("b_fast", band=Band.PERFORMANT),
        toy_spec("a_fast", band=Band.PERFORMANT),
    ]
    operation = registry.operation("toy", "copy")
    for order in itertools.permutations(specs):
        fresh = KernelRegistry()
        fresh.declare(operation)
        ranked = chosen(filled(fresh, *order), make_platform()).ranked
        assert [c.spec.name for c in ranked] == ["a_fast", "b_fast", "portable", "reference_toy"]


def test_verified_numerics_come_before_everything_but_the_reference_stays_last(registry, toy_spec, make_platform):
    platform = make_platform()
    filled(
        registry,
        toy_spec("reference_toy", solution="reference", band=Band.REFERENCE),
        toy_spec("portable"),
        toy_spec("fast", band=Band.SPECIALISED),
    )
    oracle = oracle_with(record("portable", platform))
    oracle.measurements[MeasurementKey(platform.key, "fast", "1", str(SIGNATURE), "decode sunk=False width=64")] = 1e-6
    selection = chosen(registry, platform, oracle)
    assert [c.spec.name for c in selection.ranked] == ["portable", "fast", "reference_toy"]
    assert "verified, error 0.10 of bound" in selection.explain()
    assert "1.0 us measured" in selection.explain()


def test_a_record_counts_only_for_its_version_and_platform(registry, toy_spec, make_platform):
    here, elsewhere = make_platform("avx512"), make_platform("avx2")
    filled(registry, toy_spec("a"), toy_spec("b", version="2"))
    assert chosen(registry, here, oracle_with(record("b", here, version="2"))).spec.name == "b"
    assert chosen(registry, here, oracle_with(record("b", here, version="1"))).spec.name == "a"
    assert chosen(registry, here, oracle_with(record("b", elsewhere, version="2"))).spec.name == "a"


def test_a_kernel_found_wrong_here_is_dropped(registry, toy_spec, make_platform):
    platform = make_platform()
    filled(registry, toy_spec("wrong", band=Band.PLUGIN), toy_spec("right"))
    selection = chosen(registry, platform, oracle_with(record("wrong", platform, passed=False)))
    assert selection.spec.name == "right"
    assert selection.dropped[0].dropped_at == "numerics"
    other = make_platform("avx2")
    assert chosen(registry, other, oracle_with(record("wrong", platform, passed=False))).spec.name == "wrong"


def test_a_measurement_comes_before_an_estimate_then_the_faster(registry, toy_spec, make_platform):
    platform = make_platform()
    filled(registry, toy_spec("estimated", band=Band.PLUGIN), toy_spec("slow"), toy_spec("quick"))
    oracle = SelectionOracle()
    for name, decode, prefill in (("slow", 2e-6, 1e-6), ("quick", 1e-6, 3e-6)):
        oracle.measurements[MeasurementKey(platform.key, name, "1", str(SIGNATURE), "decode sunk=False width=64")] = (
            decode
        )
        oracle.measurements[MeasurementKey(platform.key, name, "1", str(SIGNATURE), "prefill sunk=False width=64")] = (
            prefill
        )
    assert [c.spec.name for c in chosen(registry, platform, oracle).ranked] == ["quick", "slow", "estimated"]
    by_throughput = chosen(registry, platform, oracle, objective="throughput")
    assert [c.spec.name for c in by_throughput.ranked] == ["slow", "quick", "estimated"]


def test_the_smaller_workspace_then_the_band_then_the_name_break_ties(registry, toy_spec, make_platform):
    filled(
        registry,
        toy_spec("a_large", band=Band.SPECIALISED, workspace=lambda traits: traits["width"] * 4),
        toy_spec("c_small", band=Band.SPECIALISED),
        toy_spec("d_plugin", band=Band.PLUGIN),
        toy_spec("b_small", band=Band.SPECIALISED),
    )
    selection = chosen(registry, make_platform())
    assert [c.spec.name for c in selection.ranked] == ["d_plugin", "b_small", "c_small", "a_large"]
    assert selection.ranked[-1].score.memory == 256


def test_objectives(registry, toy_spec, make_platform):
    filled(
        registry,
        toy_spec("fast", band=Band.PLUGIN, tags=frozenset({"deterministic"})),
        toy_spec("steady", band=Band.PERFORMANT, tags=BOTH),
        toy_spec("everywhere"),
    )
    assert chosen(registry, make_platform()).spec.name == "fast"
    assert chosen(registry, make_platform(), objective="portability").spec.name == "everywhere"
    steady = chosen(registry, make_platform(), objective="determinism")
    assert [c.spec.name for c in steady.ranked] == ["steady"]
    assert {c.spec.name: c.reason for c in steady.dropped} == {
        "fast": "does not promise row_invariant",
        "everywhere": "does not promise deterministic, row_invariant",
    }
    with pytest.raises(ValueError, match="objective 'speed' is unknown; use one of"):
        chosen(registry, make_platform(), objective="speed")


def test_where_nothing_can_run_every_candidate_is_told(registry, toy_spec, make_platform):
    filled(registry, toy_spec("a", traits={"width": MultipleOf(128)}), toy_spec("b", traits={"width": Range(65)}))
    with pytest.raises(SelectionError) as caught:
        chosen(registry, make_platform())
    assert "no kernel can run this" in str(caught.value)
    assert "a: dropped at traits: width is 64; it must be a multiple of 128" in str(caught.value)
    assert "b: dropped at traits: width is 64; it must be at least 65" in str(caught.value)


@pytest.mark.parametrize("traits", [{}, {"width": 64, "depth": 1}, {"width": "64"}])
def test_a_request_with_a_wrong_trait_is_an_error_not_a_pass(registry, toy_spec, make_platform, traits):
    filled(registry, toy_spec("a"))
    with pytest.raises(TraitError):
        chosen(registry, make_platform(), traits=traits)
