"""The registry: what does not fit its operation cannot be registered; page sizes come from the spec alone."""

import re

import pytest
from torch import float32

from tokenspeed_kernel.ops.kv_cache import attention_signature
from tokenspeed_kernel.page_sizes import kernel_page_size, kernel_page_sizes
from tokenspeed_kernel.registry import (
    Band,
    CapabilityRequirement,
    KernelSpec,
    Operation,
    RegistrationError,
    active_registry,
    global_registry,
    register_kernel,
    registering_from,
    use_registry,
)
from tokenspeed_kernel.signature import FLOAT32, FormatSignature
from tokenspeed_kernel.traits import MultipleOf, Range, one_of


def kernel(x, out):
    out.copy_(x)


def test_the_decorator_registers_and_returns_its_function(registry, toy_spec):
    with use_registry(registry), registering_from("some-package 1.2"):
        assert register_kernel(toy_spec("one"))(kernel) is kernel
    assert registry.kernel("one").fn is kernel
    assert registry.kernel("one").origin == "some-package 1.2"
    with use_registry(registry):
        register_kernel(toy_spec("two"))(kernel)
    assert registry.kernel("two").origin == kernel.__module__
    assert active_registry() is global_registry()
    assert "one" not in [k.spec.name for k in global_registry().kernels()]


def test_a_name_is_taken_once(registry, toy_spec):
    registry.register(toy_spec("one"), kernel, "first 1")
    with pytest.raises(RegistrationError, match="'one' is taken by one from first 1"):
        registry.register(toy_spec("one"), kernel, "second 1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "paste"}, r"no operation toy.paste; declared are \['toy.copy'\]"),
        ({"signatures": frozenset({FormatSignature.of(output=FLOAT32)})}, r"has roles \['output'\]; toy.copy has"),
        ({"traits": {"width": Range(1), "widht": Range(1)}}, "kernel 'k': toy.copy has no trait 'widht'"),
        ({"traits": {}}, "must bound trait 'width'"),
        ({"weight_preprocessor": lambda weight: weight}, "binds no weight"),
    ],
)
def test_a_kernel_fits_its_operation(registry, toy_spec, changes, message):
    with pytest.raises(RegistrationError, match=message):
        registry.register(toy_spec("k", **changes), kernel, "test")
    assert registry.kernels() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "two words"}, "without spaces"),
        ({"solution": ""}, "kernel solution ''"),
        ({"signatures": frozenset()}, "non-empty frozenset"),
        ({"signatures": [FormatSignature.of(input=FLOAT32)]}, "non-empty frozenset"),
        ({"band": 3}, "use a member of Band"),
        ({"band": Band.REFERENCE}, "go together"),
        ({"solution": "reference"}, "go together"),
    ],
)
def test_a_spec_is_checked_when_it_is_made(toy_spec, changes, message):
    with pytest.raises(RegistrationError, match=message):
        toy_spec(**{"name": "k", **changes})


def test_an_operation_may_be_declared_again_but_not_otherwise(registry):
    known = registry.operation("toy", "copy")
    registry.declare(known)
    with pytest.raises(RegistrationError, match="declared already, and differently"):
        registry.declare(Operation(family="toy", mode="copy", roles=frozenset({"other"}), arguments="x"))


def test_every_operation_of_this_package_has_one_reference(reference_registry):
    for operation in reference_registry.operations():
        reference = reference_registry.reference(operation.family, operation.mode)
        assert reference.spec.capability == CapabilityRequirement()
        plain = f"reference_{operation.family}_{operation.mode}"
        kernels = reference_registry.kernels(operation.family, operation.mode)
        names = {kernel.spec.name for kernel in kernels if kernel.spec.band is Band.REFERENCE}
        # Activations of four bits have a truth of their own: what is multiplied is what they were quantised to.
        assert plain in names and names <= {plain, f"{plain}_fp4"}


def test_an_operation_without_a_reference_says_so(registry):
    with pytest.raises(RegistrationError, match=r"toy.copy has no reference kernel"):
        registry.reference("toy", "copy")


def test_an_unknown_kernel_names_those_there_are(registry, toy_spec):
    registry.register(toy_spec("one"), kernel, "test")
    with pytest.raises(KeyError, match=r"no kernel 'two'; registered are \['one'\]"):
        registry.kernel("two")


@pytest.mark.parametrize(
    ("requirement", "platform", "reason"),
    [
        ({"vendors": frozenset({"nvidia"})}, {}, "runs on nvidia; this is cpu"),
        ({"features": frozenset({"avx512_bf16"})}, {}, "needs avx512_bf16; this cpu has avx512"),
        ({"features": frozenset({"avx2"})}, {}, None),
        ({"minimum_architecture": (9, 0)}, {}, "needs architecture from .9, 0.; this is None"),
        ({"minimum_architecture": (9, 0)}, {"architecture": (8, 9)}, "needs architecture from .9, 0.; this is .8, 9."),
        ({"maximum_architecture": (9, 0)}, {"architecture": (10, 0)}, "up to .9, 0.; this is .10, 0."),
        ({"minimum_architecture": (9, 0), "maximum_architecture": (10, 3)}, {"architecture": (10, 3)}, None),
        ({"minimum_driver": (580, 10)}, {"driver": (570, 99)}, "needs driver .580, 10. or newer"),
        ({"minimum_driver": (580, 10)}, {"driver": (580, 65, 6)}, None),
    ],
)
def test_capabilities_are_refused_with_a_reason(make_platform, requirement, platform, reason):

    found = CapabilityRequirement(**requirement).refusal(make_platform(**platform))
    assert found is None if reason is None else re.search(reason, found)


def test_page_sizes_are_what_the_spec_says(reference_registry):
    def add(name, bound):
        traits = {"head_dim": Range(1), "q_per_kv": Range(1), "causal": one_of(True), "kernel_page_size": bound}
        spec = KernelSpec(
            name=name,
            family="attention",
            mode="decode",
            solution="made_up",
            signatures=frozenset({attention_signature(float32)}),
            traits=traits,
            band=Band.PLUGIN,
        )
        reference_registry.register(spec, kernel, "test")

    add("fixed", one_of(64, 32))
    add("stepped", MultipleOf(128))
    add("ranged", Range(16, 256))
    assert kernel_page_size("fixed", reference_registry) == (32, 64)
    assert kernel_page_size("stepped", reference_registry) == (128,)
    assert kernel_page_size("ranged", reference_registry) == (16,)
    sizes = kernel_page_sizes(reference_registry)
    made_up = {name: size for name, size in sizes.items() if not name.startswith("reference_")}
    assert made_up == {"fixed": (32, 64), "ranged": (16,), "stepped": (128,)}
    assert sizes["reference_attention_decode"] == sizes["reference_attention_extend"] == (1,)
    assert "reference_norm_rms" not in sizes
    with pytest.raises(ValueError, match="reads no pages"):
        kernel_page_size("reference_norm_rms", reference_registry)
