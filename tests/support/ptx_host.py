"""A compiled kernel's own host code, run without a driver: it fills in the launch, ptx_machine does it.

CuTe DSL compiles the host's part too: it computes the grid, writes the TMA descriptors and calls the CUDA runtime.
Exported as an object and linked with a runtime that only reports launches, it runs on any machine.
"""

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from ptx_cluster import run
from ptx_machine import Block
from ptx_memory import Memory
from ptx_program import Program
from ptx_tensors import TensorMap

from tokenspeed_mla.ahead import KEEP, machine_code
from tokenspeed_mla.compilation import Variant, compile_variant

_RUNTIME = """
#include <stdint.h>
extern "C" {
static int (*report)(void *, void **);
void report_launches(int (*function)(void *, void **)) { report = function; }
int _cudaLaunchKernelEx(void *config, void *, void **arguments) { return report(config, arguments); }
int _cuKernelGetAttribute(int *, int, void *, int) { return 0; }
int _cudaDeviceGetAttribute(int *value, int, int) { *value = 0; return 0; }
int _cudaFuncSetAttribute(void *, int, int) { return 0; }
int _cudaGetDevice(int *device) { *device = 0; return 0; }
int _cudaKernelSetAttributeForDevice(void *, int, int, int) { return 0; }
int _cudaLibraryGetKernel(void **kernel, void *, void *) { *kernel = 0; return 0; }
int _cudaLibraryLoadData(void **library, ...) { *library = 0; return 0; }
}
"""
_Report = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))

_ATTRIBUTE_BYTES, _CLUSTER, _DEPENDENT = 72, 4, 6
"""Of a launch: bytes of a cudaLaunchAttribute, and the numbers of cudaLaunchAttributeClusterDimension and of
cudaLaunchAttributeProgrammaticStreamSerialization."""

shared_bytes = [0, 0]
"""The most that any block was given, and touched."""

tensor_columns = [0]
"""The most of tensor memory that any block touched."""

late_blocks: list[tuple[str, ...]] = [()]
"""What blocks are late with (ptx_machine)."""


def _link(folder: Path, *objects: Path) -> Path:
    """The objects with a runtime of their own, which they take before one that the compiler has loaded."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise RuntimeError("no C++ compiler (c++ or g++) is on the PATH")
    source, target = folder / "runtime.cpp", folder / "linked.so"
    source.write_text(_RUNTIME)
    subprocess.run([compiler, "-shared", "-fPIC", "-Wl,-Bsymbolic", "-o", target, *objects, source], check=True)
    return target


@cache
def _runtime() -> ctypes.CDLL:
    """The runtime alone, for the compiler, which looks its names up before it exports."""
    return ctypes.CDLL(str(_link(Path(tempfile.mkdtemp()))), mode=ctypes.RTLD_GLOBAL)


def _tensor_map(parameter: bytes) -> TensorMap:
    """A descriptor of three axes of 16-bit elements. Strides lie in 16 bytes each, extents and box less 1; which
    swizzle it asks for is taken for granted."""
    words = [int.from_bytes(parameter[place : place + 8], "little") for place in range(0, 128, 8)]
    low = 2**32 - 1
    strides = (2, 16 * (words[1] >> 32 | (words[3] & 0xF) << 32), 16 * (words[2] & low))
    extents = ((words[4] & low) + 1, (words[4] >> 32) + 1, (words[5] & low) + 1)
    box = ((words[6] >> 56) + 1, (words[7] & 0xFF) + 1, (words[7] >> 8 & 0xFF) + 1)
    return TensorMap(words[0], 2, extents, strides, box)


def _attributes(config: int) -> dict[int, tuple[int, int, int]]:
    """By its number, what begins the value of each attribute of a cudaLaunchConfig_t."""
    first, count = ctypes.c_uint64.from_address(config + 40).value, ctypes.c_uint32.from_address(config + 48).value
    places = (first + _ATTRIBUTE_BYTES * index for index in range(count))
    return {
        ctypes.c_uint32.from_address(place).value: tuple((ctypes.c_uint32 * 3).from_address(place + 8))
        for place in places
    }


class HostFunction:
    """A variant's host code. Called with the arguments of ``__call__`` of its kernel: addresses, numbers, and the
    stream, which is nothing here. ``lend`` says what memory a launch may touch."""

    def __init__(self, variant: Variant, lend: Callable[..., Memory]) -> None:
        _runtime()
        folder = Path(tempfile.mkdtemp())
        found = compile_variant(variant, f"{KEEP} --dump-dir {folder}")
        self.code, self.lend = machine_code(found), lend
        self.program = Program(self.code.ptx)
        found.export_to_c(str(folder), "kernel")
        header = (folder / "kernel.h").read_text()
        (prototype,) = re.findall(r"cute_dsl_kernel_wrapper\(([^)]*)\)", header)
        kinds = {"void": ctypes.c_void_p, "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float}
        kinds["cudaStream_t"] = ctypes.c_void_p
        self.kinds: list[Any] = [kinds[words.split()[0]] for words in prototype.split(", ")[1:]]
        library = ctypes.CDLL(str(_link(folder, folder / "kernel.o")))
        (name,) = set(re.findall(r"_mlir_kernel__mlir_ciface_\w+", header))
        self.function = library[name]
        self.report = library.report_launches

    def __call__(self, *arguments: int | float | None) -> None:
        memory = self.lend(*arguments)
        failed: list[BaseException] = []

        @_Report
        def launch(config: int, places: Any) -> int:
            try:
                self._launch(config, places, memory)
            except BaseException as error:  # ctypes would swallow it
                failed.append(error)
                return 1
            return 0

        self.report(launch)
        values = [kind(value) for kind, value in zip(self.kinds, arguments, strict=True)]
        status = ctypes.c_int32(-1)
        places = [ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in (*values, status)]
        self.function((ctypes.c_void_p * len(places))(*places), len(places))
        if failed:
            raise failed[0]
        assert status.value == 0, f"the host code ended with {status.value}"

    def _launch(self, config: int, places: Sequence[int], memory: Memory) -> None:
        """A cudaLaunchConfig_t, and the address of each parameter."""
        numbers = (ctypes.c_uint32 * 6).from_address(config)
        given = ctypes.c_uint64.from_address(config + 24).value
        parameters: list[bytes | TensorMap] = []
        for place, size in zip(places, self.program.parameter_bytes, strict=False):
            content = ctypes.string_at(place, size)
            parameters.append(_tensor_map(content) if size == 128 else content)
        attributes = _attributes(config)
        dependent = attributes.get(_DEPENDENT, (0,))[0] == 1
        assert dependent == self.program.waits_for_grid, "launched dependent, or waiting for the kernel before: both"
        cluster = max(attributes.get(_CLUSTER, (1,))[0], 1)
        shared_bytes[0] = max(shared_bytes[0], given)
        for z, y, x in product(range(numbers[2]), range(numbers[1]), range(0, numbers[0], cluster)):
            blocks = [
                Block(self.program, memory, parameters, (x + rank, y, z), numbers[3], given, late_blocks[0], rank)
                for rank in range(cluster)
            ]
            run(blocks)
            for block in blocks:
                shared_bytes[1] = max(shared_bytes[1], block.shared_used)
                tensor_columns[0] = max(tensor_columns[0], block.tensor.used)
