"""quantization_config of AWQ and GPTQ: integers of 4 or 8 bits, packed column by column.

Both store a matrix as ``qweight``, ``qzeros`` and ``scales``; GPTQ has ``g_idx`` besides, the group of each column.
"""

from collections.abc import Mapping
from typing import Any

from tokenspeed.recipes.checkpoint_error import CheckpointError
from tokenspeed.recipes.weight_scheme import Strategy, WeightScheme


def awq(where: str, values: Mapping[str, Any]) -> WeightScheme:
    """AWQ (arXiv:2306.00978) as AutoAWQ's GEMM layout stores it: 4 bits with zero points."""
    bits = values.get("bits", values.get("w_bit", 4))
    version = str(values.get("version") or "gemm").lower()
    if bits != 4:
        raise CheckpointError(f"{where}: bits is {bits!r}; AWQ checkpoints of 4 bits are read: use one of them")
    if version != "gemm":
        raise CheckpointError(
            f"{where}: version is {version!r}, another order of the same numbers; use a checkpoint of version 'gemm', "
            "or a GGUF file of the same model"
        )
    if values.get("zero_point", True) is not True:
        raise CheckpointError(
            f"{where}: zero_point is {values['zero_point']!r}; AWQ checkpoints with zero points are read: use one of "
            "them, or a GGUF file of the same model"
        )
    strategy, group = _group(where, values, "group_size" if "group_size" in values else "q_group_size")
    return WeightScheme(kind="int4", strategy=strategy, group=group, zero_points=True, scale="scales", layout="awq")


def gptq(where: str, values: Mapping[str, Any]) -> WeightScheme:
    """GPTQ (arXiv:2210.17323) of 4 or 8 bits. Format "gptq" stores each zero point less 1, "gptq_v2" as it is."""
    bits = values.get("bits", 4)
    if bits not in (4, 8):
        raise CheckpointError(f"{where}: bits is {bits!r}; GPTQ checkpoints of 4 and 8 bits are read: use one of them")
    stored_as = str(values.get("checkpoint_format") or "gptq").lower()
    if stored_as not in ("gptq", "gptq_v2"):
        raise CheckpointError(
            f"{where}: checkpoint_format is {stored_as!r}; supported are 'gptq' and 'gptq_v2': use a checkpoint in one "
            "of them"
        )
    for pattern, own in (values.get("dynamic") or {}).items():
        if not str(pattern).startswith("-:") and own:
            raise CheckpointError(
                f"{where}: dynamic gives the modules {pattern!r} a scheme of their own ({own!r}); use a checkpoint "
                "with one scheme for all, or a GGUF file of the same model"
            )
    strategy, group = _group(where, values, "group_size")
    return WeightScheme(
        kind="int4" if bits == 4 else "int8",
        strategy=strategy,
        group=group,
        zero_points=values.get("sym", True) is not True,
        scale="scales",
        layout="gptq",
        zero_offset=1 if stored_as == "gptq" else 0,
        is_scattered=values.get("desc_act", False) is True and strategy == "group",
    )


def _group(where: str, values: Mapping[str, Any], key: str) -> tuple[Strategy, int]:
    """What shares a scale: a group of columns, or a whole row where the size is -1."""
    size = values.get(key, 128)
    if size == -1:
        return "channel", 0
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
        raise CheckpointError(f"{where}: {key} is {size!r}; it should be a number of columns, or -1 for a whole row")
    return "group", size
