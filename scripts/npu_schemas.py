#!/usr/bin/env python
"""Writes the schemas of the torch_npu operators that are called, out of a wheel of torch-npu.

    python scripts/npu_schemas.py --wheel torch_npu-….whl            # writes the contract file
    python scripts/npu_schemas.py --wheel torch_npu-….whl --check    # compares it, exit status 1 where it differs

The wheel is read, not installed: its library registers each operator by a string, and those strings are in the file.
Without --wheel pip downloads the version that images/npu/constraints.txt names.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tokenspeed_kernel_npu.operators import ATEN, CALLS, SCHEMAS

CONSTRAINTS = Path(__file__).parent.parent / "images/npu/constraints.txt"
LIBRARY = "torch_npu/lib/libtorch_npu.so"
NATIVE = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"
_SCHEMA = re.compile(rb"(?<![A-Za-z0-9_])npu_[a-z0-9_]+\([ -~]*\) *-> *[ -~]+")


class SchemaError(Exception):
    """A wheel that does not have what is looked for."""


def schemas_of(library: bytes, operators: Sequence[str]) -> dict[str, str]:
    """Operator to schema, from the text of the library; SchemaError for one that is not there, or there twice and
    differently."""
    found: dict[str, set[str]] = {}
    for match in _SCHEMA.finditer(library):
        text = match.group().decode("ascii")
        found.setdefault(text.partition("(")[0], set()).add(text)
    for operator in operators:
        if len(found.get(operator, ())) != 1:
            raise SchemaError(f"{LIBRARY} has {len(found.get(operator, ()))} schemas of {operator}; expected one")
    return {operator: found[operator].pop() for operator in sorted(operators)}


def aten_of(native: str, operators: Sequence[str]) -> dict[str, str]:
    """Operator of torch to schema, from the list of those that the wheel has kernels for; SchemaError for one that it
    has none for."""
    found = dict(re.findall(r"^- func: ([a-z0-9_.]+)(\(.*)$", native, flags=re.MULTILINE))
    missing = sorted(set(operators) - set(found))
    if missing:
        raise SchemaError(f"{NATIVE} has no {missing[0]}")
    return {operator: operator + found[operator] for operator in sorted(operators)}


def contract_of(wheel: Path) -> str:
    """The contract file's text for a wheel."""
    version = wheel.name.split("-")[1]
    with zipfile.ZipFile(wheel) as archive:
        schemas = schemas_of(archive.read(LIBRARY), sorted(CALLS))
        aten = aten_of(archive.read(NATIVE).decode("utf-8"), ATEN)
    facts = {"torch_npu": version, "wheel": wheel.name, "wheel_sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()}
    return json.dumps({**facts, "schemas": schemas, "aten": aten}, indent=2) + "\n"


def download(folder: Path) -> Path:
    """The wheel for CPython 3.12 on x86-64, by pip."""
    wanted = next(
        line for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines() if line.startswith("torch-npu==")
    )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--python-version", "3.12", "--platform", "manylinux_2_28_x86_64", "--dest", str(folder), wanted]
    subprocess.run(command, check=True)
    return next(folder.glob("torch_npu-*.whl"))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="a wheel of torch-npu; without it one is downloaded")
    parser.add_argument("--check", action="store_true", help="compare and write nothing")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        try:
            text = contract_of(arguments.wheel or download(Path(folder)))
        except (SchemaError, OSError, subprocess.CalledProcessError) as error:
            print(error, file=sys.stderr)
            return 1
    if arguments.check:
        same = SCHEMAS.read_text(encoding="utf-8") == text
        print(
            "the contract is what the wheel says" if same else f"{SCHEMAS} differs from the wheel; run without --check"
        )
        return 0 if same else 1
    SCHEMAS.write_text(text, encoding="utf-8")
    print(f"wrote {SCHEMAS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
