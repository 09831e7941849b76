"""What a captured forward does, as a list: tensor operations and kernel calls with their very memory.

It is to CPU tensors what a graph is to a GPU. A node's tensors are addresses: it reads whatever is there when it is
made again, and writes where it wrote. Everything else in it (numbers, shapes, a branch that was taken) is as it was
noted.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

Node = Callable[[], None]


@dataclass(frozen=True, slots=True)
class OperationNode:
    """One operation of torch's dispatcher. ``kept``: for each result, the memory that it goes to; None of a result that
    lies in one of the inputs."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    kept: tuple[torch.Tensor | None, ...]

    def __call__(self) -> None:
        for kept, again in zip(self.kept, tensors_of(self.operation(*self.args, **self.kwargs)), strict=True):
            if kept is not None:
                kept.copy_(again)


@dataclass(frozen=True, slots=True)
class KernelNode:
    """One call of a kernel, which on a device is a launch: what it does inside is its own."""

    kernel: Callable[..., None]
    args: tuple[Any, ...]

    def __call__(self) -> None:
        self.kernel(*self.args)


@dataclass(slots=True)
class Tape:
    """Nodes in their order, and the memory that came into being between them (a graph's pool)."""

    nodes: list[Node] = field(default_factory=list)
    pool: list[torch.Tensor] = field(default_factory=list)

    def note_operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Notes what was run. Views and memory that nobody filled are no work, but what is new is kept.

        Whether a result is a view is seen from its memory: of some operations (``to``) the schema says that it may be.
        """
        given = {_storage(tensor) for tensor in tensors_of((args, kwargs))}
        results = tensors_of(result)
        fresh = [_storage(tensor) not in given for tensor in results]
        self.pool += [tensor for tensor, is_fresh in zip(results, fresh, strict=True) if is_fresh]
        if _is_empty_memory(operation) or not (any(fresh) or operation._schema.is_mutable):
            return
        kept = tuple(_address(tensor) if is_fresh else None for tensor, is_fresh in zip(results, fresh, strict=True))
        self.nodes.append(OperationNode(operation, frozen(args), frozen(kwargs), kept))

    def note_kernel(self, kernel: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Notes a call that is about to be made."""
        self.nodes.append(KernelNode(kernel, frozen(args)))

    def replay(self) -> None:
        """Makes everything again."""
        for node in self.nodes:
            node()

    def poison(self) -> None:
        """Fills the pool with what reads as NaN, as memory that other graphs use in between may hold anything."""
        for tensor in self.pool:
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)


def tensors_of(values: Any) -> list[torch.Tensor]:
    """All tensors within nested sequences and mappings, in order."""
    return [value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor)]


def frozen(values: Any) -> Any:
    """The same with containers of its own and, for each tensor, another over its memory: what becomes of the caller's
    objects afterwards (a list grows, a tensor is pointed elsewhere) is not seen."""
    return tree_map(lambda value: _address(value) if isinstance(value, torch.Tensor) else value, values)


def _address(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_empty_memory(operation: Any) -> bool:
    name: str = operation._schema.name
    return name.removeprefix("aten::").startswith(("empty", "new_empty"))
