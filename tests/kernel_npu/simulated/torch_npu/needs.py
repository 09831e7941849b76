"""What an operator asks of its inputs."""

import torch


class ConstraintError(ValueError):
    """A call that the documentation of the operator rules out."""


def need(holds: bool, says: str) -> None:
    """Raises ConstraintError unless ``holds``."""
    if not holds:
        raise ConstraintError(says)


def need_dense(**tensors: torch.Tensor | None) -> None:
    """Contiguous and not empty."""
    for name, tensor in tensors.items():
        if tensor is not None:
            need(tensor.is_contiguous(), f"{name} is not contiguous: {list(tensor.shape)} by {tensor.stride()}")
            need(tensor.numel() > 0, f"{name} is empty: {list(tensor.shape)}")


def need_dtype(dtypes: tuple[torch.dtype, ...], **tensors: torch.Tensor | None) -> None:
    """One of these, the same for all."""
    found = {tensor.dtype for tensor in tensors.values() if tensor is not None}
    need(len(found) == 1 and found <= set(dtypes), f"{', '.join(tensors)} are {found}; takes one of {dtypes}")


FLOATS = (torch.float16, torch.bfloat16, torch.float32)
