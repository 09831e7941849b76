"""How several ranks come to the same kernels: rank 0's latencies, as plain data, in place of everybody's own.

Two ranks that measured for themselves may choose differently, and then disagree in the last bits or in when a
collective is called. So rank 0 tunes, exports (``export_choices``), and the document goes to the others over whatever
carries data between them; each adopts it (``adopt_choices``) before it binds. From the export on nobody tunes any
more: what is not in the document is estimated, which comes out the same everywhere.
"""

from typing import Any

from tokenspeed_kernel.kernel_identity import kernel_digest
from tokenspeed_kernel.oracle import MeasurementKey, SelectionOracle
from tokenspeed_kernel.platform import PlatformInfo
from tokenspeed_kernel.registry import KernelRegistry

AGREEMENT_FORMAT = 1


class AgreementError(RuntimeError):
    """Ranks that cannot agree, because their platforms or kernels differ; the message says in what."""


def _facts(registry: KernelRegistry, platform: PlatformInfo, oracle: SelectionOracle) -> dict[str, list[Any]]:
    """Kernel name to [digest, whether verified here]: what besides latencies decides a choice."""
    return {
        kernel.spec.name: [kernel_digest(kernel), _record(oracle, platform, kernel.spec.name)]
        for kernel in registry.kernels()
    }


def _record(oracle: SelectionOracle, platform: PlatformInfo, name: str) -> str:
    record = oracle.verifications.get((platform.key, name))
    if record is None:
        return "not verified"
    return f"version {record.version} {'verified' if record.passed else 'found wrong'}"


def export_choices(oracle: SelectionOracle, registry: KernelRegistry, platform: PlatformInfo) -> dict[str, Any]:
    """Rank 0's document: only dicts, lists, strings and numbers. This process tunes no more."""
    oracle.agreed = True
    measurements = [
        [key.kernel, key.version, key.signature, key.bucket, seconds]
        for key, seconds in oracle.measurements.items()
        if key.platform == platform.key
    ]
    return {
        "format": AGREEMENT_FORMAT,
        "platform": platform.key,
        "kernels": _facts(registry, platform, oracle),
        "measurements": sorted(measurements),
    }


def adopt_choices(
    document: dict[str, Any], oracle: SelectionOracle, registry: KernelRegistry, platform: PlatformInfo
) -> None:
    """Puts rank 0's latencies in place of this rank's own; this process tunes no more.

    Raises AgreementError, and changes nothing, where this rank could not choose as rank 0 does: another platform,
    other kernels, another kernel of the same name, another verification record.
    """
    if document.get("format") != AGREEMENT_FORMAT:
        raise AgreementError(f"rank 0 speaks format {document.get('format')}, this rank {AGREEMENT_FORMAT}")
    if document["platform"] != platform.key:
        raise AgreementError(f"rank 0 runs on {document['platform']}, this rank on {platform.key}")
    theirs, ours = document["kernels"], _facts(registry, platform, oracle)
    for name in sorted({*theirs, *ours}):
        if name not in ours or name not in theirs:
            where = "rank 0 has and this rank has not" if name in theirs else "this rank has and rank 0 has not"
            raise AgreementError(f"kernel {name!r}: {where}; install the same packages on every rank")
        if theirs[name] != ours[name]:
            what = "code or specification" if theirs[name][0] != ours[name][0] else "verification record"
            raise AgreementError(f"kernel {name!r}: another {what} than on rank 0; install the same packages")
    oracle.measurements = {key: s for key, s in oracle.measurements.items() if key.platform != platform.key}
    for kernel, version, signature, bucket, seconds in document["measurements"]:
        oracle.measurements[MeasurementKey(platform.key, kernel, version, signature, bucket)] = seconds
    oracle.agreed = True
