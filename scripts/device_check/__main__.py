"""The command; the package's words say what it does."""

import argparse
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from scripts import device_check
from scripts.device_check.isolation import write_result
from scripts.device_check.numerics import PREFIX, Progress, run_family
from scripts.device_check.plan import NAMES, PARTS, Plan, run_here
from scripts.device_check.results import Document, PartResult
from scripts.device_check.table import print_document
from scripts.device_check.target import Target, found_kind, versions
from tokenspeed_kernel.accelerators import KINDS
from tokenspeed_kernel.oracle import VerificationRecord
from tokenspeed_kernel.platform import current_platform
from tokenspeed_kernel.records import write_records

SECONDS = 480.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.device_check",
        description=device_check.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--platform", choices=("auto", "cpu", *KINDS), default="auto", help="what is checked")
    parser.add_argument("--sizes", choices=("full", "tiny"), help="of what is measured; tiny on the CPU, else full")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all parts together")
    parser.add_argument("--part", choices=NAMES, action="append", help="only this one; may be given again")
    parser.add_argument("--jobs", type=int, default=0, help="families whose numerics run side by side; 0: by the cores")
    parser.add_argument("--output", type=Path, default=Path("device-check.json"), help="the file with all of it")
    parser.add_argument("--records", type=Path, help="a file for the verification records of kernels that are right")
    for name in ("--run-part", "--result", "--progress", "--done", "--ceilings"):  # from this command to itself
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    return parser


def _run_one(arguments: argparse.Namespace, target: Target) -> int:
    """In the process of a part."""
    name = arguments.run_part
    if name.startswith(PREFIX):
        note = Progress(Path(arguments.progress)).note
        done = frozenset(filter(None, arguments.done.split(",")))
        result = run_family(name.removeprefix(PREFIX), passed_over=done, note=note)
    else:
        part = next(part for part in PARTS if part.name == name)
        pairs = (pair.split("=") for pair in filter(None, arguments.ceilings.split(",")))
        result = run_here(part, target, {key: float(value) for key, value in pairs}, arguments.seconds)
    write_result(result, Path(arguments.result))
    return 0


def verified(parts: Sequence[PartResult]) -> list[VerificationRecord]:
    """The records of the kernels whose every case was right."""
    return [
        VerificationRecord(**kernel.record)
        for part in parts
        for kernel in part.kernels
        if kernel.status == "right" and kernel.record is not None
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    arguments = _parser().parse_args(argv)
    kind = found_kind() if arguments.platform == "auto" else arguments.platform
    if kind is None or (kind != "cpu" and kind != found_kind()):
        print("no such accelerator here; --platform cpu runs the same parts on the processor", file=sys.stderr)
        return 2
    target = Target(kind, arguments.sizes or ("tiny" if kind == "cpu" else "full"))
    if arguments.run_part:
        return _run_one(arguments, target)
    platform = current_platform()
    begin = time.monotonic()
    jobs = arguments.jobs or max(1, min(6, platform.cores // 2 if kind == "cpu" else 6))
    plan = Plan(target, arguments.part or NAMES, arguments.seconds, jobs)
    parts = tuple(
        plan.run(lambda name: print(f"{time.monotonic() - begin:4.0f} s  {name}", file=sys.stderr, flush=True))
    )
    document = Document(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - begin, 1),
        budget=arguments.seconds,
        device=target.facts(platform),
        versions=versions(),
        parts=parts,
    )
    document.write(arguments.output)
    if arguments.records is not None:
        write_records(arguments.records, verified(parts))
    print_document(document, Console())
    return document.exit_status


if __name__ == "__main__":
    sys.exit(main())
