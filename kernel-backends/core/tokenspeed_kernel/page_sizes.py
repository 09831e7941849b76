"""kernel_page_size: the tokens of one page, as the kernel itself says it.

One function, one table (the registry). The size is a property of the kernel, never derived from a granularity of the
cache.
"""

from tokenspeed_kernel.plugins.loading import loaded_registry
from tokenspeed_kernel.registry import KernelRegistry, KernelSpec
from tokenspeed_kernel.traits import MultipleOf, OneOf, Range

PAGE_SIZE_TRAIT = "kernel_page_size"


def _sizes(spec: KernelSpec) -> tuple[int, ...]:
    bound = spec.traits[PAGE_SIZE_TRAIT]
    if isinstance(bound, OneOf):
        return tuple(sorted(int(value) for value in bound.values))
    if isinstance(bound, MultipleOf):
        return (bound.divisor,)
    assert isinstance(bound, Range)
    return (bound.minimum,)


def kernel_page_size(spec_name: str, registry: KernelRegistry | None = None) -> tuple[int, ...]:
    """The page sizes, in tokens, that the kernel called ``spec_name`` can be given.

    Where the kernel takes any multiple of a size, that size alone. A block_granularity fits where one of these divides
    it. Raises KeyError for an unknown kernel, ValueError for one that reads no pages.
    """
    spec = (registry or loaded_registry()).kernel(spec_name).spec
    if PAGE_SIZE_TRAIT not in spec.traits:
        raise ValueError(f"kernel {spec_name!r} ({spec.operation}) reads no pages, so it has no kernel_page_size")
    return _sizes(spec)


def kernel_page_sizes(registry: KernelRegistry | None = None) -> dict[str, tuple[int, ...]]:
    """Every kernel that reads pages, with its page sizes."""
    kernels = (registry or loaded_registry()).kernels()
    return {kernel.spec.name: _sizes(kernel.spec) for kernel in kernels if PAGE_SIZE_TRAIT in kernel.spec.traits}
