"""Measured latencies as files: what was measured, with what, and where it counts.

A table names the environment it was measured in: platform, device, cores, driver, torch and the kernel packages. In
another environment its figures mean nothing, so it is refused by name and not used in silence. A single measurement of
a kernel that has changed since, or is gone, is left out with a line in the log.

Two kinds of table are read. The machine's own lie in the cache (``cache_path``; its name holds a digest of the
environment, so a new version of torch starts a new file) or where TOKENSPEED_KERNEL_TABLES says (separated as in
PATH). A package ships others, one for each platform key, and loads them in its ``register()``
(``load_shipped_tables``): these count by the kernel's version alone, and the machine's own come before them.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import torch

from tokenspeed_kernel.kernel_identity import core_version, kernel_digest
from tokenspeed_kernel.oracle import MeasurementKey, SelectionOracle
from tokenspeed_kernel.platform import PlatformInfo, current_platform
from tokenspeed_kernel.registry import KernelRegistry

TABLE_FORMAT = 2
TABLES_VARIABLE = "TOKENSPEED_KERNEL_TABLES"
CACHE_VARIABLE = "TOKENSPEED_CACHE"

logger = logging.getLogger("tokenspeed_kernel")


class TableError(ValueError):
    """A table that cannot be used; the message names the file, what is wrong with it and what mends it."""


@dataclass(frozen=True)
class Environment:
    """What a latency depends on besides the kernel.

    Attributes:
        platform: PlatformInfo.key.
        device: what its maker calls an accelerator: those of one architecture differ in memory and cores; else "".
        cores: processor cores the process may use.
        driver: of an accelerator, as text; else "none".
        torch: its version.
        packages: the kernel packages, "name version" each, sorted.
    """

    platform: str
    device: str
    cores: int
    driver: str
    torch: str
    packages: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that change with any of it."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    def differences(self, here: "Environment") -> list[str]:
        """One phrase for each fact in which the two differ."""
        names = [field.name for field in fields(self) if getattr(self, field.name) != getattr(here, field.name)]
        return [f"{name} was {_text(getattr(self, name))} and is {_text(getattr(here, name))}" for name in names]


def _text(value: object) -> str:
    return (", ".join(map(str, value)) if isinstance(value, tuple) else str(value)) or "none"


@dataclass(frozen=True)
class Measurement:
    """One measured latency.

    Attributes:
        operation, kernel, version, signature, bucket: see oracle.MeasurementKey.
        code: kernel_identity.kernel_digest of the kernel that ran.
        seconds: the median call.
        runs: how many calls the median is of.
    """

    operation: str
    kernel: str
    version: str
    code: str
    signature: str
    bucket: str
    seconds: float
    runs: int

    def key(self, platform: str) -> MeasurementKey:
        return MeasurementKey(platform, self.kernel, self.version, self.signature, self.bucket)


@dataclass(frozen=True)
class LatencyTable:
    """A file's content."""

    environment: Environment
    measurements: tuple[Measurement, ...]


def current_environment(registry: KernelRegistry, platform: PlatformInfo | None = None) -> Environment:
    """This process's environment, with the packages whose kernels are in ``registry``."""
    platform = platform or current_platform()
    versioned = {k.origin for k in registry.kernels() if " " in k.origin and os.sep not in k.origin}  # others are paths
    return Environment(
        platform=platform.key,
        device=platform.description,
        cores=platform.cores,
        driver="none" if platform.driver is None else ".".join(map(str, platform.driver)),
        torch=str(torch.__version__),
        packages=tuple(sorted({f"tokenspeed-appliance-kernel {core_version()}", *versioned})),
    )


def cache_path(environment: Environment) -> Path:
    """Where the table of this environment is kept: below TOKENSPEED_CACHE, else the user's cache directory."""
    chosen = os.environ.get(CACHE_VARIABLE)
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenspeed"
    root = Path(chosen).expanduser().absolute() if chosen else user
    return root / "kernels" / f"latencies-{environment.platform}-{environment.digest}.json"


# ---------------------------------------------------------------- files


def write_table(path: Path, table: LatencyTable) -> None:
    """Writes the table, sorted, in one step: a reader sees the old file or the new one. Makes the folder."""
    ordered = sorted(table.measurements, key=lambda m: (m.operation, m.signature, m.bucket, m.kernel))
    document = {
        "format": TABLE_FORMAT,
        "environment": asdict(table.environment),
        "measurements": [asdict(measurement) for measurement in ordered],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(document, indent=1) + "\n")
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


_KINDS: dict[object, tuple[type, ...]] = {str: (str,), int: (int,), float: (int, float), tuple[str, ...]: (list,)}
"""The types of the dataclasses' fields, and what JSON makes of them."""


def _fields_of(kind: type[Environment] | type[Measurement], value: object) -> dict[str, Any]:
    """The value as a dict with exactly the dataclass's fields, each of its type. Raises ValueError."""
    wanted = {field.name: _KINDS[field.type] for field in fields(kind)}
    if not isinstance(value, dict) or set(value) != set(wanted):
        raise ValueError(f"{kind.__name__.lower()} must have exactly the fields {sorted(wanted)}")
    for name, allowed in wanted.items():
        if type(value[name]) not in allowed:
            raise ValueError(f"{name} of a {kind.__name__.lower()} cannot be {value[name]!r}")
    return value


