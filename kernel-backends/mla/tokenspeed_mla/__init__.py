"""Multi-head latent attention on NVIDIA GPUs, in CuTe DSL. Tensors in, tensors out; no engine needed.

``mla_decode`` and ``merge_partials`` (decode.py) and ``mla_prefill`` (prefill.py) are the calls, ``DecodePlan``
(plan.py) says how a decode is cut and how much workspace it takes. Importing this imports no compiler; the first call
of a variant compiles it, and ``compile_decode``, ``compile_prefill`` and ``compile_merge`` (compilation.py) do so ahead
of time, without a GPU too.
"""

from tokenspeed_mla.compilation import CompileError, compile_decode, compile_merge, compile_prefill
from tokenspeed_mla.decode import merge_partials, mla_decode
from tokenspeed_mla.plan import DecodePlan
from tokenspeed_mla.prefill import mla_prefill
from tokenspeed_mla.registration import register

__all__ = [
    "CompileError",
    "DecodePlan",
    "compile_decode",
    "compile_merge",
    "compile_prefill",
    "merge_partials",
    "mla_decode",
    "mla_prefill",
    "register",
]
