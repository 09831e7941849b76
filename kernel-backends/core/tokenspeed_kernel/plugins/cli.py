"""``tokenspeed-kernel``: which kernels there are, what one is, and why one wins."""

import argparse
import os
import sys
from collections.abc import Sequence
from itertools import groupby

from tokenspeed_kernel.platform import PlatformError, current_platform
from tokenspeed_kernel.plugins.discovery import PATH_VARIABLE, PluginError, plugins_at
from tokenspeed_kernel.plugins.loading import load_plugins, loaded_registry
from tokenspeed_kernel.registry import KernelRegistry, Operation, RegisteredKernel, RegistrationError
from tokenspeed_kernel.selection import OBJECTIVES, SelectionError, select
from tokenspeed_kernel.signature import FormatSignature
from tokenspeed_kernel.traits import TraitError, TraitValue


class UsageError(Exception):
    """What was typed makes no sense here; the message says what would."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tokenspeed-kernel",
        description="Which kernels there are, what one is, and why one wins.",
    )
    parser.add_argument(
        "--register",
        metavar="PATH",
        action="append",
        default=[],
        help="add the kernel plugin in this folder or wheel; alone: check that it loads and say how to keep it",
    )
    commands = parser.add_subparsers(dest="command")
    listing = commands.add_parser("list", help="every kernel, by operation")
    listing.add_argument("operation", nargs="?", help="only this one, such as gemm.linear")
    info = commands.add_parser("info", help="everything about one kernel")
    info.add_argument("name", help="of a kernel, as list prints it")
    explain = commands.add_parser("explain", help="every candidate for an operation, and why one wins")
    explain.add_argument("operation", help="such as gemm.linear")
    explain.add_argument(
        "--format",
        metavar="ROLE=FORMAT",
        action="append",
        default=[],
        help="only signatures with this format in this role, such as weight=gguf_q4_1; left out: all",
    )
    explain.add_argument(
        "--trait",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a fact of the call, such as head_dim=64; left out: a usual value",
    )
    explain.add_argument("--override", metavar="TARGET", help="insist on a kernel or solution")
    explain.add_argument("--objective", choices=sorted(OBJECTIVES), default="latency")
    return parser


def _operation(registry: KernelRegistry, name: str) -> Operation:
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


def _list(registry: KernelRegistry, only: str | None) -> str:
    kernels = registry.kernels()
    if only is not None:
        operation = _operation(registry, only)
        kernels = registry.kernels(operation.family, operation.mode)
    kernels.sort(key=lambda kernel: (kernel.spec.operation, -kernel.spec.band, kernel.spec.name))
    width = max((len(kernel.spec.name) for kernel in kernels), default=0)
    lines = []
    for name, members in groupby(kernels, key=lambda kernel: kernel.spec.operation):
        lines.append(name)
        for kernel in members:
            reason = kernel.spec.capability.refusal(current_platform())
            state = "runs here" if reason is None else f"not here: {reason}"
            band = kernel.spec.band.name.lower()
            lines.append(f"  {kernel.spec.name:<{width}}  {band:<11}  {state}  ({kernel.origin})")
    return "\n".join(lines)


def _describe(kernel: RegisteredKernel, operation: Operation) -> str:
    spec = kernel.spec
    reason = spec.capability.refusal(current_platform())
    needs = sorted(spec.capability.vendors) + sorted(spec.capability.features)
    lines = [
        spec.name,
        f"  operation  {spec.operation}",
        f"  call       fn({operation.arguments})",
        f"  bound by   {', '.join(operation.bound) or 'nothing'}",
        f"  solution   {spec.solution}, version {spec.version}, from {kernel.origin}",
        f"  band       {spec.band.name.lower()}",
        f"  needs      {', '.join(needs) or 'nothing'}: {'runs here' if reason is None else reason}",
        f"  tags       {', '.join(sorted(spec.tags)) or 'none'}",
    ]
    lines += [f"  trait      {name}: {bound}" for name, bound in sorted(spec.traits.items())]
    lines += [f"  formats    {signature}" for signature in sorted(map(str, spec.signatures))]
    return "\n".join(lines)


def _info(registry: KernelRegistry, name: str) -> str:
    try:
        kernel = registry.kernel(name)
    except KeyError:
        raise UsageError(f"no kernel {name!r}; `tokenspeed-kernel list` shows them all") from None
    return _describe(kernel, registry.operation(kernel.spec.family, kernel.spec.mode))


def _signatures(registry: KernelRegistry, operation: Operation, wanted: dict[str, str]) -> list[FormatSignature]:
    """Every signature that some kernel of the operation takes and that has the wanted formats."""
    unknown = sorted(set(wanted) - operation.roles)
    if unknown:
        raise UsageError(f"{operation.name} has no role {unknown[0]!r}; it has: {', '.join(sorted(operation.roles))}")
    known = {s for kernel in registry.kernels(operation.family, operation.mode) for s in kernel.spec.signatures}
    fitting = [s for s in known if all(str(s[role]) == text for role, text in wanted.items())]
    if not fitting:
        listed = "\n  ".join(sorted(map(str, known)))
        raise UsageError(f"no kernel of {operation.name} takes these formats; there are:\n  {listed}")
    return sorted(fitting, key=str)


def _explain(registry: KernelRegistry, arguments: argparse.Namespace) -> str:
    operation = _operation(registry, arguments.operation)
    given = _pairs("trait", arguments.trait)
    traits: dict[str, TraitValue] = {name: declaration.example for name, declaration in operation.traits.items()}
    traits.update({name: _trait_value(operation, name, text) for name, text in given.items()})
    explanations = []
    for signature in _signatures(registry, operation, _pairs("format", arguments.format)):
        selection = select(
            operation.family,
            operation.mode,
            signature,
            traits,
            override=arguments.override,
            objective=arguments.objective,
            registry=registry,
        )
        explanations.append(selection.explain())
    return "\n\n".join(explanations)


def _keep(paths: Sequence[str]) -> str:
    """What ``--register`` alone prints: what the plugins bring, and the line that makes serving processes load
    them."""
    resolved = [os.path.realpath(os.path.expanduser(path)) for path in paths]
    brought = [kernel for kernel in loaded_registry().kernels() if kernel.origin in resolved]
    lines = [f"{kernel.spec.name}  {kernel.spec.operation}  ({kernel.origin})" for kernel in brought]
    lines.append("To serve with it, install it, or set for every process:")
    lines.append(f"  export {PATH_VARIABLE}={os.environ[PATH_VARIABLE]}")
    return "\n".join(lines)


def _run(arguments: argparse.Namespace) -> str:
    for path in arguments.register:
        plugins_at(path)  # an error here names the path as it was typed
    known = list(filter(None, os.environ.get(PATH_VARIABLE, "").split(os.pathsep)))
    added = [os.path.realpath(os.path.expanduser(path)) for path in arguments.register]
    if added:
        os.environ[PATH_VARIABLE] = os.pathsep.join(dict.fromkeys(known + added))
    load_plugins()
    registry = loaded_registry()
    if arguments.command == "list":
        return _list(registry, arguments.operation)
    if arguments.command == "info":
        return _info(registry, arguments.name)
    if arguments.command == "explain":
        return _explain(registry, arguments)
    if added:
        return _keep(arguments.register)
    raise UsageError("say what to do: list, info NAME, explain OPERATION, or --register PATH; --help shows more")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 where a plugin or selection failed, 2 for what was typed."""
    arguments = _parser().parse_args(argv)
    try:
        print(_run(arguments))
    except UsageError as error:
        print(f"tokenspeed-kernel: {error}", file=sys.stderr)
        return 2
    except (PluginError, SelectionError, TraitError, PlatformError) as error:
        print(f"tokenspeed-kernel: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
