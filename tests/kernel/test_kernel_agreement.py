"""Ranks: rank 0's latencies decide everywhere, or nobody starts."""

import json

import pytest
from kernel_toys import SIGNATURE, verified

from tokenspeed_kernel.oracle import MeasurementKey, SelectionOracle, VerificationRecord
from tokenspeed_kernel.rank_agreement import AgreementError, adopt_choices, export_choices
from tokenspeed_kernel.registry import Band, KernelRegistry
from tokenspeed_kernel.selection import select

BUCKET = "decode sunk=False width=64"


def kernel(x, out):
    out.copy_(x)


@pytest.fixture
def ranks(registry, toy_spec, make_platform):
    """Makes (registry, oracle) of a rank that measured these seconds."""

    def make(**seconds):
        own = KernelRegistry()
        own.declare(registry.operation("toy", "copy"))
        oracle = verified(SelectionOracle(), make_platform(), *seconds)
        for name, value in seconds.items():
            own.register(toy_spec(name), kernel, "test")
            if value is not None:
                oracle.measurements[MeasurementKey(make_platform().key, name, "1", str(SIGNATURE), BUCKET)] = value
        return own, oracle

    return make


def chosen(rank, platform):
    registry, oracle = rank
    found = select("toy", "copy", SIGNATURE, {"width": 64}, platform=platform, registry=registry, oracle=oracle)
    return found.spec.name


def carried(document):
    """As it comes out at the other end of whatever carries it."""
    return json.loads(json.dumps(document))


def test_a_rank_that_measured_otherwise_chooses_as_rank_0(ranks, make_platform):
    platform = make_platform()
    first, second, third = ranks(a=2e-6, b=1e-6), ranks(a=1e-6, b=2e-6), ranks(a=1e-6, b=None)
    assert (chosen(first, platform), chosen(second, platform), chosen(third, platform)) == ("b", "a", "a")
    document = carried(export_choices(first[1], first[0], platform))
    for registry, oracle in (second, third):
        adopt_choices(document, oracle, registry, platform)
        assert chosen((registry, oracle), platform) == "b"
        assert oracle.measurements == first[1].measurements
        assert oracle.agreed
    assert first[1].agreed


def test_measurements_of_other_platforms_are_nobodys_business(ranks, make_platform):
    platform = make_platform()
    first, second = ranks(a=2e-6), ranks(a=1e-6)
    elsewhere = MeasurementKey("cpu-x86_64-avx2", "a", "1", str(SIGNATURE), BUCKET)
    first[1].measurements[elsewhere] = 5.0
    second[1].measurements[elsewhere] = 7.0
    adopt_choices(carried(export_choices(first[1], first[0], platform)), second[1], second[0], platform)
    here = MeasurementKey(platform.key, "a", "1", str(SIGNATURE), BUCKET)
    assert second[1].measurements == {here: 2e-6, elsewhere: 7.0}


def test_ranks_that_cannot_agree_say_in_what_and_change_nothing(ranks, make_platform, toy_spec):
    platform = make_platform()
    first = ranks(a=2e-6, b=1e-6)
    document = carried(export_choices(first[1], first[0], platform))

    def refused(rank, match, on=platform, what=document):
        before = dict(rank[1].measurements)
        with pytest.raises(AgreementError, match=match):
            adopt_choices(what, rank[1], rank[0], on)
        assert rank[1].measurements == before
        assert not rank[1].agreed

    refused(
        ranks(a=1e-6, b=1e-6), "rank 0 runs on cpu-x86_64-avx512, this rank on cpu-x86_64-avx2", make_platform("avx2")
    )
    refused(ranks(a=1e-6), "kernel 'b': rank 0 has and this rank has not; install the same packages")
    refused(ranks(a=1e-6, b=1e-6, c=1e-6), "kernel 'c': this rank has and rank 0 has not")
    refused(ranks(a=1e-6, b=1e-6), "rank 0 speaks format 7, this rank 1", what={**document, "format": 7})
    unlike = ranks(a=1e-6)
    unlike[0].register(toy_spec("b", band=Band.PLUGIN), kernel, "test")
    verified(unlike[1], platform, "b")
    refused(unlike, "kernel 'b': another code or specification than on rank 0")
    unverified = ranks(a=1e-6, b=1e-6)
    unverified[1].add_verification(VerificationRecord("b", "1", platform.key, False, 9.0, 3))
    refused(unverified, "kernel 'b': another verification record than on rank 0")
