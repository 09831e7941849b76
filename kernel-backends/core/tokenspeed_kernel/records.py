"""Verification records as files, so that what was verified can be shipped with a package or kept on a machine.

A record counts only for the platform key and kernel version that it names. A plugin's ``register()`` loads its own; the
files named by TOKENSPEED_KERNEL_RECORDS (separated as in PATH) are read by every process.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, fields
from functools import cache
from importlib.resources.abc import Traversable
from pathlib import Path

from tokenspeed_kernel.oracle import SelectionOracle, VerificationRecord

RECORD_FORMAT = 1
RECORDS_VARIABLE = "TOKENSPEED_KERNEL_RECORDS"


class RecordError(ValueError):
    """A file that holds no verification records of the known format."""


def write_records(path: Path, records: Iterable[VerificationRecord]) -> None:
    """Writes the records to ``path``, sorted, replacing what was there."""
    ordered = sorted(records, key=lambda record: (record.platform, record.kernel))
    document = {"format": RECORD_FORMAT, "records": [asdict(record) for record in ordered]}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def read_records(path: Path | Traversable) -> list[VerificationRecord]:
    """The records in ``path``. Raises RecordError, naming the file, for anything else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RecordError(f"{path}: not a file of verification records: {error}") from error
    if not isinstance(document, dict) or document.get("format") != RECORD_FORMAT:
        raise RecordError(f"{path}: not verification records of format {RECORD_FORMAT}; write them again with --write")
    names = {field.name for field in fields(VerificationRecord)}
    records = document.get("records")
    if not isinstance(records, list) or not all(isinstance(r, dict) and set(r) == names for r in records):
        raise RecordError(f"{path}: each record must have exactly the fields {sorted(names)}")
    return [VerificationRecord(**record) for record in records]


@cache
def default_oracle() -> SelectionOracle:
    """The oracle that ``select`` uses in this process. Raises RecordError for a bad file in
    TOKENSPEED_KERNEL_RECORDS."""
    oracle = SelectionOracle()
    for path in filter(None, os.environ.get(RECORDS_VARIABLE, "").split(os.pathsep)):
        load_records(Path(path), oracle)
    return oracle


def load_records(path: Path | Traversable, oracle: SelectionOracle | None = None) -> None:
    """Adds the records in ``path`` to ``oracle``, or to the process's; what a plugin's register() calls for its own.

    ``path`` may lie in a wheel (importlib.resources)."""
    target = oracle or default_oracle()
    for record in read_records(path):
        target.add_verification(record)
