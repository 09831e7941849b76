"""Finds the weight that is no number, once logits have shown that there is one. A sound start never scans."""

import logging
from collections.abc import Callable, Sequence

import torch

from tokenspeed.layers.loader import WeightSource, read_weight
from tokenspeed.layers.weights import WeightSpec
from tokenspeed.recipes.model_config import CheckpointError
from tokenspeed_kernel.quantized import QuantizedTensor

PIECE_ELEMENTS = 1 << 22
"""Elements looked at together."""

logger = logging.getLogger(__name__)


def refuse_unsound_weights(
    source: WeightSource,
    specs: Sequence[WeightSpec],
    *,
    q_and_k_permuted: bool,
    where: str,
    report: Callable[[int, int, str], None],
) -> None:
    """Raises CheckpointError for the first weight with a NaN or an infinity, naming the tensor, its row and column.

    They are read once more, one after the other, on the host: what kernels hold of them is in forms of their own. Where
    all are finite the logits' NaN has another cause, such as sums beyond float32, and a warning says so. ``where`` is
    the checkpoint; ``report(done, total, name)`` is told of each weight.
    """
    for done, spec in enumerate(specs):
        report(done, len(specs), f"looking for a NaN in {spec.name}")
        weight = read_weight(source, spec, q_and_k_permuted=q_and_k_permuted)
        if isinstance(weight, QuantizedTensor):
            place = _first_in_matrix(weight)
            tensor = _tensor_of(spec, weight, place)
        else:
            place = _first(weight.reshape(1, -1))
            tensor = spec.name
        del weight
        source.reuse()
        if place is not None:
            row, column, value = place
            at = f"row {row}, column {column}" if spec.is_matrix else f"element {column}"
            raise CheckpointError(
                f"{where}: {tensor} holds {value:g} ({at}); no answer of this checkpoint can be right: download it "
                "again, or take another that its publisher has checked"
            )
    logger.warning(
        "%s: the warm-up's logits are NaN, though every weight is finite; answers will end with an error", where
    )


Place = tuple[int, int, float]
"""Row, column and value of an element."""


def _first(values: torch.Tensor) -> Place | None:
    """Of values [rows, columns]."""
    if bool(torch.isfinite(values).all()):
        return None
    row, column = torch.nonzero(~torch.isfinite(values))[0].tolist()
    return row, column, float(values[row, column])


def _first_in_matrix(weight: QuantizedTensor) -> Place | None:
    rows, columns = weight.shape
    step = max(1, PIECE_ELEMENTS // columns)
    for start in range(0, rows, step):
        piece = weight.rows(start, min(rows, start + step))
        found = _first(piece.dequantize() if weight.is_blocked else piece.plane)
        if found is not None:
            return start + found[0], found[1], found[2]
    return None


def _tensor_of(spec: WeightSpec, weight: QuantizedTensor, place: Place | None) -> str:
    """The tensor of the checkpoint that has the row: of experts that are one weight, the expert's own."""
    if place is None or not spec.parts or spec.row_order is not None:
        return spec.name
    held = (0, len(spec.parts)) if spec.sections else spec.shard.row_range(len(spec.parts))
    return spec.parts[held[0] + place[0] * (held[1] - held[0]) // weight.shape[0]]
