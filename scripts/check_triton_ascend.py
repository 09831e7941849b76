#!/usr/bin/env python
"""Lowers the row kernels of the shared Triton layer for Ascend, without an NPU, and prints how far each comes.

    make lower-ascend            # in an environment of its own, for triton-ascend replaces triton
    make lower-ascend ALL=1      # products, mixtures and attention too

Two steps: triton-ascend makes linalg of a kernel (what its adapter cannot read is a shortcoming of that version), and,
where ascendnpu-ir is installed, bishengir-compile takes it to HIVM for the 910B3, with its memory planned. The last
step, hivmc, is part of CANN and is not run. Lowered is not right, and says nothing of speed. The exit status is 1 where
a kernel of LOWERED does not come through any more.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenspeed_kernel_triton import ahead_cases
from tokenspeed_kernel_triton.ahead import typed
from tokenspeed_kernel_triton.device import compiling_for
from tokenspeed_kernel_triton.loading import Launch

CHIP = "Ascend910B3"
TILES_OF = "gfx950"
"""The architecture whose tiles the launches have: Ascend has no entry of its own, and like AMD no TF32."""

BEFORE_HIVMC = "returning module before running external compiler"
"""What bishengir-compile says when everything but CANN's own last step is done."""

ROWS = ("row_launches", "sampling_launches")
OTHERS = ("product_launches", "mixture_launches", "grouped_launches", "latent_launches")

LOWERED = frozenset(
    {
        "rms, 8192 elements",
        "residual sum and rms, 8192 elements",
        "silu of a gate",
        "gelu_tanh of a gate",
        "clamped_swiglu of a gate",
        "clamped_silu of a gate",
        "sigmoid gate",
        "sum",
        "rows scaled",
        "penalties",
        "token mask",
        "log-probabilities",
        "NaN in a row",
    }
)
"""Kernels that both steps took with triton-ascend 3.2.0 and ascendnpu-ir 1.2.0."""


@dataclass(frozen=True)
class Outcome:
    """How far a kernel came; ``hivm`` is None where the compiler is not installed."""

    name: str
    linalg: str
    hivm: str | None

    @property
    def through(self) -> bool:
        return self.linalg == "yes" and self.hivm in ("yes", None)


def linalg_of(launch: Launch, backend: Any) -> str:
    """The kernel's linalg. Raises what triton-ascend raises, CalledProcessError where its adapter ends."""
    from triton._C.libtriton import ir
    from triton.compiler import ASTSource

    kernel = getattr(import_module(f"tokenspeed_kernel_triton.kernels.{launch.module}"), launch.function)
    signature, constants = {}, dict(launch.constants)
    for parameter, argument in zip(kernel.params, launch.arguments, strict=False):
        if type(argument) is int and argument == 1 and not parameter.do_not_specialize:
            constants[parameter.name] = 1
        else:
            signature[parameter.name] = typed(argument)
    options = backend.parse_options({"num_warps": launch.warps, "num_stages": launch.stages})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(kernel, signature, constants=constants)
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options)
    metadata = {"hash": launch.function, **vars(options)}
    text: str = stages["ttadapter"](stages["ttir"](module, metadata), metadata)
    return text


def hivm_outcome(linalg: str, compiler: Path) -> str:
    """ "yes", or the compiler's reason."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.mlir"
        source.write_text(linalg, encoding="utf-8")
        command = [str(compiler), str(source), f"--target={CHIP}", "--enable-hfusion-compile=true"]
        command += ["--enable-hivm-compile=true", "--enable-triton-kernel-compile=true", "-o", f"{folder}/kernel"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode == 0 or BEFORE_HIVMC in ended.stderr:
        return "yes"
    reasons = [line for line in ended.stderr.splitlines() if "error:" in line]
    return reasons[-1].partition("error:")[2].partition("!")[0].strip() if reasons else f"status {ended.returncode}"


def reason_of(error: Exception) -> str:
    """One line of what triton-ascend says of a kernel that it does not take."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode(errors="replace").splitlines()
        wanted = [line for line in lines if "error:" in line or "Assertion" in line]
        text = (
            re.split("error:|Assertion", wanted[0])[-1]
            if wanted
            else f"the adapter ended with status {error.returncode}"
        )
    else:
        text = str(error.__cause__ or error).splitlines()[-1]
    return text.strip()[:100]


def outcomes(groups: Sequence[str]) -> Iterator[Outcome]:
    """One for each launch of the groups of ahead_cases."""
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget

    backend = backends["ascend"].compiler(GPUTarget("npu", CHIP, 0))
    found = find_spec("ascendnpuir")
    compiler = None if found is None or found.origin is None else Path(found.origin).parent / "bin/bishengir-compile"
    for group in groups:
        for name, launch in getattr(ahead_cases, group)():
            try:
                linalg = linalg_of(launch, backend)
            except Exception as error:  # whatever a compiler raises is its answer
                yield Outcome(name, reason_of(error), "" if compiler else None)
            else:
                yield Outcome(name, "yes", None if compiler is None else hivm_outcome(linalg, compiler))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every kernel of the layer, not the row kernels alone")
    arguments = parser.parse_args(argv)
    lost = []
    print(f"| kernel | linalg | HIVM for {CHIP} |\n|---|---|---|")
    with compiling_for(TILES_OF):
        for outcome in outcomes((*ROWS, *OTHERS) if arguments.all else ROWS):
            print(f"| {outcome.name} | {outcome.linalg} | {outcome.hivm or '–'} |", flush=True)
            if outcome.name in LOWERED and not outcome.through:
                lost.append(outcome.name)
    if lost:
        print(f"lowered before and not now: {', '.join(lost)}", file=sys.stderr)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
