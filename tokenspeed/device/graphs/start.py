"""Captures at the start all that is to be captured, the largest first, by executing steps of each size."""

from collections.abc import Callable

import numpy as np

from tokenspeed.device.graphs.decode import CapturedDecode
from tokenspeed.device.graphs.pieces import CapturedPrefill
from tokenspeed.device.warm_up import WarmUpPlan


def capture_all(
    decode: CapturedDecode,
    prefill: CapturedPrefill,
    execute: Callable[[WarmUpPlan], object],
    *,
    num_groups: int,
    report: Callable[[int, int, str], None],
) -> None:
    """Executes a plan of each size while it is taken; ``report(done, total, name)`` before each and after the last.

    Nothing is captured afterwards: a size that is not there runs plainly.
    """
    decodes, prefills = decode.to_capture, prefill.to_capture
    total = len(decodes) + len(prefills)
    if not total:
        return
    decode.capturing(takes=True)
    prefill.capturing(takes=True)
    try:
        for done, tokens in enumerate(prefills):
            report(done, total, f"prefill of {tokens} tokens")
            execute(_plan(rows=1, length=tokens, kind=0, num_groups=num_groups))
        for done, rows in enumerate(decodes, start=len(prefills)):
            report(done, total, f"decode of {rows} rows")
            execute(_plan(rows=rows, length=1, kind=1, num_groups=num_groups))
    finally:
        decode.capturing(takes=False)
        prefill.capturing(takes=False)
    report(total, total, f"{len(decode.sizes)} sizes of decodes, {len(prefill.sizes)} of prefills")


def _plan(*, rows: int, length: int, kind: int, num_groups: int) -> WarmUpPlan:
    return WarmUpPlan(
        row=np.arange(1, rows + 1, dtype=np.int32),
        kind=np.full(rows, kind, np.int32),
        input_len=np.full(rows, length, np.int32),
        num_groups=num_groups,
    )
