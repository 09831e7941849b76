"""Formats: what a tensor of a kernel looks like, as values that can be compared, hashed and refused.

No torch here: dtypes are names ("float32"), so that a signature can be read, printed and written to a file anywhere.
An illegal combination cannot be constructed; its error says what is wrong and what would be right.
"""

from collections.abc import Iterator
from dataclasses import dataclass

FLOAT_DTYPES = frozenset({"float64", "float32", "bfloat16", "float16"})
FLOAT8_DTYPES = frozenset({"float8_e4m3fn", "float8_e5m2"})
UNSCALED_FLOAT8 = frozenset({"float8_e4m3fn"})
"""Floats of 8 bits that may stand for themselves, as in a KV cache."""
INTEGER_DTYPES = frozenset({"int64", "int32", "int16", "int8", "uint8", "bool"})
SCALE_DTYPES = frozenset({"float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e8m0fnu"})
SCALE_GRANULARITIES = ("tensor", "channel", "token", "block")


class FormatError(ValueError):
    """A format or signature that cannot exist."""


@dataclass(frozen=True)
class FormatRule:
    """What one value of ``TensorFormat.format`` allows.

    Attributes:
        storage: the storage dtypes it may have.
        scale: "required", "refused" (there is none) or "embedded" (the scales lie inside the stored bytes).
        meaning: one line for errors and listings.
    """

    storage: frozenset[str]
    scale: str
    meaning: str


FORMATS: dict[str, FormatRule] = {
    "dense": FormatRule(
        FLOAT_DTYPES | UNSCALED_FLOAT8 | INTEGER_DTYPES, "refused", "plain elements of the storage dtype"
    ),
    "fp8": FormatRule(FLOAT8_DTYPES, "required", "8-bit floats under a scale"),
    "int8": FormatRule(frozenset({"int8"}), "required", "8-bit integers under a scale"),
    "int4": FormatRule(frozenset({"uint8", "int32"}), "required", "packed 4-bit integers under a scale"),
    "fp4": FormatRule(frozenset({"uint8"}), "required", "packed 4-bit floats (e2m1) under a scale"),
    "gguf_q4_0": FormatRule(frozenset({"uint8"}), "embedded", "GGUF Q4_0 blocks, as they lie in the file"),
    "gguf_q4_1": FormatRule(frozenset({"uint8"}), "embedded", "GGUF Q4_1 blocks, as they lie in the file"),
    "gguf_q5_0": FormatRule(frozenset({"uint8"}), "embedded", "GGUF Q5_0 blocks, as they lie in the file"),
    "gguf_q5_1": FormatRule(frozenset({"uint8"}), "embedded", "GGUF Q5_1 blocks, as they lie in the file"),
    "gguf_q8_0": FormatRule(frozenset({"uint8"}), "embedded", "GGUF Q8_0 blocks, as they lie in the file"),
    "gguf_mxfp4": FormatRule(frozenset({"uint8"}), "embedded", "GGUF MXFP4 blocks: e2m1 under e8m0 scales of 32"),
    "nvfp4": FormatRule(frozenset({"uint8"}), "embedded", "blocks of e2m1 under e4m3 scales of 16 and a float32 scale"),
    "fp8_blocks": FormatRule(frozenset({"uint8"}), "embedded", "blocks of 128 e4m3 under a float32 scale"),
    "gguf_q2_k": FormatRule(frozenset({"uint8"}), "embedded", "GGUF Q2_K blocks, as they lie in the file"),
    "gguf_q3_k": FormatRule(frozenset({"uint8"}), "embedded", "GGUF Q3_K blocks, as they lie in the file"),
    "gguf_q4_k": FormatRule(frozenset({"uint8"}), "embedded", "GGUF Q4_K blocks, as they lie in the file"),
    "gguf_q5_k": FormatRule(frozenset({"uint8"}), "embedded", "GGUF Q5_K blocks, as they lie in the file"),
    "gguf_q6_k": FormatRule(frozenset({"uint8"}), "embedded", "GGUF Q6_K blocks, as they lie in the file"),
}


