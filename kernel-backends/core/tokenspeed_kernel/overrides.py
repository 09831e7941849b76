"""Who may insist on a kernel, and who wins: argument > context manager > environment > recipe.

A target is the name of a kernel or of a solution. An override narrows what may be chosen; it never lifts a check.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from tokenspeed_kernel.plugins.loading import loaded_registry

ENVIRONMENT_PREFIX = "TOKENSPEED_KERNEL_OVERRIDE_"


@dataclass(frozen=True)
class Override:
    """A target and who asked for it, such as "environment TOKENSPEED_KERNEL_OVERRIDE_GEMM_LINEAR"."""

    target: str
    source: str


_context: ContextVar[Mapping[str, str] | None] = ContextVar("tokenspeed_kernel_overrides", default=None)
_recipe: dict[str, str] = {}


@contextmanager
def kernel_override(family: str, mode: str, target: str) -> Iterator[None]:
    """Within the block, bindings of family.mode take ``target`` (this thread or task only). Blocks nest."""
    token = _context.set({**(_context.get() or {}), f"{family}.{mode}": target})
    try:
        yield
    finally:
        _context.reset(token)


def set_recipe_overrides(targets: Mapping[str, str]) -> None:
    """Replaces what the recipe insists on: "family.mode" to a target. For the whole process; called once, at build.

    Raises ValueError for an operation that does not exist.
    """
    known = [operation.name for operation in loaded_registry().operations()]
    wrong = sorted(set(targets) - set(known))
    if wrong:
        raise ValueError(f"the recipe names a kernel for {wrong[0]!r}; the operations are {known}")
    _recipe.clear()
    _recipe.update(targets)


def environment_name(family: str, mode: str) -> str:
    """The environment variable that overrides family.mode."""
    return f"{ENVIRONMENT_PREFIX}{family}_{mode}".upper()


def misspelt_variables(operations: Iterable[str]) -> list[str]:
    """The environment variables that look like an override and name none of ``operations`` ("family.mode")."""
    known = {environment_name(*operation.split(".")) for operation in operations}
    return sorted(name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX) and name not in known)


def effective_override(family: str, mode: str, argument: str | None) -> Override | None:
    """The override in force for family.mode, or None."""
    operation = f"{family}.{mode}"
    if argument:
        return Override(argument, "argument")
    in_context = (_context.get() or {}).get(operation)
    if in_context:
        return Override(in_context, "context manager")
    variable = environment_name(family, mode)
    if os.environ.get(variable):
        return Override(os.environ[variable], f"environment {variable}")
    if operation in _recipe:
        return Override(_recipe[operation], "recipe")
    return None
