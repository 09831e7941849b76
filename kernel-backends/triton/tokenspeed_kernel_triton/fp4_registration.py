"""Registers the products of four bits, for devices whose matrix instructions take blocks with scales. Imports no
Triton."""

from dataclasses import dataclass

from tokenspeed_kernel.ops.activation import GATED_ACTIVATIONS
from tokenspeed_kernel.ops.gemm import linear_signature
from tokenspeed_kernel.ops.moe import experts_signature
from tokenspeed_kernel.platform import PlatformInfo
from tokenspeed_kernel.registry import Band, KernelFunction, KernelSpec, register_kernel
from tokenspeed_kernel.signature import WEIGHT_FORMATS, FormatSignature
from tokenspeed_kernel.traits import Range, TraitBound, one_of
from tokenspeed_kernel_triton import fp4
from tokenspeed_kernel_triton.requirement import TritonRequirement, interpreted

SOLUTION = "triton_fp4"


@dataclass(frozen=True, kw_only=True)
class BlockScaledRequirement(TritonRequirement):
    """Instructions that multiply e2m1 by e2m1 with scales of blocks: NVIDIA from sm_100 on; with e8m0 scales
    (``amd``) gfx950 too."""

    amd: bool

    def refusal(self, platform: PlatformInfo) -> str | None:
        """Why ``platform`` does not do, or None where it does."""
        reason = super().refusal(platform)
        if reason is not None or interpreted():
            return reason
        if platform.vendor == "amd" and not (self.amd and platform.isa == "gfx950"):
            return f"multiplies four bits by four bits; {platform.isa} has no such instruction for these scales"
        if platform.vendor == "nvidia" and (platform.architecture is None or platform.architecture < (10, 0)):
            return (
                f"multiplies four bits by four bits; needs architecture from (10, 0), this is {platform.architecture}"
            )
        return None


def _register(
    operation: str, name: str, kernel: KernelFunction, signature: FormatSignature, traits: dict[str, TraitBound]
) -> None:
    family, mode = operation.split(".")
    spec = KernelSpec(
        name=f"triton_{family}_{mode}_{name}",
        family=family,
        mode=mode,
        solution=SOLUTION,
        capability=BlockScaledRequirement(amd=name == "mxfp4"),
        signatures=frozenset({signature}),
        traits={**traits, "activations": one_of("fp4")},
        band=Band.PORTABLE,
        tags=frozenset({"deterministic", "compiled_only"}),
    )
    register_kernel(spec)(kernel)


def register_fp4() -> None:
    """Registers them: a kernel a format, for AMD multiplies one of the two only."""
    mixture: dict[str, TraitBound] = {
        "hidden": Range(1),
        "intermediate": Range(1),
        "activation": one_of(*GATED_ACTIVATIONS),
        "biased": one_of(False, True),
    }
    for name, weight in (("nvfp4", "nvfp4"), ("mxfp4", "gguf_mxfp4")):
        stored = WEIGHT_FORMATS[weight]
        _register("gemm.linear", name, fp4.make_linear, linear_signature(stored), {"n": Range(0), "k": Range(1)})
        _register("moe.experts", name, fp4.make_experts, experts_signature(stored, stored), mixture)
