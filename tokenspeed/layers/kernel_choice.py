"""Which kernel an engine's operations are bound to: what a configuration may say of it, and what was bound."""

import os
from collections.abc import Callable, Mapping

from tokenspeed.recipes.activation_type import auto_activations
from tokenspeed.recipes.model_config import CheckpointError
from tokenspeed.recipes.resolved import Activations
from tokenspeed_kernel.binding import Bound
from tokenspeed_kernel.fp4_rows import FP4_FORMATS
from tokenspeed_kernel.ops.gemm import ACTIVATIONS_VARIABLE
from tokenspeed_kernel.registry import KernelSpec

Kernel = Callable[..., None]
Around = Callable[[KernelSpec, Kernel], Kernel]
"""What a kernel is called through, made of its spec and itself; see device/graphs/dispatch.py."""

OPERATIONS = (
    "gemm.linear",
    "embedding.lookup",
    "norm.rms",
    "norm.fused_add_rms",
    "activation.silu_and_mul",
    "activation.clamped_swiglu",
    "activation.gelu_tanh_and_mul",
    "activation.scale_rows",
    "activation.sigmoid_gate",
    "activation.add",
    "moe.route",
    "moe.experts",
    "gemm.head_linear",
    "norm.gated_rms",
    "recurrent.causal_conv",
    "recurrent.gated_delta",
    "attention.gqa_prologue",
    "attention.decode",
    "attention.extend",
    "attention.mla_prologue",
    "attention.mla_decode",
    "attention.mla_extend",
    "attention.mla_extend_expanded",
    "attention.index_prologue",
    "attention.index_select",
    "attention.mla_selected",
    "attention.write",
    "attention.compress",
    "attention.merge_partials",
    "rotary.apply",
    "attention.apply_sinks",
    "hyper.begin",
    "hyper.mix",
    "hyper.spread",
    "hyper.collapse",
    "activation.clamped_silu",
    "moe.table_route",
    "sampling.sample",
    "sampling.apply_penalties",
    "sampling.apply_token_mask",
    "sampling.logprobs",
    "sampling.has_nan",
)
"""What an engine binds; the keys that a configuration's ``kernels`` may name."""


class KernelChoice:
    """One engine's choice of kernels.

    ``activations``: what products may round their inputs to; "auto" follows weight or cache, and ``device`` (see
    auto_activations). "fp4" counts for weights whose elements have four bits; the others are served as by "auto".
    TOKENSPEED_KERNEL_ACTIVATIONS goes before it. ``captured``: a device's graphs will hold the calls of decodes.
    ``around``: put around each kernel, where someone has to know of its calls.

    Attributes:
        chosen: operation to the kernel bound to it; several, joined by " + ", where weights of several formats differ.
    """

    def __init__(
        self,
        overrides: Mapping[str, str],
        *,
        activations: Activations = "auto",
        device: str = "cpu",
        captured: bool = False,
        around: Around | None = None,
    ) -> None:
        unknown = sorted(set(overrides) - set(OPERATIONS))
        if unknown:
            raise ValueError(f"kernels: {', '.join(unknown)} is no operation; operations are {', '.join(OPERATIONS)}")
        self._overrides = dict(overrides)
        self._activations = activations
        self._device = device
        self._captured = captured
        self._around = around
        self.chosen: dict[str, str] = {}
        self._specs: list[KernelSpec] = []

    @property
    def of_the_forward(self) -> tuple[KernelSpec, ...]:
        """Every kernel bound so far but those that sample."""
        return tuple(spec for spec in self._specs if spec.family != "sampling")

    def refuse_unused_activations(self, where: str) -> None:
        """Raises CheckpointError where activations of four bits were asked for and no weight of ``where`` takes them.

        Call it once everything is bound.
        """
        if self._asked == "fp4" and not any(_takes_fp4(spec) for spec in self._specs):
            raise CheckpointError(
                f"{where}: activations are fp4, but no weight in it is stored as {' or '.join(sorted(FP4_FORMATS))}; "
                "take an NVFP4 or MXFP4 checkpoint of the model, or set activations to auto"
            )

    @property
    def _asked(self) -> str:
        return os.environ.get(ACTIVATIONS_VARIABLE) or self._activations

    def _keep(self, bound: Bound) -> Kernel:
        operation, name = bound.spec.operation, bound.spec.name
        self._specs.append(bound.spec)
        names = self.chosen.get(operation, "").split(" + ") if operation in self.chosen else []
        if name not in names:
            self.chosen[operation] = " + ".join([*names, name])
        kernel: Kernel = bound.fn
        return kernel if self._around is None else self._around(bound.spec, kernel)

    def _rounding(self, *stored: str) -> str | None:
        """What may be rounded to meet what is ``stored`` so; None leaves it to the environment."""
        if self._asked == "fp4":
            if stored[0] in FP4_FORMATS and len(set(stored)) == 1:
                return "fp4"
        elif os.environ.get(ACTIVATIONS_VARIABLE):
            return None
        if self._asked in ("auto", "fp4"):
            return auto_activations(stored[0], self._device)
        return self._activations


def _takes_fp4(spec: KernelSpec) -> bool:
    bound = spec.traits.get("activations")
    return bound is not None and bound.admits("fp4")
