"""Traits: declared vocabularies, bounds and requests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_kernel.traits import (
    MultipleOf,
    OneOf,
    Range,
    TraitError,
    check_bounds,
    complete_request,
    flag_trait,
    one_of,
    refusal,
    size_trait,
)

VOCABULARY = {
    "head_dim": size_trait("elements of one head", 64),
    "causal": flag_trait("reads no later key", True),
    "sinks": flag_trait("has attention sinks", False, default=False),
}


@given(value=st.integers(-200, 200), divisor=st.integers(1, 32), low=st.integers(-50, 50), size=st.integers(0, 60))
def test_bounds_admit_what_they_say(value, divisor, low, size):
    assert MultipleOf(divisor).admits(value) == (value > 0 and value % divisor == 0)
    assert MultipleOf(divisor, 64).admits(value) == (0 < value <= 64 and value % divisor == 0)
    assert Range(low, low + size).admits(value) == (low <= value <= low + size)
    assert Range(low).admits(value) == (value >= low)
    assert one_of(low, low + size).admits(value) == (value in (low, low + size))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: OneOf(frozenset()), "non-empty frozenset"),
        (lambda: OneOf([1]), "use one_of"),
        (lambda: Range(5, 4), "is empty"),
        (lambda: MultipleOf(0), "at least 1"),
        (lambda: MultipleOf(8, 4), "is empty"),
    ],
)
def test_empty_bounds_cannot_be_built(build, message):
    with pytest.raises(TraitError, match=message):
        build()


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (
            {"head_dim": Range(1), "causal": one_of(True), "head_dims": Range(1)},
            "has no trait 'head_dims'; it declares",
        ),
        ({"head_dim": Range(1)}, "must bound trait 'causal'"),
        ({"head_dim": Range(1), "causal": Range(0, 1)}, "bounded by OneOf, not by"),
        ({"head_dim": one_of("64"), "causal": one_of(True)}, "'head_dim' of toy.op is int, got '64'"),
        ({"head_dim": Range(1), "causal": one_of(1)}, "'causal' of toy.op is bool, got 1"),
    ],
)
def test_a_spec_cannot_bound_what_is_not_declared_nor_skip_what_is(bounds, message):
    with pytest.raises(TraitError, match=message):
        check_bounds("toy.op", bounds, VOCABULARY)


@pytest.mark.parametrize(
    ("request_traits", "message"),
    [
        ({"head_dim": 64, "causal": True, "sink": False}, "has no trait 'sink'"),
        ({"head_dim": 64}, "must give trait 'causal'"),
        ({"head_dim": 64.0, "causal": True}, "is int, got 64.0"),
        ({"head_dim": True, "causal": True}, "is int, got True"),
    ],
)
def test_a_request_is_complete_and_typed(request_traits, message):
    with pytest.raises(TraitError, match=message):
        complete_request("toy.op", request_traits, VOCABULARY)


def test_an_old_kernel_is_not_chosen_for_a_trait_it_never_heard_of():
    bounds = {"head_dim": MultipleOf(16), "causal": one_of(True)}
    check_bounds("toy.op", bounds, VOCABULARY)
    plain = complete_request("toy.op", {"head_dim": 64, "causal": True}, VOCABULARY)
    assert plain["sinks"] is False
    assert refusal(bounds, plain, VOCABULARY) is None
    sunk = {**plain, "sinks": True}
    assert (
        refusal(bounds, sunk, VOCABULARY) == "sinks is True; this kernel does not bound sinks, so it takes False only"
    )
    assert refusal({**bounds, "sinks": one_of(True, False)}, sunk, VOCABULARY) is None
    assert refusal(bounds, {**plain, "head_dim": 40}, VOCABULARY) == "head_dim is 40; it must be a multiple of 16"