def _check_block_shape(name: str, shape: object) -> None:
    if not isinstance(shape, tuple) or not shape or not all(type(n) is int and n > 0 for n in shape):
        raise FormatError(f"{name} is {shape!r}; it must be a non-empty tuple of positive integers, such as (128, 128)")


@dataclass(frozen=True)
class ScaleFormat:
    """How the scales of a quantised tensor are laid out.

    Attributes:
        storage_dtype: dtype of one scale.
        granularity: "tensor" (one scale), "channel" (one a row), "token" (one a token, found at run time) or "block".
        block_shape: elements under one scale where the block is fixed in the file; only with "block".
        dynamic_block_shape: elements under one scale where the scales are found at run time; only with "block".
    """

    storage_dtype: str
    granularity: str
    block_shape: tuple[int, ...] | None = None
    dynamic_block_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.storage_dtype not in SCALE_DTYPES:
            raise FormatError(f"scale dtype {self.storage_dtype!r} is unknown; use one of {sorted(SCALE_DTYPES)}")
        if self.granularity not in SCALE_GRANULARITIES:
            raise FormatError(f"granularity {self.granularity!r} is unknown; use one of {list(SCALE_GRANULARITIES)}")
        shapes = [s for s in (self.block_shape, self.dynamic_block_shape) if s is not None]
        if self.granularity == "block" and len(shapes) != 1:
            raise FormatError(
                f"granularity 'block' takes exactly one of block_shape and dynamic_block_shape, got {len(shapes)}"
            )
        if self.granularity != "block" and shapes:
            raise FormatError(
                f"granularity {self.granularity!r} takes neither block_shape nor dynamic_block_shape; "
                f"drop {shapes[0]!r} or use granularity 'block'"
            )
        if self.block_shape is not None:
            _check_block_shape("block_shape", self.block_shape)
        if self.dynamic_block_shape is not None:
            _check_block_shape("dynamic_block_shape", self.dynamic_block_shape)

    def __str__(self) -> str:
        if self.block_shape is not None:
            return f"{self.storage_dtype}/block{'x'.join(map(str, self.block_shape))}"
        if self.dynamic_block_shape is not None:
            return f"{self.storage_dtype}/dynamic{'x'.join(map(str, self.dynamic_block_shape))}"
        return f"{self.storage_dtype}/{self.granularity}"


@dataclass(frozen=True)
class TensorFormat:
    """One tensor's format: the dtype of what is stored, what the stored elements mean, and their scale.

    ``format`` is a key of ``FORMATS``. A quantised format without a scale is refused as ambiguous, a scale on a format
    that has none (or carries its own) as contradictory.
    """

    storage_dtype: str
    format: str = "dense"
    scale: ScaleFormat | None = None

    def __post_init__(self) -> None:
        rule = FORMATS.get(self.format)
        if rule is None:
            raise FormatError(f"format {self.format!r} is unknown; use one of {sorted(FORMATS)}")
        if self.storage_dtype not in rule.storage:
            raise FormatError(
                f"format {self.format!r} ({rule.meaning}) cannot be stored as {self.storage_dtype!r}; "
                f"use one of {sorted(rule.storage)}"
            )
        if self.scale is not None and not isinstance(self.scale, ScaleFormat):
            raise FormatError(f"scale is {self.scale!r}; it must be a ScaleFormat or None")
        if rule.scale == "required" and self.scale is None:
            raise FormatError(
                f"format {self.format!r} without a scale is ambiguous; "
                f"say which, such as scale=ScaleFormat('float32', 'tensor')"
            )
        if rule.scale != "required" and self.scale is not None:
            why = "has no scale" if rule.scale == "refused" else "carries its scales inside its blocks"
            raise FormatError(f"format {self.format!r} {why}; drop scale={self.scale}")

    def __str__(self) -> str:
        if self.format == "dense":
            return self.storage_dtype
        return self.format if self.scale is None else f"{self.format}({self.storage_dtype}, {self.scale})"


