"""How a quantised matrix of a safetensors checkpoint is stored, and what it becomes in memory. No torch here."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Kind = Literal["int4", "int8", "fp8", "mxfp4", "nvfp4"]
Strategy = Literal["tensor", "channel", "group", "block"]
Layout = Literal["rows", "gptq", "awq"]

BLOCKS: dict[str, tuple[int, int]] = {
    "gguf_q4_0": (32, 18),
    "gguf_q4_1": (32, 20),
    "gguf_q8_0": (32, 34),
    "gguf_mxfp4": (32, 17),
    "nvfp4": (64, 40),
    "fp8_blocks": (128, 132),
}
"""The blocked formats that matrices become: columns and bytes of a block. A test holds them equal to the kernels'."""

BYTES = ("U8", "I8")
"""What two floats of four bits are stored as; which of the two says nothing of them."""


@dataclass(frozen=True, kw_only=True)
class WeightScheme:
    """How a quantised matrix [rows, columns] is stored.

    Attributes:
        kind: what an element is: an integer of 4 or 8 bits, a float8_e4m3, or a float of 4 bits (e2m1) whose scales are
            powers of two ("mxfp4") or float8_e4m3 under a float32 for the whole matrix ("nvfp4").
        strategy: what shares a scale: everything ("tensor"), a row ("channel"), ``group`` columns of a row, or
            ``block`` (rows, columns).
        zero_points: whether each scale has a zero point: an element is (integer - zero point) * scale.
        scale: the name of the scales beside the weight: "weight_scale", "weight_scale_inv", "scales" or "scale".
        layout: "rows": elements and scales lie row by row. "gptq" and "awq": they lie column by column, words of
            integers hold neighbours in a column, or in a row in the order 0, 2, 4, 6, 1, 3, 5, 7; zero points are
            always there.
        zero_offset: is added to each zero point that is stored.
        is_scattered: whether a tensor ``g_idx`` says which group each column belongs to.
        whole: the name of the scale of the whole matrix; "weight_global_scale" divides, any other multiplies. "": none.
    """

    kind: Kind
    strategy: Strategy
    group: int = 0
    block: tuple[int, int] = (0, 0)
    zero_points: bool = False
    scale: str = "weight_scale"
    layout: Layout = "rows"
    zero_offset: int = 0
    is_scattered: bool = False
    whole: str = ""

    @property
    def bits(self) -> int:
        """Of an element."""
        return 8 if self.kind in ("int8", "fp8") else 4

    @property
    def blocked(self) -> str:
        """The blocks that hold such elements unchanged; "" where none do."""
        if self.kind in ("mxfp4", "nvfp4"):
            return "gguf_mxfp4" if self.kind == "mxfp4" else "nvfp4"
        if self.kind == "fp8":
            return "" if self.strategy == "block" and self.block[1] % BLOCKS["fp8_blocks"][0] else "fp8_blocks"
        if self.is_scattered or self.group % 32:
            return ""
        if self.kind == "int8":
            return "" if self.zero_points else "gguf_q8_0"
        return "gguf_q4_1" if self.zero_points else "gguf_q4_0"

    def resident(self, columns: int) -> str:
        """The format that a matrix has in memory, by the name that kernels give it: blocks where its columns, and the
        groups of them, are whole blocks, else bfloat16."""
        name = self.blocked
        return name if name and columns % BLOCKS[name][0] == 0 else "bfloat16"

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row in memory."""
        name = self.resident(columns)
        if name == "bfloat16":
            return 2 * columns
        width, size = BLOCKS[name]
        return columns // width * size


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """The schemes of a checkpoint.

    Attributes:
        where: the file, for messages.
        method: "compressed-tensors", "fp8", "awq", "gptq", "mxfp4" or "modelopt".
        rules: (targets, scheme). A target is a module's name, a regular expression behind "re:", or a class ("Linear");
            whatever the order of the rules, a name counts before an expression, and that before a class.
        of_bytes: the scheme of matrices whose elements are stored as bytes, whatever the rules say (DeepSeek-V4's
            experts among projections in fp8); None: the rules count for them too.
    """

    where: str
    method: str
    rules: tuple[tuple[tuple[str, ...], WeightScheme], ...]
    of_bytes: WeightScheme | None = None

    @property
    def block_columns(self) -> int:
        """Columns of a matrix that ranks cannot share out."""
        return max((BLOCKS[scheme.blocked][0] for _, scheme in self.rules if scheme.blocked), default=1)

    def scheme_of(self, module: str, stored_as: str = "") -> WeightScheme | None:
        """The scheme of the module ("model.layers.0.mlp.up_proj") whose elements are of the type ``stored_as``; None
        where no rule names it."""
        if self.of_bytes is not None and stored_as in BYTES:
            return self.of_bytes
        kind = "Embedding" if module.endswith("embed_tokens") else "Linear"
        return self._named.get(module) or self._matching(module) or self._named.get(kind)

    def _matching(self, module: str) -> WeightScheme | None:
        """The scheme of the first expression for how the module's name begins."""
        return next((scheme for expression, scheme in self._expressions if expression.match(module)), None)

    @cached_property
    def _named(self) -> dict[str, WeightScheme]:
        """By name or class; there may be one for each of a hundred thousand modules."""
        return {target: scheme for targets, scheme in reversed(self.rules) for target in targets}

    @cached_property
    def _expressions(self) -> tuple[tuple[re.Pattern[str], WeightScheme], ...]:
        return tuple(
            (re.compile(target.removeprefix("re:")), scheme)
            for targets, scheme in self.rules
            for target in targets
            if target.startswith("re:")
        )
