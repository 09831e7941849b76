"""Writes down how functions of another project's library are called, from its source and without importing it.

usage: library_signatures.py SOURCE OUTPUT FILE:NAME ...
       library_signatures.py SOURCE --check CONTRACT

SOURCE is a wheel or the folder it was installed to; FILE:NAME a function or a method (Class.method) in a file of it.
Our wrappers are tested against what is written, where the library itself cannot be installed. --check compares a
contract with SOURCE and exits 1 where they differ.
"""

import ast
import json
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

KINDS = ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD", "VAR_POSITIONAL", "KEYWORD_ONLY", "VAR_KEYWORD")


def reader(source: Path) -> tuple[Callable[[str], str], list[str]]:
    """What reads a file of ``source`` by its path, and the paths of all its METADATA files."""
    if source.is_dir():
        metadata = [path.relative_to(source).as_posix() for path in source.glob("*.dist-info/METADATA")]
        return (lambda name: (source / name).read_text(encoding="utf-8")), metadata
    archive = zipfile.ZipFile(source)
    metadata = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    return (lambda name: archive.read(name).decode("utf-8")), metadata


def _definition(tree: ast.Module, name: str) -> ast.FunctionDef:
    """The last definition of ``name``, which is the one that counts where overloads come before it."""
    body: list[ast.stmt] = tree.body
    *classes, function = name.split(".")
    for wanted in classes:
        (found,) = [node for node in body if isinstance(node, ast.ClassDef) and node.name == wanted]
        body = found.body
    definitions = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == function]
    if not definitions:
        raise SystemExit(f"library_signatures.py: there is no {name}")
    return definitions[-1]


def parameters(function: ast.FunctionDef) -> list[list[str | bool]]:
    """Name, kind and whether there is a default, of each parameter."""
    given = function.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [False] * (len(plain) - len(given.defaults)) + [True] * len(given.defaults)
    found: list[list[str | bool]] = []
    for index, (argument, default) in enumerate(zip(plain, defaults, strict=True)):
        found.append([argument.arg, KINDS[0] if index < len(given.posonlyargs) else KINDS[1], default])
    if given.vararg is not None:
        found.append([given.vararg.arg, KINDS[2], False])
    for argument, value in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        found.append([argument.arg, KINDS[3], value is not None])
    if given.kwarg is not None:
        found.append([given.kwarg.arg, KINDS[4], False])
    return found


def signatures(source: Path, distribution: str | None, places: list[str]) -> dict[str, Any]:
    """The contract; raises SystemExit for a place that is not there."""
    read, metadata = reader(source)
    facts = {}
    for path in metadata:
        text = read(path)
        name = re.search(r"^Name: (.+)$", text, re.MULTILINE)
        version = re.search(r"^Version: (.+)$", text, re.MULTILINE)
        if name and version and distribution in (None, name[1]):
            facts = {"distribution": name[1], "version": version[1]}
    if not facts:
        raise SystemExit(f"library_signatures.py: {source} does not hold {distribution or 'a distribution'}")
    functions = {}
    for place in places:
        file, _, function = place.partition(":")
        functions[place] = parameters(_definition(ast.parse(read(file)), function))
    return {**facts, "functions": functions}


def main(arguments: list[str]) -> int:
    """Writes or compares a contract; the exit status."""
    match arguments:
        case [source, "--check", contract]:
            known = json.loads(Path(contract).read_text(encoding="utf-8"))
            found = signatures(Path(source), known["distribution"], list(known["functions"]))
            differing = [name for name in known["functions"] if known["functions"][name] != found["functions"][name]]
            for name in differing:
                print(f"{name}: {known['version']} has {known['functions'][name]},")
                print(f"  {found['version']} has {found['functions'][name]}")
            return 1 if differing else 0
        case [source, output, *places] if places:
            text = json.dumps(signatures(Path(source), None, places), indent=1)
            # One parameter a line is enough.
            text = re.sub(r"\[\n\s+(\"[^\"]+\"),\n\s+(\"[^\"]+\"),\n\s+(\w+)\n\s+\]", r"[\1, \2, \3]", text)
            Path(output).write_text(text + "\n", encoding="utf-8")
            return 0
    raise SystemExit(__doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
