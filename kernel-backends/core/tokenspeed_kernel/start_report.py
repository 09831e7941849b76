"""What a start tells about its kernels: which were chosen, by what score, and, loudly, which deserve doubt."""

import logging
from collections.abc import Sequence

from tokenspeed_kernel.selection import Selection

logger = logging.getLogger("tokenspeed_kernel")


def report_lines(selections: Sequence[Selection]) -> list[str]:
    """One line for each operation, formats and choice: "gemm.linear (weight=bfloat16, ...): cpu_gemm_linear, the only
    one that can run". Equal ones are said once."""
    lines = [f"{s.operation} ({s.signature}): {s.spec.name}, {s.reason}" for s in selections]
    return sorted(set(lines))


def doubtful_lines(selections: Sequence[Selection]) -> list[str]:
    """One line for each choice that is the reference, or whose numerics were not verified on this platform."""
    return sorted({f"{s.operation} runs on {s.spec.name}: {s.doubts}" for s in selections if s.doubts is not None})


def doubts(selections: Sequence[Selection]) -> dict[str, str]:
    """Operation to its doubtful kernels and why, such as {"gemm.linear": "reference_gemm_linear: ..."}.

    For the server's state and metrics."""
    found: dict[str, list[str]] = {}
    for s in selections:
        line = f"{s.spec.name}: {s.doubts}"
        if s.doubts is not None and line not in found.setdefault(s.operation, []):
            found[s.operation].append(line)
    return {operation: "; ".join(lines) for operation, lines in sorted(found.items())}


def log_start_report(selections: Sequence[Selection]) -> None:
    """Logs the report: the choices at level INFO, the doubtful ones at WARNING, with what to do about them."""
    for line in report_lines(selections):
        logger.info("kernel of %s", line)
    doubtful = doubtful_lines(selections)
    for line in doubtful:
        logger.warning("KERNEL TO DOUBT: %s", line)
    if doubtful:
        logger.warning(
            "%d of the kernels above deserve doubt; `tokenspeed-kernel explain OPERATION` says why they were chosen, "
            "`tokenspeed-kernel verify --write PATH` verifies what runs here",
            len(doubtful),
        )
