"""Compiles the kernels, each variant once a process, and not at all where an earlier process did (compiled_store.py).

A variant is what the machine code depends on: architecture, element types, page size, and the compiler's version.
Batch, heads, queries, splits, lengths and strides are arguments of the code, so nothing is compiled anew when they
change.
"""

import contextlib
import io
import threading
import warnings
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from tokenspeed_kernel.serving_guard import note_compilation
from tokenspeed_mla.addressing import PAGE_SIZES, PAIR_ROWS, TILE_ROWS
from tokenspeed_mla.compiled_store import keep, key_of, load

HOPPER = "sm_90a"
"""Where wgmma exists, and nowhere else."""

BLACKWELLS = ("sm_100a", "sm_103a")
"""Where tcgen05 exists, and this compiler makes code for it. Version 4.8.1 with its CUDA 12.9 does not for sm_107a:
"Unsupported GPU architecture"."""

ATTENDING = (HOPPER, *BLACKWELLS)
"""The architectures that there are a decode and a prefill for."""

_INDEPENDENT = ("sm_80", "sm_86", "sm_87", "sm_89")
"""Where a kernel begins when the one before it has ended, and not before."""

OPTIONS = "--warnings"
ELEMENTS = (torch.bfloat16, torch.float16)
CACHED_BYTES = torch.float8_e4m3fn
"""What a cache of 8 bits has."""

OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)


class CompileError(RuntimeError):
    """A kernel that the compiler refused, or had a warning for: warnings are errors."""


@dataclass(frozen=True)
class Variant:
    """The key of the cache of compiled kernels.

    Attributes:
        kernel: "decode", "merge" or "prefill".
        architecture: such as "sm_90a".
        element: of queries and cache, or of queries, keys and values; None for the merge.
        output: dtype of the output.
        page_size: tokens of a page; 0 but for the decode.
        compiler: version of nvidia-cutlass-dsl.
        causal: whether the prefill has a mask.
        tile_rows: of the decode, rows of a tile.
        cached: of the decode, elements of the cache, where they are other than ``element``.
    """

    kernel: str
    architecture: str
    element: torch.dtype | None
    output: torch.dtype
    page_size: int
    compiler: str
    causal: bool = False
    tile_rows: int = 0
    cached: torch.dtype | None = None

    def __str__(self) -> str:
        parts = [f"mla {self.kernel}", self.architecture]
        parts += [str(dtype).removeprefix("torch.") for dtype in (self.element, self.output) if dtype is not None]
        parts += [f"page {self.page_size}"] * bool(self.page_size) + ["causal"] * self.causal
        parts += [f"tile {self.tile_rows}"] * bool(self.tile_rows)
        parts += [f"cache {self.cached}".replace("torch.", "")] * (self.cached is not None)
        return " ".join(parts)


_lock = threading.Lock()
_compiled: dict[Variant, Any] = {}


def decode_variant(
    architecture: str,
    element: torch.dtype,
    output: torch.dtype,
    page_size: int,
    tile_rows: int = TILE_ROWS,
    cached: torch.dtype | None = None,
) -> Variant:
    """The variant of the decode for queries of ``element`` and a cache of ``cached``, None: the same. Raises ValueError
    where there is none, ImportError without nvidia-cutlass-dsl."""
    cached = None if cached == element else cached
    if architecture not in ATTENDING:
        raise ValueError(f"mla decode: no kernel for {architecture}; there is one for {', '.join(ATTENDING)}")
    if element not in ELEMENTS:
        raise ValueError(f"mla decode: element type {element}; use one of {', '.join(map(str, ELEMENTS))}")
    if page_size not in PAGE_SIZES:
        raise ValueError(f"mla decode: pages of {page_size} tokens; use one of {', '.join(map(str, PAGE_SIZES))}")
    if tile_rows != TILE_ROWS and (tile_rows != PAIR_ROWS or architecture not in BLACKWELLS):
        raise ValueError(
            f"mla decode: tiles of {tile_rows} rows on {architecture}; there are {TILE_ROWS} everywhere, "
            f"{PAIR_ROWS} on {', '.join(BLACKWELLS)}"
        )
    if cached is not None and (cached != CACHED_BYTES or tile_rows != TILE_ROWS):
        raise ValueError(
            f"mla decode: a cache of {cached} for queries of {element} and tiles of {tile_rows} rows; use their type, "
            f"or {CACHED_BYTES} and tiles of {TILE_ROWS} rows"
        )
    return Variant(
        "decode", architecture, element, _checked(output), page_size, _compiler(), tile_rows=tile_rows, cached=cached
    )


