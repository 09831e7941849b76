"""``tokenspeed-kernel list``, ``info`` and ``explain``: what is there, and why one wins."""

import argparse
from itertools import groupby

from tokenspeed_kernel.platform import current_platform
from tokenspeed_kernel.plugins.requests import UsageError, find_operation, wanted_signatures, wanted_traits
from tokenspeed_kernel.records import default_oracle
from tokenspeed_kernel.registry import Band, KernelRegistry, KernelSpec, Operation, RegisteredKernel
from tokenspeed_kernel.selection import select


def list_kernels(registry: KernelRegistry, only: str | None) -> str:
    """Every kernel by operation, whether it runs here, and where it came from."""
    kernels = registry.kernels()
    if only is not None:
        operation = find_operation(registry, only)
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


def _verified(kernel: RegisteredKernel) -> str:
    platform = current_platform()
    if kernel.spec.band is Band.REFERENCE:
        return "it is the reference"
    record = default_oracle().verifications.get((platform.key, kernel.spec.name))
    if record is None:
        return f"not on {platform.key}"
    if record.version != kernel.spec.version:
        return f"not this version on {platform.key}, only version {record.version}"
    if not record.passed:
        return f"found wrong on {platform.key}; it is never chosen there"
    return f"on {platform.key}, error {record.error:.2f} of bound in {record.cases} cases"


def _workspace(spec: KernelSpec, operation: Operation) -> str:
    if spec.workspace is None:
        return "none"
    usual = {name: declaration.example for name, declaration in operation.traits.items()}
    return f"{spec.workspace(usual)} B for a call of the usual sizes"


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
        f"  verified   {_verified(kernel)}",
        f"  workspace  {_workspace(spec, operation)}",
        f"  tags       {', '.join(sorted(spec.tags)) or 'none'}",
    ]
    lines += [f"  trait      {name}: {bound}" for name, bound in sorted(spec.traits.items())]
    lines += [f"  formats    {signature}" for signature in sorted(map(str, spec.signatures))]
    return "\n".join(lines)


def describe_kernel(registry: KernelRegistry, name: str) -> str:
    """Everything about one kernel. Raises UsageError where there is none of that name."""
    try:
        kernel = registry.kernel(name)
    except KeyError:
        raise UsageError(f"no kernel {name!r}; `tokenspeed-kernel list` shows them all") from None
    return _describe(kernel, registry.operation(kernel.spec.family, kernel.spec.mode))


def explain(registry: KernelRegistry, arguments: argparse.Namespace) -> str:
    """Every candidate for the request, its score or the step that dropped it. Nothing is measured for it."""
    operation = find_operation(registry, arguments.operation)
    traits = wanted_traits(operation, arguments)
    explanations = []
    for signature in wanted_signatures(registry, operation, arguments):
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
