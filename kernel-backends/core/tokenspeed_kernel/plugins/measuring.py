"""``tokenspeed-kernel bench`` and ``tune``: how fast the kernels are here."""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from tokenspeed_kernel.latency_table import Measurement, cache_path, current_environment, keep
from tokenspeed_kernel.numerics.on_device import device_of
from tokenspeed_kernel.platform import current_platform
from tokenspeed_kernel.plugins.requests import UsageError, find_operation, wanted_signatures, wanted_traits
from tokenspeed_kernel.records import default_oracle
from tokenspeed_kernel.registry import Band, KernelRegistry
from tokenspeed_kernel.selection import OBJECTIVES, Selection, SelectionError, choose
from tokenspeed_kernel.timing import RUNS, CacheSweep, Timer, medians, time_kernels
from tokenspeed_kernel.tuning import Tuned, finalists, tune, workload_of
from tokenspeed_kernel.workloads import PHASES

Say: TypeAlias = Callable[[str], None]
"""What prints a line, at once: measuring everything takes minutes."""

_OBJECTIVE_OF = {phase: next(o for o, p in OBJECTIVES.items() if p == phase) for phase in PHASES}


@dataclass(frozen=True)
class BenchResult:
    """One kernel on one workload; seconds of the median call, bytes and operations of a call where they are known."""

    operation: str
    kernel: str
    formats: str
    phase: str
    workload: str
    seconds: float
    bytes: int | None
    operations: int | None
    times_reference: float | None


def add_measuring_options(parser: argparse.ArgumentParser) -> None:
    """The options that ``bench`` and ``tune`` share."""
    parser.add_argument("--phase", choices=[*PHASES, "both"], default="both", help="one row, a chunk of rows, or both")
    parser.add_argument("--runs", type=_positive, default=RUNS, metavar="N", help=f"of each kernel, default {RUNS}")
    parser.add_argument("--threads", type=_positive, metavar="N", help="default: the cores this process may use")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


def _requests(registry: KernelRegistry, arguments: argparse.Namespace) -> Iterator[Selection]:
    """What is to be measured: every operation, signature and phase asked for that some kernel can run here."""
    if not arguments.operations and (arguments.format or arguments.trait):
        raise UsageError("--format and --trait need an OPERATION: they differ between operations")
    named = [find_operation(registry, name) for name in arguments.operations] or registry.operations()
    phases = PHASES if arguments.phase == "both" else (arguments.phase,)
    for operation in named:
        traits = wanted_traits(operation, arguments)
        for signature in wanted_signatures(registry, operation, arguments):
            for phase in phases:
                try:
                    objective = _OBJECTIVE_OF[phase]
                    selection = choose(
                        operation.family, operation.mode, signature, traits, objective=objective, registry=registry
                    )
                except SelectionError:
                    if arguments.operations:
                        raise
                    continue  # of all formats of all operations, some have no kernel for a usual value of the traits
                yield selection


def _set_threads(arguments: argparse.Namespace) -> int:
    threads = int(arguments.threads or current_platform().cores)
    torch.set_num_threads(threads)
    return threads


def _sweep() -> CacheSweep:
    """Of what kernels run on here."""
    return CacheSweep(Timer(device_of(current_platform())))


def _bench_one(
    registry: KernelRegistry, selection: Selection, runs: int, sweep: CacheSweep
) -> tuple[list[BenchResult], list[str]]:
    """The results of one request, fastest first, and a line for each kernel that failed."""
    candidates = list(selection.ranked)
    workload = workload_of(selection, candidates, registry)
    if workload is None:
        return [], [f"{selection.operation} ({selection.signature}): no workload and no numeric case fits"]
    kernels = [candidate.kernel for candidate in candidates]
    times, failures = time_kernels(kernels, workload, device=sweep.device, runs=runs, sweep=sweep)
    found = medians(times)
    reference = next((found.get(c.spec.name) for c in candidates if c.spec.band is Band.REFERENCE), None)
    work = workload.work
    results = [
        BenchResult(
            selection.operation,
            name,
            str(selection.signature),
            selection.phase,
            workload.description,
            seconds,
            None if work is None else work.bytes,
            None if work is None else work.operations,
            None if reference is None else reference / seconds,
        )
        for name, seconds in sorted(found.items(), key=lambda pair: pair[1])
    ]
    return results, [f"{name} failed: {failure}" for name, failure in failures.items()]


def _read_share(result: BenchResult, bandwidth: float) -> float | None:
    """The share of the read bandwidth (bytes a second) that the kernel reaches; None where its bytes are not known."""
    return result.bytes / result.seconds / bandwidth if result.bytes else None


