"""Compiles a launch for an architecture that need not be here, and says what of the device it takes.

What is compiled is what the first call on such a device would compile: the same argument types, the same constants, the
same assumptions about alignment. Compiling does not check shared memory and says nothing of spills; ``Compiled`` has
both, for tests and for the table in docs/design/triton-kernels.md.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tokenspeed_kernel_triton.configs import LANES, REGISTERS, SHARED_MEMORY
from tokenspeed_kernel_triton.loading import Launch, device_code

_DTYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}
_ALIGNED = 16

MOST_THREADS, MOST_BLOCKS = 2048, 32
"""Of one processor, on every architecture here."""


@dataclass(frozen=True)
class Compiled:
    """What a block of a compiled kernel takes.

    Attributes:
        shared: bytes of shared memory.
        registers: of a thread; on AMD vector and accumulation registers together.
        spilled: bytes of local memory that a thread spills to.
        products: matrix instructions in the code.
        assembly: PTX or AMD's assembly.
    """

    shared: int
    registers: int
    spilled: int
    products: int
    assembly: str


def resident_blocks(compiled: Compiled, warps: int, architecture: str) -> int:
    """How many blocks of a kernel one processor holds at a time, by its registers, shared memory and threads; 0 where
    one is too large."""
    threads = warps * LANES[architecture]
    by_threads = MOST_THREADS // threads
    by_registers = REGISTERS[architecture] // (max(1, compiled.registers) * threads)
    by_shared = SHARED_MEMORY[architecture] // max(1, compiled.shared)
    return min(by_threads, by_registers, by_shared, MOST_BLOCKS)


def typed(argument: Any) -> str:
    """Triton's name of an argument's type."""
    if isinstance(argument, torch.Tensor):
        return "*" + _DTYPES[argument.dtype]
    if isinstance(argument, float):
        return "fp32"
    return "i64" if abs(int(argument)) > 2**31 - 1 else "i32"


def _aligned(argument: Any, parameter: Any) -> bool:
    """Whether a first call would compile for a multiple of 16. Tensors count as aligned: allocators align them."""
    if isinstance(argument, float) or parameter.do_not_specialize:
        return False
    if isinstance(argument, torch.Tensor):
        return not parameter.do_not_specialize_on_alignment
    return int(argument) % _ALIGNED == 0


def compile_ahead(launch: Launch, architecture: str) -> Compiled:
    """Compiles the kernel of a launch (its tensors may lie on the device "meta"). Raises what Triton raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(device_code(launch.module), launch.function)
    signature: dict[str, str] = {}
    constants: dict[str, Any] = dict(launch.constants)
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, (parameter, argument) in enumerate(zip(kernel.params, launch.arguments, strict=False)):
        if isinstance(argument, int) and argument == 1 and not parameter.do_not_specialize:
            constants[parameter.name] = 1
            continue
        signature[parameter.name] = typed(argument)
        if _aligned(argument, parameter):
            attributes[(index,)] = [["tt.divisibility", _ALIGNED]]
    full = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    backend, chip = ("hip", architecture) if architecture.startswith("gfx") else ("cuda", int(architecture[3:]))
    built = triton.compile(
        ASTSource(kernel, full, constexprs=constants, attrs=attributes),
        target=GPUTarget(backend, chip, LANES[architecture]),
        options={
            "num_warps": launch.warps,
            "num_stages": launch.stages,
            **launch.options(architecture),
        },
    )
    return _of_amd(built) if backend == "hip" else _of_nvidia(built)


def _look_into(cubin: bytes, *options: str) -> str:
    """What NVIDIA's cuobjdump, which Triton brings along, says of the code."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _of_nvidia(built: Any) -> Compiled:
    usage = _look_into(built.asm["cubin"], "--dump-resource-usage")
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    frame = found["STACK"] + found["LOCAL"]
    # a frame may be there for its alignment alone
    if frame and not re.search(r"\bSTL\b", _look_into(built.asm["cubin"], "--dump-sass")):
        frame = 0
    text = built.asm["ptx"]
    products = len(re.findall(r"wgmma\.mma_async|tcgen05\.mma\.|mma\.sync", text))
    return Compiled(built.metadata.shared, found["REG"], frame, products, text)


def _of_amd(built: Any) -> Compiled:
    text = built.asm["amdgcn"]
    found = {name: int(value) for name, value in re.findall(r"\.(vgpr_count|private_segment_fixed_size): +(\d+)", text)}
    products = len(re.findall(r"v_mfma_|v_smfmac_", text))
    return Compiled(built.metadata.shared, found["vgpr_count"], found["private_segment_fixed_size"], products, text)