def parse_table(document: object) -> LatencyTable:
    """The table that a file's JSON says. Raises ValueError for anything else."""
    if not isinstance(document, dict) or document.get("format") != TABLE_FORMAT:
        raise ValueError(f"not a latency table of format {TABLE_FORMAT}")
    environment = _fields_of(Environment, document.get("environment"))
    listed = document.get("measurements")
    if not isinstance(listed, list):
        raise ValueError("measurements must be a list")
    measurements = tuple(Measurement(**_fields_of(Measurement, entry)) for entry in listed)
    wrong = [m.kernel for m in measurements if not 0.0 < m.seconds < float("inf")]
    if wrong:
        raise ValueError(f"the latency of {wrong[0]} is not a positive number of seconds")
    packages = tuple(map(str, environment.pop("packages")))
    return LatencyTable(Environment(**environment, packages=packages), measurements)


def read_table(path: Path | Traversable) -> LatencyTable:
    """The table in ``path``. Raises TableError, naming the file, for anything else."""
    try:
        return parse_table(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise TableError(
            f"{path}: not a usable latency table: {error}; delete it, or measure again: "
            f"tokenspeed-kernel tune --output {path}"
        ) from error


def read_table_of(path: Path, here: Environment) -> LatencyTable:
    """The table in ``path``, measured in the environment ``here``. Raises TableError where it was measured in
    another."""
    table = read_table(path)
    differences = table.environment.differences(here)
    if differences:
        raise TableError(
            f"{path}: this latency table is stale or foreign: {'; '.join(differences)}. "
            f"Measure again: tokenspeed-kernel tune --output {path}"
        )
    return table


# ---------------------------------------------------------------- use


def usable(table: LatencyTable, registry: KernelRegistry) -> tuple[list[Measurement], list[str]]:
    """The measurements of kernels as they are here, and a line for each kernel whose measurements are left out."""
    digests = {kernel.spec.name: kernel_digest(kernel) for kernel in _kernels_in(table, registry)}
    good, left_out = [], {}
    for measurement in table.measurements:
        if measurement.kernel not in digests:
            left_out[measurement.kernel] = f"{measurement.kernel}: there is no such kernel"
        elif measurement.code != digests[measurement.kernel]:
            left_out[measurement.kernel] = f"{measurement.kernel}: the kernel has changed since it was measured"
        else:
            good.append(measurement)
    return good, [left_out[name] for name in sorted(left_out)]


def _kernels_in(table: LatencyTable, registry: KernelRegistry) -> Iterable[Any]:
    named = {measurement.kernel for measurement in table.measurements}
    return [kernel for kernel in registry.kernels() if kernel.spec.name in named]


def load_table(
    path: Path, oracle: SelectionOracle, registry: KernelRegistry, here: Environment, *, level: int = logging.WARNING
) -> list[str]:
    """Adds the measurements in ``path`` to the oracle; returns, and logs at ``level``, what was left out and why.

    Raises TableError for a damaged table and for one of another environment.
    """
    good, left_out = usable(read_table_of(path, here), registry)
    for line in left_out:
        logger.log(level, "%s: measurements left out: %s; `tokenspeed-kernel tune` takes new ones", path, line)
    oracle.measurements.update({measurement.key(here.platform): measurement.seconds for measurement in good})
    return left_out


def load_own_tables(
    oracle: SelectionOracle, registry: KernelRegistry, here: Environment, *, cached: bool = True
) -> None:
    """Adds the machine's own tables: the cache's, where ``cached`` and there is one, then those of
    TOKENSPEED_KERNEL_TABLES. That a kernel in the cache has changed is no more than a reason to measure it again."""
    path = cache_path(here)
    if cached and path.is_file():
        load_table(path, oracle, registry, here, level=logging.INFO)
    for named in filter(None, os.environ.get(TABLES_VARIABLE, "").split(os.pathsep)):
        load_table(Path(named), oracle, registry, here)


def load_shipped_tables(
    folder: Path | Traversable, oracle: SelectionOracle | None = None, platform: PlatformInfo | None = None
) -> int:
    """Adds the table that a package ships in ``folder`` for this platform (``KEY.json``); what ``register()`` calls.

    ``folder`` may lie in a wheel (importlib.resources). Returns how many measurements it had; 0 where there is none
    for this platform. A measurement counts for the kernel version it names. Raises TableError for a damaged file and
    for one that holds another platform's figures.
    """
    from tokenspeed_kernel.records import default_oracle

    platform, oracle = platform or current_platform(), oracle or default_oracle()
    path = folder / f"{platform.key}.json"
    if not path.is_file():
        return 0
    table = read_table(path)
    if table.environment.platform != platform.key:
        raise TableError(f"{path}: holds the latencies of {table.environment.platform}; give it that name")
    for measurement in table.measurements:
        oracle.measurements.setdefault(measurement.key(platform.key), measurement.seconds)
    return len(table.measurements)


def keep(path: Path, here: Environment, new: Iterable[Measurement]) -> None:
    """Adds measurements to the table in ``path``, in place of older ones of the same key.

    A damaged or foreign file is replaced: whoever measures wants the new figures.
    """
    try:
        old: tuple[Measurement, ...] = read_table_of(path, here).measurements if path.is_file() else ()
    except TableError as error:
        logger.warning("%s: replaced by new measurements", error)
        old = ()
    kept = {m.key(here.platform): m for m in (*old, *new)}
    write_table(path, LatencyTable(here, tuple(kept.values())))