def prefill_variant(architecture: str, element: torch.dtype, output: torch.dtype, causal: bool) -> Variant:
    """The variant of the prefill for these; raises as decode_variant does."""
    if architecture not in ATTENDING:
        raise ValueError(f"mla prefill: no kernel for {architecture}; there is one for {', '.join(ATTENDING)}")
    if element not in ELEMENTS:
        raise ValueError(f"mla prefill: element type {element}; use one of {', '.join(map(str, ELEMENTS))}")
    return Variant("prefill", architecture, element, _checked(output), 0, _compiler(), causal)


def merge_variant(architecture: str, output: torch.dtype) -> Variant:
    """The variant of the merge; raises as decode_variant does."""
    return Variant("merge", architecture, None, _checked(output), 0, _compiler())


def compile_decode(
    architecture: str,
    element: torch.dtype,
    output: torch.dtype,
    page_size: int,
    tile_rows: int = TILE_ROWS,
    cached: torch.dtype | None = None,
) -> Any:
    """The compiled decode, called as DecodeLaunch.__call__ (kernels/decode_launch.py) without ``self``.
    Raises CompileError, and what decode_variant does."""
    return _get(decode_variant(architecture, element, output, page_size, tile_rows, cached))


def compile_prefill(architecture: str, element: torch.dtype, output: torch.dtype, causal: bool) -> Any:
    """The compiled prefill, called as PrefillLaunch.__call__ (kernels/prefill_launch.py) without ``self``.
    Raises CompileError, and what prefill_variant does."""
    return _get(prefill_variant(architecture, element, output, causal))


def compile_merge(architecture: str, output: torch.dtype) -> Any:
    """The compiled merge, called as MergePartials.__call__ (kernels/merge.py) without ``self``. Raises as
    compile_decode does."""
    return _get(merge_variant(architecture, output))


def _checked(output: torch.dtype) -> torch.dtype:
    if output not in OUTPUTS:
        raise ValueError(f"mla: output type {output}; use one of {', '.join(map(str, OUTPUTS))}")
    return output


@cache
def _compiler() -> str:
    try:
        return version("nvidia-cutlass-dsl")
    except PackageNotFoundError:
        raise ImportError(
            "the MLA kernels are compiled by nvidia-cutlass-dsl, which is not installed: "
            "pip install 'tokenspeed-appliance-mla[nvidia]'"
        ) from None


def _get(variant: Variant) -> Any:
    with _lock:
        found = _compiled.get(variant)
        if found is None:
            key = key_of(variant, OPTIONS)
            found = load(key)
            if found is None:
                note_compilation(str(variant))
                found = compile_variant(variant)
                keep(key, found)
            _compiled[variant] = found
    return found


def compile_variant(variant: Variant, options: str = "") -> Any:
    """Compiles anew, with further ``options`` of the compiler. Whatever it says beside the code is an error: it warns
    through Python's warnings while it traces, and prints what its later passes find. Raises CompileError."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            found = _TRACES[variant.kernel](variant, f"{OPTIONS} --gpu-arch {variant.architecture} {options}".strip())
        except Warning as warning:
            raise CompileError(f"{variant}: the compiler warns: {warning}") from warning
        except Exception as error:
            raise CompileError(f"{variant} does not compile: {error}") from error
    if said.getvalue().strip():
        raise CompileError(f"{variant}: the compiler warns: {said.getvalue().strip()}")
    return found


def element_type(dtype: torch.dtype) -> Any:
    """The DSL's name for a dtype."""
    import cutlass

    return {
        torch.bfloat16: cutlass.BFloat16,
        torch.float16: cutlass.Float16,
        torch.float8_e4m3fn: cutlass.Float8E4M3FN,
        torch.float32: cutlass.Float32,
        torch.int32: cutlass.Int32,
    }[dtype]


