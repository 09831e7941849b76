"""The elements of quantised matrices as safetensors checkpoints lay them out, taken out of their words."""

from dataclasses import dataclass

import torch

from tokenspeed.recipes.model_config import CheckpointError
from tokenspeed.recipes.weight_scheme import WeightScheme

PER_WORD_ROWS = 8
"""Rows that share words at most; pieces of whole multiples read no word twice."""

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbours each field of a word of AWQ's is, from the lowest bits on."""

Range = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class StoredMatrix:
    """The tensors of one quantised matrix [rows, columns].

    Attributes:
        values: its elements: int32 words, int8, float8_e4m3fn, or bytes of either sign with two floats of four bits in
            each.
        scale, zero_point, order, whole: as the checkpoint has them; see StoredWeight.
        where: file and weight, for messages.
    """

    scheme: WeightScheme
    shape: tuple[int, int]
    values: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    order: torch.Tensor | None
    whole: torch.Tensor | None
    where: str

    @property
    def resident(self) -> str:
        """What it becomes."""
        return self.scheme.resident(self.shape[1])


class IntegerMatrix:
    """Integers under scales, whatever their layout.

    Attributes:
        scales: float32 [rows or 1, groups or 1].
        zero_points: float32 of the same shape, of unsigned integers; None where all are ``middle``.
        groups: int64 [columns]: the group of each column.
        middle: what stands for 0 where there are no zero points.
    """

    def __init__(self, stored: StoredMatrix) -> None:
        self.stored = stored
        self._bits = stored.scheme.bits
        self._by_column = stored.scheme.layout != "rows"
        self.middle = 1 << (self._bits - 1)
        scale = stored.scale.float()
        self.scales = scale.T if self._by_column else scale.reshape(-1, scale.shape[-1] if scale.dim() == 2 else 1)
        self.groups = self._groups()
        self.zero_points = None if stored.zero_point is None else self._zero_points(stored.zero_point)

    def quants(self, rows: Range, columns: Range) -> torch.Tensor:
        """uint8 [rows, columns], unsigned."""
        values, per_word = self.stored.values, 32 // self._bits
        if values.dtype == torch.int8:
            return values[rows[0] : rows[1], columns[0] : columns[1]].contiguous().view(torch.uint8) ^ 128
        if self.stored.scheme.layout == "awq":
            first, last = rows[0] // per_word, -(-rows[1] // per_word)
            turned = _awq_rows(values[columns[0] : columns[1], first:last])
            skipped = rows[0] - first * per_word
            return turned[skipped : skipped + rows[1] - rows[0]]
        first, last = columns[0] // per_word, -(-columns[1] // per_word)
        words = values[first:last, rows[0] : rows[1]].T if self._by_column else values[rows[0] : rows[1], first:last]
        skipped = columns[0] - first * per_word
        return _fields(words, self._bits)[:, skipped : skipped + columns[1] - columns[0]].contiguous()

    def _groups(self) -> torch.Tensor:
        scheme, columns = self.stored.scheme, self.stored.shape[1]
        if scheme.strategy != "group":
            return torch.zeros(columns, dtype=torch.int64)
        in_order = torch.arange(columns) // scheme.group
        if self.stored.order is None:
            return in_order
        order = self.stored.order.long()
        count = self.scales.shape[1]
        if bool(((order < 0) | (order >= count)).any()):
            raise CheckpointError(
                f"{self.stored.where}: g_idx names groups beyond the {count}; the checkpoint is damaged"
            )
        if not scheme.is_scattered and not torch.equal(order, in_order):
            raise CheckpointError(
                f"{self.stored.where}: g_idx scatters the columns of a group, but desc_act of the quantization_config "
                "is not true; take the config.json that belongs to the weights"
            )
        return order

    def _zero_points(self, packed: torch.Tensor) -> torch.Tensor | None:
        """Zero points of unsigned integers as the scales are; None where the scheme says that there are none, which is
        checked. Packed ones of compressed-tensors hold eight rows in a word; bytes are signed."""
        scheme, rows = self.stored.scheme, self.stored.shape[0]
        if packed.dtype == torch.int8:
            return packed.float().view(self.scales.shape) + self.middle
        if scheme.layout == "awq":
            found = _awq_rows(packed)[:rows]
        elif scheme.layout == "gptq":
            found = _fields(packed, self._bits)[:, :rows].T
        else:
            found = _fields(packed.T, self._bits)[:, :rows].T
        zeros = found.float() + scheme.zero_offset
        if scheme.zero_points:
            return zeros
        if bool((zeros != self.middle).any()):
            raise CheckpointError(
                f"{self.stored.where}: has zero points other than {self.middle}, but sym of the quantization_config is "
                "true; take the config.json that belongs to the weights"
            )
        return None


def _fields(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [n, words] to uint8 [n, words * 32 / bits], the lowest field first."""
    # A word's bytes are in the order of its fields: little-endian, as everything in such a file.
    stored = words.reshape(-1).contiguous().view(torch.uint8).view(words.shape[0], 4 * words.shape[1])
    return stored if bits == 8 else torch.stack([stored & 15, stored >> 4], dim=-1).flatten(1)


def _awq_rows(words: torch.Tensor) -> torch.Tensor:
    """int32 [n, words] of AWQ's, turned: uint8 [words * 8, n]."""
    count, width = words.shape
    turned = words.T.contiguous()
    rows = torch.empty(width, 8, count, dtype=torch.uint8)
    for field, place in enumerate(_AWQ_ORDER):
        rows[:, place] = (turned >> (4 * field)) & 15
    return rows.view(8 * width, count)


def nibbles(values: torch.Tensor, rows: Range, columns: Range) -> torch.Tensor:
    """uint8 [rows, columns] of four bits out of bytes [rows, columns / 2] of either sign, the low half first."""
    first, last = columns[0] // 2, -(-columns[1] // 2)
    stored = values.view(torch.uint8)[rows[0] : rows[1], first:last]  # a negative int8 would draw its sign along
    skipped = columns[0] - 2 * first
    both = torch.stack([stored & 15, stored >> 4], dim=-1).flatten(1)
    return both[:, skipped : skipped + columns[1] - columns[0]].contiguous()


def widened(values: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn as float32, a copy; several times as fast as torch has it on the CPU.

    Sign, exponent and significand move to where a float16 has them, which divides the value by 2^8 (subnormals
    included), as the bias of its exponent is greater by 8.
    """
    stored = values.view(torch.uint8)
    bits = stored.to(torch.int16)
    wide = (((bits & 0x7F) << 7) | ((bits & 0x80) << 8)).view(torch.float16).float().mul_(256.0)
    is_nan = (stored & 0x7F) == 0x7F
    return wide.masked_fill_(is_nan, torch.nan) if bool(is_nan.any()) else wide
