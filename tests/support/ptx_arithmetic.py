"""The arithmetic of ptx_machine: instructions that read registers and write one."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np


class MachineError(RuntimeError):
    """What a kernel does that the machine, or any machine, cannot do."""


_KINDS: dict[str, Any] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    **{
        f"{sign}{bits}": np.dtype(f"{code}{bits // 8}")
        for sign, code in (("u", "u"), ("b", "u"), ("s", "i"))
        for bits in (8, 16, 32, 64)
    },
}


def bits_of(values: np.ndarray) -> np.ndarray:
    """The same bits, unsigned."""
    return values.view(np.dtype(f"u{values.dtype.itemsize}"))


def typed(values: np.ndarray, kind: str) -> np.ndarray:
    """Unsigned bits as ``kind``, cut or extended by zeros to its width."""
    if kind == "pred":
        return values.astype(bool)
    wanted = _KINDS[kind]
    if values.dtype == bool:
        raise MachineError("a predicate is no number")
    if values.dtype.itemsize == wanted.itemsize:
        return values.view(wanted)
    unsigned = bits_of(np.ascontiguousarray(values)).astype(np.dtype(f"u{wanted.itemsize}"))
    return unsigned.view(wanted)


def _read(warp: Any, instruction: Any, kind: str) -> list[np.ndarray]:
    return [warp.value(operand, kind) for operand in instruction.operands[1:]]


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    safe = np.where(b == 0, 1, b)
    return (np.sign(a) * np.sign(safe) * (np.abs(a) // np.abs(safe))).astype(a.dtype)


def _shift_right(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    width = a.dtype.itemsize * 8
    return (a >> np.minimum(b.astype(np.uint64), width - 1).astype(a.dtype)).astype(a.dtype)


_SIMPLE: dict[str, Callable[..., np.ndarray]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "sub": lambda a, b: a - b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "neg": lambda a: -a,
    "div": _quotient,
    "rem": lambda a, b: a - _quotient(a, b) * b,
    "shl": lambda a, b: a << b,
    "shr": _shift_right,
    "min": lambda *numbers: reduce(np.fmin, numbers),
    "max": lambda *numbers: reduce(np.fmax, numbers),
    "fma": lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32),
    "rcp": lambda a: np.float32(1.0) / a,
    "ex2": np.exp2,
    "lg2": np.log2,
}


def _simple(warp: Any, instruction: Any) -> None:
    kind = instruction.parts[-1]
    function = _SIMPLE[instruction.parts[0]]
    if "NaN" in instruction.parts:
        function = _largest_or_nan
    with np.errstate(all="ignore"):
        if kind == "f32x2":  # two numbers in a register of 64 bits
            pairs = [number.view(np.float32) for number in _read(warp, instruction, "u64")]
            warp.write(instruction.operands[0], function(*pairs).view(np.uint64))
        else:
            warp.write(instruction.operands[0], function(*_read(warp, instruction, kind)))


def _largest_or_nan(*numbers: np.ndarray) -> np.ndarray:
    return reduce(np.maximum, numbers)


def _multiply(warp: Any, instruction: Any) -> None:
    """mul and mad, the low half or twice as wide."""
    kind = instruction.parts[-1]
    if kind == "f32x2":
        _simple(warp, instruction)
        return
    numbers = [warp.value(operand, kind) for operand in instruction.operands[1:3]]
    with np.errstate(all="ignore"):
        if "wide" in instruction.parts:
            wider = f"{kind[0]}{int(kind[1:]) * 2}"
            numbers = [number.astype(_KINDS[wider]) for number in numbers]
            kind = wider
        result = numbers[0] * numbers[1]
        if instruction.parts[0] == "mad":
            result = result + warp.value(instruction.operands[3], kind)
    warp.write(instruction.operands[0], result)


_COMPARE: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: (a != b) & (a == a) & (b == b),
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "equ": lambda a, b: ~(a < b) & ~(a > b),
    "neu": lambda a, b: a != b,
    "leu": lambda a, b: ~(a > b),
    "ltu": lambda a, b: ~(a >= b),
    "geu": lambda a, b: ~(a < b),
    "gtu": lambda a, b: ~(a <= b),
}


def _compare(warp: Any, instruction: Any) -> None:
    left, right = _read(warp, instruction, instruction.parts[-1])
    with np.errstate(all="ignore"):
        warp.write(instruction.operands[0], _COMPARE[instruction.parts[1]](left, right))


def _select(warp: Any, instruction: Any) -> None:
    target, one, other, condition = instruction.operands
    kind = instruction.parts[-1]
    warp.write(target, np.where(warp.value(condition, "pred"), warp.value(one, kind), warp.value(other, kind)))


def _move(warp: Any, instruction: Any) -> None:
    """Also between one register and the two halves of it."""
    target, source = instruction.operands
    kind = instruction.parts[-1]
    if target.startswith("{"):
        low, high = (name.strip() for name in target.strip("{}").split(","))
        halves = np.ascontiguousarray(warp.value(source, kind)).view(_half_of(kind)).reshape(-1, 2)
        warp.write(low, halves[:, 0])
        warp.write(high, halves[:, 1])
    elif source.startswith("{"):
        half = _half_of(kind)
        halves = [warp.value(name.strip(), f"u{8 * half.itemsize}") for name in source.strip("{}").split(",")]
        warp.write(target, np.stack(halves, axis=1).view(_KINDS[kind]).reshape(-1))
    else:
        warp.write(target, warp.value(source, kind))


def _half_of(kind: str) -> np.dtype[Any]:
    return np.dtype(f"u{_KINDS[kind].itemsize // 2}")


def _e4m3(values: np.ndarray) -> np.ndarray:
    """float16 of bytes: a sign, 4 bits of an exponent 7 above, 3 of a fraction; all of these 7 are NaN."""
    exponent, fraction = (values >> 3 & 15).astype(np.int32), (values & 7).astype(np.float32)
    size = np.where(exponent == 0, np.ldexp(fraction, -9), np.ldexp(8 + fraction, exponent - 10))
    size = np.where(values & 127 == 127, np.float32(np.nan), size)
    return np.where(values & 128, -size, size).astype(np.float16)


def _round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FFF), rounded).astype(np.uint32)


def _convert(warp: Any, instruction: Any) -> None:
    to, of = instruction.parts[-2:]
    sources = instruction.operands[1:]
    if of == "e4m3x2":
        pairs = np.ascontiguousarray(warp.value(sources[0], "u16")).view(np.uint8)
        warp.write(instruction.operands[0], _e4m3(pairs).view(np.uint32))
        return
    if to in ("bf16x2", "f16x2"):
        high, low = (warp.value(name, "f32") for name in sources)
        if to == "bf16x2":
            halves = [_round_to_bfloat16(high), _round_to_bfloat16(low)]
        else:
            with np.errstate(all="ignore"):
                halves = [number.astype(np.float16).view(np.uint16).astype(np.uint32) for number in (high, low)]
        warp.write(instruction.operands[0], (halves[0] << np.uint32(16)) | halves[1])
        return
    value = warp.value(sources[0], of)
    result = value.astype(_KINDS[to])
    # A register is at least 16 bits wide: what is narrower lies in it extended by its sign.
    warp.write(instruction.operands[0], result.astype(np.int16) if to == "s8" else result)


ARITHMETIC: dict[str, Callable[[Any, Any], None]] = {
    **dict.fromkeys(_SIMPLE, _simple),
    "mul": _multiply,
    "mad": _multiply,
    "setp": _compare,
    "selp": _select,
    "mov": _move,
    "cvta": _move,
    "cvt": _convert,
}