def address_of(tensor: torch.Tensor, alignment: int = 4) -> Any:
    """A tensor as a compiled kernel takes it: its address, which is a multiple of ``alignment`` bytes. Raises
    ValueError where it is none."""
    if tensor.data_ptr() % alignment:
        raise ValueError(f"mla: a tensor begins at {tensor.data_ptr():#x}, which is no multiple of {alignment}")
    return _pointer(tensor.dtype, tensor.data_ptr(), alignment)


def stream_of(device: torch.device) -> Any:
    """The present stream of a GPU as a compiled kernel takes it."""
    from cuda.bindings.driver import CUstream

    return CUstream(torch.cuda.current_stream(device).cuda_stream)


def _pointer(dtype: torch.dtype, address: int, alignment: int) -> Any:
    from cutlass.cute import AddressSpace
    from cutlass.cute.runtime import make_ptr

    return make_ptr(element_type(dtype), address, AddressSpace.gmem, assumed_align=alignment)


def _some(dtype: torch.dtype, alignment: int = 4) -> Any:
    """A pointer to compile with: only its type and alignment count."""
    return _pointer(dtype, 1024, alignment)


def _trace_decode(variant: Variant, options: str) -> Any:
    import cutlass.cute as cute
    from cuda.bindings.driver import CUstream

    from tokenspeed_mla.kernels.blackwell import BlackwellDecode
    from tokenspeed_mla.kernels.blackwell_pair import BlackwellPairDecode
    from tokenspeed_mla.kernels.hopper import HopperDecode

    assert variant.element is not None
    kernel_type: Any = HopperDecode
    if variant.architecture != HOPPER:
        kernel_type = BlackwellPairDecode if variant.tile_rows == PAIR_ROWS else BlackwellDecode
    cached = variant.cached or variant.element
    pointers = [_some(variant.element, 16), _some(cached, 16), _some(torch.int32), _some(torch.int32)]
    pointers += [_some(variant.output, 16), _some(torch.float32)]
    types = (element_type(dtype) for dtype in (variant.element, variant.output, cached))
    kernel = kernel_type(*types, variant.page_size)
    return cute.compile(kernel, *pointers, *[1] * 13, 1.0, CUstream(0), options=options)


def _trace_merge(variant: Variant, options: str) -> Any:
    import cutlass.cute as cute
    from cuda.bindings.driver import CUstream

    from tokenspeed_mla.kernels.merge import MergePartials

    pointers = [_some(torch.float32, 16), _some(torch.float32), _some(variant.output, 16), _some(torch.float32)]
    kernel = MergePartials(element_type(variant.output), dependent=variant.architecture not in _INDEPENDENT)
    return cute.compile(kernel, *pointers, *[1] * 7, CUstream(0), options=options)


def _trace_prefill(variant: Variant, options: str) -> Any:
    import cutlass.cute as cute
    from cuda.bindings.driver import CUstream

    from tokenspeed_mla.kernels.blackwell_prefill import BlackwellPrefill
    from tokenspeed_mla.kernels.hopper_prefill import HopperPrefill

    assert variant.element is not None
    kernel_type: Any = HopperPrefill if variant.architecture == HOPPER else BlackwellPrefill
    pointers = [_some(variant.element, 16) for _ in range(3)] + [_some(torch.int32), _some(torch.int32)]
    pointers += [_some(variant.output, 16), _some(torch.float32)]
    kernel = kernel_type(element_type(variant.element), element_type(variant.output), variant.causal)
    return cute.compile(kernel, *pointers, *[1] * 10, 1.0, CUstream(0), options=options)


_TRACES = {"decode": _trace_decode, "merge": _trace_merge, "prefill": _trace_prefill}
