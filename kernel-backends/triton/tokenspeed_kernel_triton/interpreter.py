"""Makes bfloat16 and 8-bit floats right in Triton's interpreter.

The interpreter of Triton 3.9 keeps bfloat16 as raw 16-bit integers: products and sums of them are products and sums of
the bits, a rounding up drops the carry into the exponent, and 8-bit NaNs are lost. Here casts go through PyTorch,
products widen their operands, and other arithmetic in such a type is refused, so that nothing is wrong in silence. Our
kernels do not need it: they widen what they load and narrow what they multiply or store. Scales of blocks that are
e4m3 (NVFP4) count as such; the interpreter takes every scale for a power of two. A comparison of scalars gets
the type of a truth value, where the interpreter leaves it that of what was compared, so that it cannot be broadcast.
"""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TORCH = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4b8: torch.float8_e4m3fnuz,
}
_BITS = {1: torch.uint8, 2: torch.int16}
_ARITHMETIC = (np.add, np.subtract, np.multiply, np.divide, np.minimum, np.maximum, np.fmin, np.fmax)
_ARITHMETIC += (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)


def _widened(handle):
    """The float32 values of a handle of one of those types."""
    dtype = _TORCH[handle.dtype.scalar]
    bits = torch.from_numpy(np.ascontiguousarray(handle.data).view(np.int8 if dtype.itemsize == 1 else np.int16))
    return bits.view(dtype).float().numpy()


def _narrowed(data, scalar):
    """float32 ``data`` rounded to one of those types (to nearest, ties to even), as the interpreter keeps it."""
    dtype = _TORCH[scalar]
    rounded = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32)).to(dtype)
    return rounded.view(_BITS[dtype.itemsize]).numpy().view(np.uint8 if dtype.itemsize == 1 else np.uint16)


class _Mended(interpreter.InterpreterBuilder):
    def cast_impl(self, src, dst_type):
        source, target = src.dtype.scalar, dst_type.scalar
        data = _widened(src) if source in _TORCH else src.data
        if target in _TORCH:
            return interpreter.TensorHandle(_narrowed(data, target), target)
        return interpreter.TensorHandle(data.astype(interpreter._get_np_dtype(target)), target)

    def create_fp_to_fp(self, src, dst_type, rounding_mode):  # noqa: ARG002 (ours round to nearest)
        return self.cast_impl(src, dst_type)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        if a.dtype.scalar not in _TORCH and b.dtype.scalar not in _TORCH:
            return super().create_dot(a, b, d, input_precision, max_num_imprecise_acc)
        a_data, b_data = (_widened(x) if x.dtype.scalar in _TORCH else x.data.astype(np.float32) for x in (a, b))
        return interpreter.TensorHandle(np.matmul(a_data, b_data) + d.data, d.dtype.scalar)

    def create_dot_scaled(self, lhs, *more):
        if lhs.dtype.scalar is tl.bfloat16:
            lhs = interpreter.TensorHandle(_widened(lhs), tl.float32)
        return super().create_dot_scaled(lhs, *more)

    def binary_op(self, lhs, rhs, op):
        if op in _ARITHMETIC and (lhs.dtype.scalar in _TORCH or rhs.dtype.scalar in _TORCH):
            raise TypeError(f"{op.__name__} of {lhs.dtype.scalar} and {rhs.dtype.scalar}: widen to float32 first")
        result = super().binary_op(lhs, rhs, op)
        if result.data.dtype == np.bool_:
            return interpreter.TensorHandle(result.data, tl.int1)
        return result


_power_of_two_scales = interpreter._dot_scaled_scale_to_f32


def _scales(handle, compute_type):
    return _widened(handle) if handle.dtype.scalar in _TORCH else _power_of_two_scales(handle, compute_type)


def mend() -> None:
    """Puts the corrections in force, for the whole process; a second call changes nothing."""
    builder = interpreter.interpreter_builder
    interpreter._dot_scaled_scale_to_f32 = _scales
    if type(builder) is interpreter.InterpreterBuilder:
        builder.__class__ = _Mended
