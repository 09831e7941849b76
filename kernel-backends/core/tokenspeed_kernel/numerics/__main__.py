"""``python -m tokenspeed_kernel.numerics``: is every kernel right on this machine?"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tokenspeed_kernel.numerics.verify import Report, verify_all
from tokenspeed_kernel.platform import PlatformError, current_platform
from tokenspeed_kernel.plugins import PluginError
from tokenspeed_kernel.plugins.loading import loaded_registry
from tokenspeed_kernel.records import write_records


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tokenspeed_kernel.numerics",
        description="Compares every kernel that runs here with float64 and with what its tags promise.",
        epilog="Exit status: 0 all right, 1 a kernel is wrong or has no case, 2 nothing to do.",
    )
    parser.add_argument("--kernel", metavar="NAME", action="append", default=[], help="only this kernel")
    parser.add_argument("--operation", metavar="NAME", action="append", default=[], help="only this one")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs")
    parser.add_argument("--full", action="store_true", help="slow cases too, and several seeds")
    parser.add_argument("--write", metavar="PATH", type=Path, help="write the verification records to this file")
    return parser


def _verdict(report: Report) -> str:
    if report.skipped is not None:
        return f"skipped: {report.skipped}"
    if not report.cases:
        return "NOT VERIFIED: no case fits this kernel; register_cases adds some"
    counted = f"{report.cases} cases" + (f", {report.unfit} do not fit it" if report.unfit else "")
    if report.failures:
        return f"WRONG in {len(report.failures)} of {counted}"
    return f"right, error {report.error:.2f} of bound, {counted}"


def _print(report: Report, width: int) -> None:
    print(f"{report.kernel:<{width}}  {_verdict(report)}")
    for failure in report.failures:
        print(f"  {failure.case} ({failure.signature})")
        for line in failure.details:
            print(f"    {line}")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        registry, platform = loaded_registry(), current_platform()
    except (PluginError, PlatformError) as error:
        print(error, file=sys.stderr)
        return 1
    known = {kernel.spec.name for kernel in registry.kernels()} | {o.name for o in registry.operations()}
    unknown = sorted({*arguments.kernel, *arguments.operation} - known)
    if unknown:
        print(f"no kernel or operation {unknown[0]!r}; `tokenspeed-kernel list` shows them all", file=sys.stderr)
        return 2
    print(f"platform {platform.key}, {platform.cores} cores, seed {arguments.seed}")
    reports = verify_all(registry, arguments.kernel, arguments.operation, seed=arguments.seed, full=arguments.full)
    if not reports:
        print("no kernel of that name does that operation", file=sys.stderr)
        return 2
    width = max(len(report.kernel) for report in reports)
    for report in reports:
        _print(report, width)
    if arguments.write is not None:
        ran = [report for report in reports if report.cases]
        write_records(arguments.write, [report.record(registry.kernel(report.kernel), platform) for report in ran])
    wrong = [report for report in reports if report.skipped is None and not report.passed]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
