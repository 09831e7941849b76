"""What the compiler makes of a kernel, looked at without a GPU: its PTX, its machine code, and what a thread takes.

``python -m tokenspeed_mla.ahead`` prints a table.
"""

import struct
import tempfile
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed_mla.addressing import PAGE_SIZES, PAIR_ROWS, TILE_ROWS
from tokenspeed_mla.compilation import (
    BLACKWELLS,
    CACHED_BYTES,
    HOPPER,
    OUTPUTS,
    Variant,
    compile_variant,
    decode_variant,
    merge_variant,
    prefill_variant,
)

OTHER_ARCHITECTURES = ("sm_80", "sm_89", "sm_100a", "sm_103a", "sm_120a")
"""Those that the merge is tried on beside Hopper."""

KEEP = "--keep-ptx --keep-cubin"
"""Options with which the compiler keeps all that it made, in the folder that ``--dump-dir`` names."""

_REGISTERS, _FRAME = 0x2F, 0x11
"""Attributes of the section .nv.info: a function's number, then its registers a thread or its bytes of stack."""


@dataclass(frozen=True)
class MachineCode:
    """A compiled kernel.

    Attributes:
        ptx: its text.
        registers: of a thread, before setmaxnreg shares them out anew.
        stack_bytes: of a thread; above 0 where registers were spilt.
        code_bytes: of the machine code.
    """

    ptx: str
    registers: int
    stack_bytes: int
    code_bytes: int


def compile_ahead(variant: Variant) -> MachineCode:
    """Compiles a variant and keeps everything. Raises CompileError."""
    with tempfile.TemporaryDirectory() as folder:
        return machine_code(compile_variant(variant, f"{KEEP} --dump-dir {folder}"))


def machine_code(found: Any) -> MachineCode:
    """What the compiler made of a variant that was compiled with KEEP."""
    ptx, cubin = found.__ptx__, bytes(found.__cubin__)
    facts = dict.fromkeys((_REGISTERS, _FRAME), 0)
    code = 0
    for name, content in _sections(cubin):
        if name == ".nv.info":
            for attribute, value in _attributes(content):
                if attribute in facts:
                    facts[attribute] = max(facts[attribute], value)
        elif name.startswith(".text."):
            code += len(content)
    return MachineCode(ptx, facts[_REGISTERS], facts[_FRAME], code)


def _sections(elf: bytes) -> list[tuple[str, bytes]]:
    """Names and contents of the sections of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    count, names = struct.unpack_from("<HH", elf, 0x3C)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + 64 * index) for index in range(count)]
    strings = elf[headers[names][4] :]
    return [
        (strings[header[0] : strings.index(b"\0", header[0])].decode(), elf[header[4] : header[4] + header[5]])
        for header in headers
        if header[1] != 8  # takes no room in the file
    ]


def _attributes(content: bytes) -> list[tuple[int, int]]:
    """Attributes of .nv.info that have a function's number and one value."""
    found, place = [], 0
    while place < len(content):
        kind, attribute, size = struct.unpack_from("<BBH", content, place)
        place += 4
        if kind == 4:  # a value of ``size`` bytes follows; otherwise the value is in place of the size
            if size == 8:
                found.append((attribute, struct.unpack_from("<II", content, place)[1]))
            place += size
    return found


def variants() -> list[Variant]:
    """Some of every kind: decodes by all page sizes, then by every pair of types, then over 8 bits; the code for
    sm_103a is that for sm_100a. Prefills with a mask and without. Merges for every output, and for one on other
    architectures."""
    chosen = []
    for architecture, tile_rows in ((HOPPER, TILE_ROWS), (BLACKWELLS[0], TILE_ROWS), (BLACKWELLS[0], PAIR_ROWS)):
        chosen += [decode_variant(architecture, torch.bfloat16, torch.bfloat16, page, tile_rows) for page in PAGE_SIZES]
        chosen += [
            decode_variant(architecture, element, output, 64, tile_rows)
            for element, output in (
                (torch.bfloat16, torch.float32),
                (torch.float16, torch.float16),
                (torch.float16, torch.float32),
            )
        ]
    chosen += [
        decode_variant(architecture, element, output, page, cached=CACHED_BYTES)
        for architecture in (HOPPER, BLACKWELLS[0])
        for element, output, page in (
            (torch.bfloat16, torch.bfloat16, 16),
            (torch.bfloat16, torch.bfloat16, 64),
            (torch.bfloat16, torch.float32, 64),
            (torch.float16, torch.float16, 64),
        )
    ]
    chosen += [
        decode_variant(BLACKWELLS[1], torch.bfloat16, torch.bfloat16, 64, tile_rows)
        for tile_rows in (TILE_ROWS, PAIR_ROWS)
    ]
    chosen.append(decode_variant(BLACKWELLS[1], torch.bfloat16, torch.bfloat16, 64, cached=CACHED_BYTES))
    for architecture in (HOPPER, BLACKWELLS[0]):
        chosen += [
            prefill_variant(architecture, torch.bfloat16, torch.bfloat16, False),
            prefill_variant(architecture, torch.bfloat16, torch.bfloat16, True),
            prefill_variant(architecture, torch.bfloat16, torch.float32, True),
            prefill_variant(architecture, torch.float16, torch.float16, True),
        ]
    chosen.append(prefill_variant(BLACKWELLS[1], torch.bfloat16, torch.bfloat16, True))
    chosen += [merge_variant(HOPPER, output) for output in OUTPUTS]
    return chosen + [merge_variant(architecture, torch.bfloat16) for architecture in OTHER_ARCHITECTURES]


def main() -> None:
    """Prints the table."""
    print(f"{'variant':<72} registers  stack  code bytes")
    for variant in variants():
        code = compile_ahead(variant)
        print(f"{variant!s:<72} {code.registers:>9} {code.stack_bytes:>6} {code.code_bytes:>11}", flush=True)


if __name__ == "__main__":
    main()
