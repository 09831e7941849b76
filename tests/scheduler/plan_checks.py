"""What every plan must look like, whatever was asked of the scheduler."""

import numpy as np
from numpy.typing import NDArray

from tokenspeed_scheduler import BlockTableDelta, Plan, RowKind

ROW_ARRAYS = ("handle", "row", "kind", "input_len", "prefix_len", "prompt_len", "samples")
DELTA_ARRAYS = ("row", "first_slot", "count", "version_from", "version_to", "ids")


def plan_arrays(plan: Plan) -> dict[str, NDArray[np.int32]]:
    """Every array of a plan by name."""
    arrays = {name: getattr(plan, name) for name in (*ROW_ARRAYS, "input_ids", "starts")}
    for group, delta in enumerate(plan.tables):
        arrays.update(delta_arrays(delta, f"tables[{group}]."))
    for name in ("zero_blocks", "copy_blocks"):
        arrays.update({f"{name}[{group}]": array for group, array in enumerate(getattr(plan, name))})
    return arrays


def delta_arrays(delta: BlockTableDelta, prefix: str = "") -> dict[str, NDArray[np.int32]]:
    return {f"{prefix}{name}": getattr(delta, name) for name in DELTA_ARRAYS}


def check_arrays(plan: Plan) -> None:
    """Every array is a read-only int32 view."""
    for name, array in plan_arrays(plan).items():
        assert array.dtype == np.int32, name
        assert not array.flags.writeable, name
        assert array.base is not None or array.size == 0, f"{name} owns its memory: it is a copy"


def check_shape(plan: Plan) -> None:
    """Lengths fit; prefills come first; at most one prompt is cut, and it is the last of the prefills."""
    for name in ROW_ARRAYS:
        assert getattr(plan, name).shape == (plan.num_rows,), name
    assert plan.input_ids.shape == (int(plan.input_len.sum()),)
    assert (plan.input_len > 0).all()
    kinds = plan.kind.tolist()
    assert kinds == sorted(kinds, key=lambda kind: kind != RowKind.PREFILL)
    end = plan.prefix_len + plan.input_len
    cut = [i for i, kind in enumerate(kinds) if kind == RowKind.PREFILL and end[i] < plan.prompt_len[i]]
    assert cut in ([], [kinds.count(RowKind.PREFILL) - 1]), "more than one prompt is cut, or one that is not the last"
    assert len(plan.tables) == len(plan.zero_blocks) == len(plan.copy_blocks) == 1


def rows(plan: Plan) -> list[tuple[int, str, int, int]]:
    """(handle, kind, prefix_len, input_len) of every row."""
    columns = (plan.handle, plan.kind, plan.prefix_len, plan.input_len)
    return [(h, RowKind(k).name, p, n) for h, k, p, n in zip(*(column.tolist() for column in columns), strict=True)]


def same_plan(plan: Plan, other: Plan) -> None:
    """Two plans are equal to the last number."""
    assert (plan.forward_id, plan.num_rows) == (other.forward_id, other.num_rows)
    ended, others = ([(abort.handle, abort.reason, abort.detail) for abort in p.aborts] for p in (plan, other))
    assert ended == others
    ours, theirs = plan_arrays(plan), plan_arrays(other)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)