@dataclass(frozen=True)
class FormatSignature:
    """The formats of a kernel's tensors: (role, format) pairs, sorted by role, each role once.

    A kernel that takes alternatives has several signatures; a role never has several formats. ``of`` sorts for you.
    """

    pairs: tuple[tuple[str, TensorFormat], ...]

    def __post_init__(self) -> None:
        if not isinstance(self.pairs, tuple) or not self.pairs:
            raise FormatError(f"a signature is a non-empty tuple of (role, TensorFormat) pairs, got {self.pairs!r}")
        for pair in self.pairs:
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and pair[0]):
                raise FormatError(f"{pair!r} is not a (role, TensorFormat) pair")
            if not isinstance(pair[1], TensorFormat):
                raise FormatError(
                    f"role {pair[0]!r} has {pair[1]!r}; it takes one TensorFormat "
                    f"(alternatives are several signatures, never several formats in one)"
                )
        roles = [role for role, _ in self.pairs]
        twice = sorted({role for role in roles if roles.count(role) > 1})
        if twice:
            raise FormatError(f"role {twice[0]!r} occurs more than once; alternatives are several signatures")
        if roles != sorted(roles):
            raise FormatError(f"roles {roles} are not sorted; use FormatSignature.of(...), which sorts them")

    @classmethod
    def of(cls, **formats: TensorFormat) -> "FormatSignature":
        """The signature with these roles; raises FormatError where a format is not a TensorFormat."""
        return cls(tuple(sorted(formats.items(), key=lambda pair: pair[0])))

    @property
    def roles(self) -> frozenset[str]:
        return frozenset(role for role, _ in self.pairs)

    def __getitem__(self, role: str) -> TensorFormat:
        for name, tensor_format in self.pairs:
            if name == role:
                return tensor_format
        raise KeyError(f"no role {role!r} in this signature; it has {sorted(self.roles)}")

    def __iter__(self) -> Iterator[tuple[str, TensorFormat]]:
        return iter(self.pairs)

    def __str__(self) -> str:
        return ", ".join(f"{role}={tensor_format}" for role, tensor_format in self.pairs)


def dense(dtype: str) -> TensorFormat:
    """A dense tensor of ``dtype``."""
    return TensorFormat(dtype)


FLOAT32 = dense("float32")
BFLOAT16 = dense("bfloat16")
FLOAT16 = dense("float16")
FLOAT8_E4M3 = dense("float8_e4m3fn")

WEIGHT_FORMATS: dict[str, TensorFormat] = {
    "float32": FLOAT32,
    "bfloat16": BFLOAT16,
    "float16": FLOAT16,
    "gguf_q4_0": TensorFormat("uint8", "gguf_q4_0"),
    "gguf_q4_1": TensorFormat("uint8", "gguf_q4_1"),
    "gguf_q5_0": TensorFormat("uint8", "gguf_q5_0"),
    "gguf_q5_1": TensorFormat("uint8", "gguf_q5_1"),
    "gguf_q8_0": TensorFormat("uint8", "gguf_q8_0"),
    "gguf_mxfp4": TensorFormat("uint8", "gguf_mxfp4"),
    "nvfp4": TensorFormat("uint8", "nvfp4"),
    "fp8_blocks": TensorFormat("uint8", "fp8_blocks"),
    "gguf_q2_k": TensorFormat("uint8", "gguf_q2_k"),
    "gguf_q3_k": TensorFormat("uint8", "gguf_q3_k"),
    "gguf_q4_k": TensorFormat("uint8", "gguf_q4_k"),
    "gguf_q5_k": TensorFormat("uint8", "gguf_q5_k"),
    "gguf_q6_k": TensorFormat("uint8", "gguf_q6_k"),
}
"""The names of ``QuantizedTensor.format`` and the tensor format each stands for."""
