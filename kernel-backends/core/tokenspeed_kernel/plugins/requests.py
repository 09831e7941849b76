"""What the commands of ``tokenspeed-kernel`` are asked about: operations, formats and traits as they are typed."""

import argparse
from collections.abc import Sequence

from tokenspeed_kernel.registry import KernelRegistry, Operation, RegistrationError
from tokenspeed_kernel.signature import FormatSignature
from tokenspeed_kernel.traits import TraitValue


class UsageError(Exception):
    """What was typed makes no sense here; the message says what would."""


def add_request_options(parser: argparse.ArgumentParser) -> None:
    """The options that narrow a command to some formats and traits."""
    parser.add_argument(
        "--format",
        metavar="ROLE=FORMAT",
        action="append",
        default=[],
        help="only signatures with this format in this role, such as weight=gguf_q4_1; left out: all",
    )
    parser.add_argument(
        "--trait",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a fact of the call, such as head_dim=64; left out: a usual value",
    )


def find_operation(registry: KernelRegistry, name: str) -> Operation:
    """The operation called ``name``. Raises UsageError, naming those there are."""
    family, _, mode = name.partition(".")
    try:
        return registry.operation(family, mode)
    except RegistrationError:
        known = ", ".join(operation.name for operation in registry.operations())
        raise UsageError(f"no operation {name!r}; there are: {known}") from None


def _pairs(option: str, values: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for value in values:
        name, equals, right = value.partition("=")
        if not (name and equals and right):
            raise UsageError(f"--{option} {value!r}: write NAME=VALUE")
        pairs[name] = right
    return pairs


def _trait_value(operation: Operation, name: str, text: str) -> TraitValue:
    declaration = operation.traits.get(name)
    if declaration is None:
        known = ", ".join(operation.traits) or "none"
        raise UsageError(f"{operation.name} has no trait {name!r}; it declares: {known}")
    if declaration.type is bool:
        if text.lower() not in ("true", "false"):
            raise UsageError(f"--trait {name}={text}: write true or false")
        return text.lower() == "true"
    if declaration.type is int:
        try:
            return int(text)
        except ValueError:
            raise UsageError(f"--trait {name}={text}: write a whole number") from None
    return text


def wanted_traits(operation: Operation, arguments: argparse.Namespace) -> dict[str, TraitValue]:
    """The traits of the request: a usual value where none was typed. Raises UsageError for what the operation does
    not declare."""
    given = _pairs("trait", arguments.trait)
    traits: dict[str, TraitValue] = {name: declaration.example for name, declaration in operation.traits.items()}
    traits.update({name: _trait_value(operation, name, text) for name, text in given.items()})
    return traits


def wanted_signatures(
    registry: KernelRegistry, operation: Operation, arguments: argparse.Namespace
) -> list[FormatSignature]:
    """Every signature that some kernel of the operation takes and that has the formats typed. Raises UsageError."""
    wanted = _pairs("format", arguments.format)
    unknown = sorted(set(wanted) - operation.roles)
    if unknown:
        raise UsageError(f"{operation.name} has no role {unknown[0]!r}; it has: {', '.join(sorted(operation.roles))}")
    known = {s for kernel in registry.kernels(operation.family, operation.mode) for s in kernel.spec.signatures}
    fitting = [s for s in known if all(str(s[role]) == text for role, text in wanted.items())]
    if not fitting:
        listed = "\n  ".join(sorted(map(str, known)))
        raise UsageError(f"no kernel of {operation.name} takes these formats; there are:\n  {listed}")
    return sorted(fitting, key=str)
