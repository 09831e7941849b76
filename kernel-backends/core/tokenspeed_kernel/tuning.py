"""The fifth step of selection: finalists are run, and the fastest wins from then on.

It happens on the first use of a shape bucket, which is in the build or the warm-up of an engine, or by
``tokenspeed-kernel tune``; never while serving (see serving_guard). Tuning says how fast a kernel is, never that it is
right: only kernels whose numerics were verified on this platform are finalists. The reference is none either, as it is
chosen only where nothing else can run.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenspeed_kernel.kernel_identity import kernel_digest
from tokenspeed_kernel.latency_table import Measurement, cache_path, current_environment, keep, load_own_tables
from tokenspeed_kernel.oracle import SelectionOracle
from tokenspeed_kernel.platform import PlatformInfo
from tokenspeed_kernel.registry import Band, KernelRegistry
from tokenspeed_kernel.serving_guard import ServingViolation, process_guard
from tokenspeed_kernel.timing import RUNS, CacheSweep, medians, time_kernels
from tokenspeed_kernel.traits import TraitValue, complete_request, refusal
from tokenspeed_kernel.workloads import Workload, shape_bucket, workload_for

if TYPE_CHECKING:
    from tokenspeed_kernel.selection import Candidate, Selection

AUTOTUNE_VARIABLE = "TOKENSPEED_KERNEL_AUTOTUNE"
"""Set to 0, the first use of a shape bucket measures nothing and the cache is not read: choices come from bands,
records and the tables that are shipped or named, and are the same at every start."""

logger = logging.getLogger("tokenspeed_kernel")


@dataclass(frozen=True)
class Tuned:
    """The outcome of one tuning.

    Attributes:
        measurements: one for each finalist that ran.
        failures: what the finalists that raised said, by name.
        workload: what they ran on, for people; None where nothing fits the request.
    """

    measurements: tuple[Measurement, ...]
    failures: Mapping[str, str]
    workload: str | None


def finalists(selection: "Selection") -> list["Candidate"]:
    """The candidates that tuning decides between: those that may run, verified here, the reference not among them."""
    return [
        c for c in selection.ranked if c.spec.band is not Band.REFERENCE and c.score is not None and c.score.verified
    ]


def workload_of(
    selection: "Selection",
    candidates: list["Candidate"],
    registry: KernelRegistry,
    bound: Mapping[str, Any] | None = None,
) -> Workload | None:
    """What the candidates are timed on for this selection, or None where nothing fits; ``bound``: real weights."""
    operation = registry.operation(*selection.operation.split("."))

    def admits(traits: Mapping[str, TraitValue]) -> bool:
        complete = complete_request(operation.name, traits, operation.traits)
        return all(refusal(c.spec.traits, complete, operation.traits) is None for c in candidates)

    return workload_for(
        operation.name, selection.signature, selection.traits, selection.phase, admits=admits, bound=bound
    )


def tune(
    selection: "Selection",
    *,
    oracle: SelectionOracle,
    registry: KernelRegistry,
    bound: Mapping[str, Any] | None = None,
    runs: int = RUNS,
    sweep: CacheSweep | None = None,
) -> Tuned:
    """Runs the selection's finalists on one workload and gives the oracle their medians.

    ``bound``: the values of the binding that asks. Raises ServingViolation while serving.
    """
    process_guard().check("tune", selection.operation)
    bucket = shape_bucket(selection.traits, selection.phase)
    oracle.attempted.add((selection.operation, str(selection.signature), bucket))
    candidates = finalists(selection)
    workload = workload_of(selection, candidates, registry, bound)
    if workload is None or not candidates:
        return Tuned((), {}, None)
    from tokenspeed_kernel.numerics.on_device import device_of  # the numerics import the binding, which tunes

    device = device_of(selection.platform)
    times, failures = time_kernels([c.kernel for c in candidates], workload, device=device, runs=runs, sweep=sweep)
    for name, failure in failures.items():
        logger.warning("tuning %s: %s failed and is not measured: %s", selection.operation, name, failure)
    digests = {c.spec.name: (c.spec.version, kernel_digest(c.kernel)) for c in candidates}
    measurements = tuple(
        Measurement(
            selection.operation, name, *digests[name], str(selection.signature), bucket, seconds, len(times[name])
        )
        for name, seconds in medians(times).items()
    )
    oracle.measurements.update({m.key(selection.platform.key): m.seconds for m in measurements})
    return Tuned(measurements, failures, workload.description)


def wants_tuning(selection: "Selection", oracle: SelectionOracle) -> bool:
    """Whether the first use of this bucket should measure: two finalists or more, one of them without a measurement.

    Never for determinism, whose choice must not hang on a clock; never once ranks agreed; never twice.
    """
    if selection.objective == "determinism" or oracle.agreed or os.environ.get(AUTOTUNE_VARIABLE) == "0":
        return False
    candidates = finalists(selection)
    if len(candidates) < 2 or all(c.score is not None and c.score.measured for c in candidates):
        return False
    bucket = shape_bucket(selection.traits, selection.phase)
    return (selection.operation, str(selection.signature), bucket) not in oracle.attempted


def autotune(
    selection: "Selection", *, oracle: SelectionOracle, registry: KernelRegistry, bound: Mapping[str, Any]
) -> bool:
    """Tunes where ``wants_tuning``, and keeps the outcome in the cache; whether there is something new to rank by.

    While serving nothing is measured; the guard counts that it was asked for. A cache that cannot be written is
    logged: the measurement then lives as long as the process.
    """
    if not wants_tuning(selection, oracle):
        return False
    try:
        tuned = tune(selection, oracle=oracle, registry=registry, bound=bound or None)
    except ServingViolation:
        return False  # counted and logged by the guard
    if not tuned.measurements:
        return False
    here = current_environment(registry, selection.platform)
    path = cache_path(here)
    try:
        keep(path, here, tuned.measurements)
    except OSError as error:
        logger.warning("%s: cannot keep the latencies that were measured: %s", path, error)
    ranked = sorted(tuned.measurements, key=lambda m: m.seconds)
    figures = ", ".join(f"{m.kernel} {m.seconds * 1e6:.1f} us" for m in ranked)
    logger.info("tuned %s (%s; %s): %s", selection.operation, selection.signature, ranked[0].bucket, figures)
    return True


def ensure_own_tables(oracle: SelectionOracle, registry: KernelRegistry, platform: PlatformInfo) -> None:
    """Loads the machine's own tables for the platform into the oracle, once. Raises TableError for a bad one, each
    time."""
    if oracle.agreed or platform.key in oracle.own_tables:
        return
    cached = os.environ.get(AUTOTUNE_VARIABLE) != "0"
    load_own_tables(oracle, registry, current_environment(registry, platform), cached=cached)
    oracle.own_tables.add(platform.key)
