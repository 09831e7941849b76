"""How good a kernel is here: speed, memory, and whether its numbers were verified on this platform."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenspeed_kernel.platform import PlatformInfo
from tokenspeed_kernel.registry import Band, KernelSpec
from tokenspeed_kernel.roofline import roofline_seconds
from tokenspeed_kernel.signature import FormatSignature
from tokenspeed_kernel.traits import TraitValue
from tokenspeed_kernel.workloads import shape_bucket, work_of

BAND_ESTIMATE: dict[Band, float] = {
    Band.REFERENCE: 0.05,
    Band.PORTABLE: 0.3,
    Band.PERFORMANT: 0.6,
    Band.SPECIALISED: 0.8,
    Band.PLUGIN: 0.8,
}
"""Where nothing was measured: the share of the machine's roofline that kernels of a band usually reach."""


@dataclass(frozen=True)
class MeasurementKey:
    """What a measured latency belongs to.

    Attributes:
        platform: PlatformInfo.key.
        kernel, version: what was run; the kernel's name says the operation.
        signature: str of its FormatSignature.
        bucket: the shapes it was run with, see workloads.shape_bucket.
    """

    platform: str
    kernel: str
    version: str
    signature: str
    bucket: str


@dataclass(frozen=True)
class VerificationRecord:
    """The outcome of the numeric comparison with the reference on one platform.

    Attributes:
        kernel, version: what was compared.
        platform: PlatformInfo.key.
        passed: every case was within its bound.
        error: the worst error, as a share of the bound it had to keep.
        cases: how many cases ran.
    """

    kernel: str
    version: str
    platform: str
    passed: bool
    error: float
    cases: int


@dataclass(frozen=True)
class ScoreBreakdown:
    """A candidate's score.

    Attributes:
        performance: measured: seconds of the median call; estimated: share of the roofline.
        measured: which of the two it is.
        memory: workspace bytes of one call.
        numerics: worst error against the reference as a share of its bound, or None where it was not verified here.
        roofline: seconds that one call takes at the roofline; None where the operation or the platform has no figures.
    """

    performance: float
    measured: bool
    memory: int
    numerics: float | None
    roofline: float | None = None

    @property
    def verified(self) -> bool:
        return self.numerics is not None

    @property
    def seconds(self) -> float | None:
        """Of one call: measured, else estimated, else None."""
        if self.measured:
            return self.performance
        return None if self.roofline is None else self.roofline / self.performance

    @property
    def speed(self) -> str:
        """ "12.3 us measured", "estimate 0.60 of the roofline, 20.1 us" or, without figures, "estimate 0.60"."""
        if self.measured:
            return f"{self.performance * 1e6:.1f} us measured"
        if self.seconds is None:
            return f"estimate {self.performance:.2f}"
        return f"estimate {self.performance:.2f} of the roofline, {self.seconds * 1e6:.1f} us"

    def __str__(self) -> str:
        numbers = (
            "numerics not verified here" if self.numerics is None else f"verified, error {self.numerics:.2f} of bound"
        )
        return f"{self.speed}; workspace {self.memory} B; {numbers}"


@dataclass
class SelectionOracle:
    """Scores candidates from what was measured and verified; estimates by band where nothing was measured.

    Attributes:
        measurements: seconds by key.
        verifications: records by (platform key, kernel name).
        agreed: the measurements are those that all ranks agreed on: nobody adds to them any more.
        attempted: (operation, signature, bucket) of what was tuned already, so that nothing is tuned twice.
        own_tables: keys of the platforms whose own tables were loaded.
    """

    measurements: dict[MeasurementKey, float] = field(default_factory=dict)
    verifications: dict[tuple[str, str], VerificationRecord] = field(default_factory=dict)
    agreed: bool = False
    attempted: set[tuple[str, str, str]] = field(default_factory=set)
    own_tables: set[str] = field(default_factory=set)

    def add_verification(self, record: VerificationRecord) -> None:
        """Keeps the record; a later one for the same kernel and platform replaces it."""
        self.verifications[record.platform, record.kernel] = record

    def failed(self, spec: KernelSpec, platform: PlatformInfo) -> bool:
        """Whether this version of the kernel was compared on this platform and found wrong."""
        record = self.verifications.get((platform.key, spec.name))
        return record is not None and record.version == spec.version and not record.passed

    def score(
        self,
        spec: KernelSpec,
        platform: PlatformInfo,
        signature: FormatSignature,
        traits: Mapping[str, TraitValue],
        phase: str,
        *,
        use_measurements: bool = True,
    ) -> ScoreBreakdown:
        """The candidate's score; ``phase`` says which shapes count, see selection.OBJECTIVES.

        Without ``use_measurements`` every candidate is estimated: the same score on every machine and at every start.
        """
        key = MeasurementKey(platform.key, spec.name, spec.version, str(signature), shape_bucket(traits, phase))
        measured = self.measurements.get(key) if use_measurements else None
        record = self.verifications.get((platform.key, spec.name))
        numerics = None
        if spec.band is Band.REFERENCE:
            numerics = 0.0
        elif record is not None and record.version == spec.version and record.passed:
            numerics = record.error
        work = work_of(spec.operation, signature, traits, phase)
        return ScoreBreakdown(
            performance=BAND_ESTIMATE[spec.band] if measured is None else measured,
            measured=measured is not None,
            memory=0 if spec.workspace is None else spec.workspace(traits),
            numerics=numerics,
            roofline=None if work is None else roofline_seconds(platform, work),
        )
