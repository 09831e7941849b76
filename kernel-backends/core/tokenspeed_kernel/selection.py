"""Chooses the kernel of an operation, and can say why.

Five steps, each keeping its reasons: signature, platform, traits (with the objective and the numeric record), score,
and measuring the finalists where that was not done yet (tuning.py; a binding does it, a question does not). The rank
is: the reference last; then verified numerics before unverified; then score (a measurement before an estimate, the
faster first, then the smaller workspace); then the higher band; then the name. The order of import or registration
plays no part.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenspeed_kernel.oracle import ScoreBreakdown, SelectionOracle
from tokenspeed_kernel.overrides import Override, effective_override, misspelt_variables
from tokenspeed_kernel.platform import PlatformInfo, current_platform
from tokenspeed_kernel.plugins.loading import loaded_registry
from tokenspeed_kernel.recording import PLANS_ON_HOST
from tokenspeed_kernel.records import default_oracle
from tokenspeed_kernel.registry import (
    Band,
    KernelFunction,
    KernelRegistry,
    KernelSpec,
    RegisteredKernel,
)
from tokenspeed_kernel.serving_guard import process_guard
from tokenspeed_kernel.signature import FormatSignature
from tokenspeed_kernel.traits import TraitValue, complete_request, refusal
from tokenspeed_kernel.tuning import ensure_own_tables

OBJECTIVES: dict[str, str] = {
    "latency": "decode",
    "throughput": "prefill",
    "determinism": "decode",
    "portability": "decode",
}
"""Objective to the phase whose shapes count for it (workloads.PHASES). Under determinism measurements do not count: the
same kernel wins on every machine of a platform and at every start."""

DETERMINISM_TAGS = frozenset({"deterministic", "row_invariant"})


class SelectionError(RuntimeError):
    """No kernel can do what was asked; the message lists every candidate and the step that dropped it."""


class OverrideError(SelectionError):
    """An override names a kernel that is not there or cannot run here; the message says why."""


@dataclass(frozen=True)
class Candidate:
    """One registered kernel in one selection.

    Attributes:
        kernel: the kernel.
        dropped_at: "signature", "platform", "traits", "objective", "graphs", "numerics" or "override", or None where it
            was ranked.
        reason: why it was dropped.
        score: its score where it was ranked.
    """

    kernel: RegisteredKernel
    dropped_at: str | None = None
    reason: str = ""
    score: ScoreBreakdown | None = None

    @property
    def spec(self) -> KernelSpec:
        return self.kernel.spec


@dataclass(frozen=True)
class Selection:
    """A choice and everything that led to it.

    Attributes:
        operation, signature, traits, platform, objective: what was asked.
        override: the override in force, if any.
        ranked: the candidates that could run, the chosen one first.
        dropped: the others.
    """

    operation: str
    signature: FormatSignature
    traits: Mapping[str, TraitValue]
    platform: PlatformInfo
    objective: str
    override: Override | None
    ranked: tuple[Candidate, ...]
    dropped: tuple[Candidate, ...]

    @property
    def phase(self) -> str:
        """The phase whose shapes count for the objective."""
        return OBJECTIVES[self.objective]

    @property
    def reason(self) -> str:
        """Why the chosen one: "asked for by ...", "the only one that can run", or its speed, measured or estimated."""
        if self.override is not None:
            return f"asked for by {self.override.source}"
        others = [c for c in self.ranked if c.spec.band is not Band.REFERENCE]
        score = self.ranked[0].score
        if len(others) <= 1 or score is None:
            return "the only one that can run"
        return score.speed

    @property
    def doubts(self) -> str | None:
        """What an operator should know of the choice: it is the reference, or nobody verified its numbers here."""
        score = self.ranked[0].score
        if self.spec.band is Band.REFERENCE:
            return (
                "the PyTorch reference, slow"
                if self.override is not None
                else "the PyTorch reference, nothing else fits"
            )
        if score is not None and not score.verified:
            return f"its numerics were not verified on {self.platform.key}"
        return None

    @property
    def spec(self) -> KernelSpec:
        return self.ranked[0].spec

    @property
    def fn(self) -> KernelFunction:
        """The registered callable: the kernel, or the factory of a bound one."""
        return self.ranked[0].kernel.fn

    def explain(self) -> str:
        """Several lines: the request, the ranked candidates with their scores, the dropped ones with step and
        reason."""
        return _explain(self)


def _explain(selection: Selection) -> str:
    traits = ", ".join(f"{name}={value}" for name, value in sorted(selection.traits.items())) or "none"
    lines = [
        f"{selection.operation}",
        f"  formats    {selection.signature}",
        f"  traits     {traits}",
        f"  platform   {selection.platform.key}",
        f"  objective  {selection.objective}",
    ]
    if selection.override is not None:
        lines.append(f"  override   {selection.override.target} ({selection.override.source})")
    for place, candidate in enumerate(selection.ranked, start=1):
        mark = "->" if place == 1 else "  "
        lines.append(f"{mark} {place}. {candidate.spec.name} [{candidate.spec.band.name.lower()}]  {candidate.score}")
    lines += [f"   -  {c.spec.name}: dropped at {c.dropped_at}: {c.reason}" for c in selection.dropped]
    return "\n".join(lines)


def _drop(
    kernel: RegisteredKernel,
    signature: FormatSignature,
    platform: PlatformInfo,
    traits: Mapping[str, TraitValue],
    vocabulary: Any,
    objective: str,
    captured: bool,
    oracle: SelectionOracle,
) -> tuple[str, str] | None:
    """The step that drops the kernel and why, or None where it can run."""
    spec = kernel.spec
    if signature not in spec.signatures:
        known = "; ".join(sorted(f"({known})" for known in spec.signatures))
        return "signature", f"takes {known}"
    reason = spec.capability.refusal(platform)
    if reason is not None:
        return "platform", reason
    reason = refusal(spec.traits, traits, vocabulary)
    if reason is not None:
        return "traits", reason
    if objective == "determinism" and not spec.tags >= DETERMINISM_TAGS:
        return "objective", f"does not promise {', '.join(sorted(DETERMINISM_TAGS - spec.tags))}"
    if captured and PLANS_ON_HOST in spec.tags:
        return "graphs", "plans each forward on the host, which no graph holds; scheduler.graphs: off admits it"
    if oracle.failed(spec, platform):
        return "numerics", "its numbers were compared with the reference on this platform and found wrong"
    return None


def _rank_key(candidate: Candidate, objective: str) -> tuple[object, ...]:
    score = candidate.score
    assert score is not None
    band = candidate.spec.band
    portable_first = band is not Band.PORTABLE if objective == "portability" else False
    speed = score.performance if score.measured else -score.performance
    return (
        band is Band.REFERENCE,
        portable_first,
        not score.verified,
        not score.measured,
        speed,
        score.memory,
        -int(band),
        candidate.spec.name,
    )


def _apply_override(
    override: Override, operation: str, ranked: list[Candidate], dropped: list[Candidate]
) -> tuple[list[Candidate], list[Candidate]]:
    """Keeps the ranked candidates that the override names. Raises OverrideError where none is left."""

    def named(candidate: Candidate) -> bool:
        return override.target in (candidate.spec.name, candidate.spec.solution)

    kept = [candidate for candidate in ranked if named(candidate)]
    if kept:
        why = f"{override.source} asks for {override.target}"
        others = [Candidate(c.kernel, "override", why) for c in ranked if not named(c)]
        return kept, dropped + others
    refused = [f"{c.spec.name}: dropped at {c.dropped_at}: {c.reason}" for c in dropped if named(c)]
    if refused:
        raise OverrideError(
            f"override {override.target!r} ({override.source}) cannot run {operation} here: " + "; ".join(refused)
        )
    known = sorted({word for c in ranked + dropped for word in (c.spec.name, c.spec.solution)})
    raise OverrideError(
        f"override {override.target!r} ({override.source}) names no kernel and no solution of {operation}; "
        f"there are {known}"
    )


def _check_environment(registry: KernelRegistry) -> None:
    """Raises OverrideError where an environment variable overrides an operation that does not exist."""
    names = [operation.name for operation in registry.operations()]
    wrong = misspelt_variables(names)
    if wrong:
        raise OverrideError(f"environment {wrong[0]} overrides no operation; unset it; the operations are {names}")


def choose(
    family: str,
    mode: str,
    signature: FormatSignature,
    traits: Mapping[str, TraitValue],
    *,
    platform: PlatformInfo | None = None,
    override: str | None = None,
    objective: str = "latency",
    captured: bool = False,
    registry: KernelRegistry | None = None,
    oracle: SelectionOracle | None = None,
) -> Selection:
    """``select`` for a binding: the guard against selecting while serving is the caller's. ``captured``: graphs will
    hold the calls.

    Plugins are loaded first where the process's own registry is used, then the machine's own latency tables where its
    own oracle is. Raises SelectionError where nothing can run, OverrideError where an override cannot, TraitError for a
    trait that the operation does not declare or that is missing, TableError for a damaged or stale table, ValueError
    for an unknown objective.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective {objective!r} is unknown; use one of {sorted(OBJECTIVES)}")
    if registry is None:
        registry = loaded_registry()
        _check_environment(registry)
    platform = platform or current_platform()
    if oracle is None:
        oracle = default_oracle()
        ensure_own_tables(oracle, registry, platform)
    operation = registry.operation(family, mode)
    complete = complete_request(operation.name, traits, operation.traits)
    ranked, dropped = [], []
    for kernel in registry.kernels(family, mode):
        drop = _drop(kernel, signature, platform, complete, operation.traits, objective, captured, oracle)
        if drop is not None:
            dropped.append(Candidate(kernel, *drop))
            continue
        score = oracle.score(
            kernel.spec,
            platform,
            signature,
            complete,
            OBJECTIVES[objective],
            use_measurements=objective != "determinism",
        )
        ranked.append(Candidate(kernel, score=score))
    ranked.sort(key=lambda candidate: _rank_key(candidate, objective))
    wanted = effective_override(family, mode, override)
    if wanted is not None:
        ranked, dropped = _apply_override(wanted, operation.name, ranked, dropped)
    selection = Selection(
        operation.name, signature, complete, platform, objective, wanted, tuple(ranked), tuple(dropped)
    )
    if not ranked:
        raise SelectionError(f"no kernel can run this:\n{selection.explain()}")
    return selection


def select(
    family: str,
    mode: str,
    signature: FormatSignature,
    traits: Mapping[str, TraitValue],
    *,
    platform: PlatformInfo | None = None,
    override: str | None = None,
    objective: str = "latency",
    registry: KernelRegistry | None = None,
    oracle: SelectionOracle | None = None,
) -> Selection:
    """The best kernel of family.mode for these formats and traits; see the module's words for the order.

    Raises what ``choose`` raises; while serving, the guard counts it (ServingViolation under the strict guard).
    """
    process_guard().check("select", f"{family}.{mode}")
    return choose(
        family,
        mode,
        signature,
        traits,
        platform=platform,
        override=override,
        objective=objective,
        registry=registry,
        oracle=oracle,
    )