def _bench_line(result: BenchResult, width: int, bandwidth: float) -> str:
    rate = "" if not result.bytes else f"{result.bytes / result.seconds / 1e9:7.1f} GB/s"
    reached = _read_share(result, bandwidth)
    share = "" if reached is None else f"{reached:5.0%}"
    flops = "" if not result.operations else f"{result.operations / result.seconds / 1e9:8.1f} GFLOP/s"
    times = "" if result.times_reference is None else f"{result.times_reference:6.1f} x reference"
    line = f"  {result.kernel:<{width}}  {result.seconds * 1e6:10.1f} us  {rate:>12}  {share:>5}  {flops:>16}  {times}"
    return line.rstrip()


def bench(registry: KernelRegistry, arguments: argparse.Namespace, say: Say) -> int:
    """Says how fast every kernel is that runs here, the reference among them, request by request; or one JSON document
    at the end. The percentages are of the fastest read of memory seen until then in this run.

    Returns the exit status: 1 where a kernel failed.
    """
    threads, sweep = _set_threads(arguments), _sweep()
    results: list[BenchResult] = []
    failures: list[str] = []
    for selection in _requests(registry, arguments):
        if not sweep.bytes_per_second:
            for _ in range(RUNS):
                sweep()
            if not arguments.json:
                speed = f"torch reads memory at {sweep.bytes_per_second / 1e9:.1f} GB/s (the percentages are of this)"
                say(f"platform {current_platform().key}, {threads} threads; {speed}")
        found, failed = _bench_one(registry, selection, arguments.runs, sweep)
        results += found
        failures += failed
        if not arguments.json:
            width = max((len(result.kernel) for result in found), default=0)
            workload = found[0].workload if found else "nothing ran"
            say(f"{selection.operation} ({selection.signature}), {selection.phase}: {workload}")
            for line in [_bench_line(result, width, sweep.bytes_per_second) for result in found]:
                say(line)
            for line in failed:
                say(f"  {line}")
    if arguments.json:
        facts = {
            "platform": current_platform().key,
            "threads": threads,
            "read_bytes_per_second": sweep.bytes_per_second,
        }
        rows = [{**asdict(result), "read_share": _read_share(result, sweep.bytes_per_second)} for result in results]
        document = {**facts, "results": rows, "failures": failures}
        say(json.dumps(document, indent=1))
    return int(bool(failures))


def _unverified(selection: Selection) -> list[str]:
    return [
        f"  {c.spec.name} is no finalist: its numerics were not verified on {selection.platform.key}"
        for c in selection.ranked
        if c.score is not None and not c.score.verified
    ]


def _say_tuned(selection: Selection, tuned: Tuned, say: Say) -> None:
    workload = tuned.workload or "no workload and no numeric case fits"
    say(f"{selection.operation} ({selection.signature}), {selection.phase}: {workload}")
    for place, measured in enumerate(sorted(tuned.measurements, key=lambda m: m.seconds)):
        say(f"{'  ' if place else '->'} {measured.kernel}  {measured.seconds * 1e6:.1f} us")
    for name, failure in tuned.failures.items():
        say(f"  {name} failed: {failure}")


def run_tune(registry: KernelRegistry, arguments: argparse.Namespace, say: Say) -> int:
    """Measures finalists, says the outcome request by request, and writes the table at the end.

    Without ``--all`` a request that leaves nothing to choose is passed over. Returns the exit status: 1 where a
    finalist failed.
    """
    _set_threads(arguments)
    oracle, here, sweep = default_oracle(), current_environment(registry), _sweep()
    path = arguments.output or cache_path(here)
    measured: list[Measurement] = []
    passed_over, status = 0, 0
    for selection in _requests(registry, arguments):
        if len(finalists(selection)) < (1 if arguments.all else 2):
            passed_over += 1
            if _unverified(selection):
                say(f"{selection.operation} ({selection.signature}), {selection.phase}: nothing to choose")
        else:
            tuned = tune(selection, oracle=oracle, registry=registry, runs=arguments.runs, sweep=sweep)
            measured += tuned.measurements
            _say_tuned(selection, tuned, say)
            status = max(status, int(bool(tuned.failures)))
        for line in _unverified(selection):
            say(line)
    if passed_over:
        say(f"{passed_over} requests leave nothing to choose; --all measures them too")
    if measured:
        keep(path, here, measured)
        say(f"{len(measured)} latencies written to {path}")
    return status


def add_tune_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``tune`` alone."""
    parser.add_argument("--all", action="store_true", help="measure also where there is only one finalist")
    parser.add_argument("--output", metavar="PATH", type=Path, help="write the table here instead of the cache")
