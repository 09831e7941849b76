"""Formats: what is legal can be built, hashed and compared; what is not says why and what would be right."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_kernel.signature import (
    FLOAT16,
    FLOAT32,
    FORMATS,
    SCALE_DTYPES,
    SCALE_GRANULARITIES,
    WEIGHT_FORMATS,
    FormatError,
    FormatSignature,
    ScaleFormat,
    TensorFormat,
)

block_shapes = st.lists(st.integers(1, 256), min_size=1, max_size=2).map(tuple)
all_storage = sorted(set().union(*(rule.storage for rule in FORMATS.values())))


@given(
    dtype=st.sampled_from(sorted(SCALE_DTYPES)),
    granularity=st.sampled_from(SCALE_GRANULARITIES),
    fixed=st.none() | block_shapes,
    dynamic=st.none() | block_shapes,
)
def test_a_block_scale_takes_exactly_one_shape_and_the_others_none(dtype, granularity, fixed, dynamic):
    given_shapes = (fixed is not None) + (dynamic is not None)
    if given_shapes == (1 if granularity == "block" else 0):
        scale = ScaleFormat(dtype, granularity, fixed, dynamic)
        assert hash(scale) == hash(ScaleFormat(dtype, granularity, fixed, dynamic))
    else:
        with pytest.raises(FormatError, match="block_shape"):
            ScaleFormat(dtype, granularity, fixed, dynamic)


@given(
    storage=st.sampled_from(all_storage),
    name=st.sampled_from(sorted(FORMATS)),
    scale=st.none() | st.just(ScaleFormat("float32", "tensor")),
)
def test_a_tensor_format_is_legal_exactly_where_its_rule_says_so(storage, name, scale):
    rule = FORMATS[name]
    legal = storage in rule.storage and (scale is not None) == (rule.scale == "required")
    if legal:
        assert TensorFormat(storage, name, scale) == TensorFormat(storage, name, scale)
    else:
        with pytest.raises(FormatError):
            TensorFormat(storage, name, scale)


@given(st.permutations(["input", "weight", "output", "kv"]))
def test_a_signature_does_not_depend_on_the_order_its_roles_are_given_in(roles):
    built = FormatSignature.of(**dict.fromkeys(roles, FLOAT32))
    assert built == FormatSignature.of(kv=FLOAT32, input=FLOAT32, output=FLOAT32, weight=FLOAT32)
    assert len({built, FormatSignature.of(**dict.fromkeys(sorted(roles), FLOAT32))}) == 1
    assert [role for role, _ in built] == sorted(roles)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ScaleFormat("int3", "tensor"), "scale dtype 'int3' is unknown; use one of"),
        (lambda: ScaleFormat("float32", "galaxy"), "granularity 'galaxy' is unknown; use one of"),
        (lambda: ScaleFormat("float32", "block"), "exactly one of block_shape and dynamic_block_shape, got 0"),
        (lambda: ScaleFormat("float32", "block", (0, 128)), "positive integers"),
        (lambda: ScaleFormat("float32", "block", None, ()), "positive integers"),
        (lambda: ScaleFormat("float32", "block", [128]), "must be a non-empty tuple"),
        (lambda: TensorFormat("float8_e4m3fn", "fp8"), "without a scale is ambiguous"),
        (lambda: TensorFormat("float32", "fp8", ScaleFormat("float32", "tensor")), "cannot be stored as 'float32'"),
        (lambda: TensorFormat("float32", "dense", ScaleFormat("float32", "tensor")), "has no scale; drop"),
        (lambda: TensorFormat("uint8", "gguf_q4_1", ScaleFormat("float16", "tensor")), "inside its blocks; drop"),
        (lambda: TensorFormat("int8", "int8", "float32"), "must be a ScaleFormat"),
        (lambda: TensorFormat("float32", "sparse"), "format 'sparse' is unknown"),
        (lambda: FormatSignature(()), "non-empty tuple"),
        (lambda: FormatSignature((("a", FLOAT32), ("a", FLOAT16))), "occurs more than once"),
        (lambda: FormatSignature((("b", FLOAT32), ("a", FLOAT16))), "not sorted; use FormatSignature.of"),
        (lambda: FormatSignature.of(a=(FLOAT32, FLOAT16)), "alternatives are several signatures"),
        (lambda: FormatSignature((("a", FLOAT32, 1),)), "is not a .role, TensorFormat. pair"),
    ],
)
def test_what_is_illegal_says_what_would_be_right(build, message):
    with pytest.raises(FormatError, match=message):
        build()


def test_every_format_prints_apart():
    scales = [ScaleFormat("float32", "tensor"), ScaleFormat("float32", "channel"), ScaleFormat("float16", "token")]
    scales += [ScaleFormat("float32", "block", (128, 128)), ScaleFormat("float32", "block", None, (1, 128))]
    formats = [TensorFormat("int8", "int8", scale) for scale in scales] + list(WEIGHT_FORMATS.values())
    for one, other in itertools.combinations(formats, 2):
        assert one != other
        assert str(one) != str(other)


def test_a_role_is_looked_up_by_name():
    signature = FormatSignature.of(input=FLOAT32, kv=FLOAT16)
    assert signature["kv"] is FLOAT16
    with pytest.raises(KeyError, match="no role 'weight'"):
        signature["weight"]
