"""Looks at every replay, for debugging: TOKENSPEED_CHECK_GRAPHS=1.

The output is poisoned before a replay, which must overwrite all of it; then the eager twin runs on the same memory, and
both must agree: bit for bit on the CPU, where the same calls are made, within a tolerance on devices.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tokenspeed.device.graphs.provider import ReplayError
from tokenspeed.layers.batch import StateRows

CHECK_VARIABLE = "TOKENSPEED_CHECK_GRAPHS"
"""Set to 1, every replay is followed by its eager twin and compared: twice the time, for debugging."""

TOLERANCE = 2e-2
"""Of hidden states behind the last norm, relative to the largest of a row: a device's libraries may choose another
kernel while capturing."""


def checks_replays() -> bool:
    """Whether the environment asks for it."""
    return os.environ.get(CHECK_VARIABLE, "0") not in ("", "0")


class KeepsStates(Protocol):
    """The attention backend of a group of states."""

    @property
    def state_rows(self) -> StateRows: ...


@dataclass(frozen=True)
class StateBlocks:
    """The blocks of one group of states, ``blocks`` uint8 [blocks, bytes], and whose rows say which a step writes.

    A state, unlike keys and values, is not the same after it was written twice: the twin must start where the replay
    did.
    """

    blocks: torch.Tensor
    backend: KeepsStates

    def save(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Which blocks the step writes, and what is in them."""
        targets = self.backend.state_rows.targets.long()
        return targets, self.blocks[targets]

    def restore(self, saved: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Puts it back."""
        targets, content = saved
        self.blocks[targets] = content


class ReplayCheck:
    """``states``: all that a forward changes and does not overwrite with the same when it runs again."""

    def __init__(self, states: Sequence[StateBlocks], *, exact: bool) -> None:
        self._states = tuple(states)
        self._exact = exact

    def replay(
        self, make: Callable[[], None], hidden: torch.Tensor, eager: Callable[[], torch.Tensor], rows: int | None = None
    ) -> None:
        """Replays by ``make``, which writes ``hidden`` [n, H], and compares its first ``rows`` (None: all) with what
        ``eager`` gives; ``hidden`` is the replay's afterwards. Raises ReplayError where they differ."""
        saved = [states.save() for states in self._states]
        place = hidden.data_ptr()
        hidden.fill_(torch.nan)
        make()
        replayed = hidden[:rows].clone()
        after = [states.save() for states in self._states]
        for states, before in zip(self._states, saved, strict=True):
            states.restore(before)
        twin = eager()
        if twin.data_ptr() != place:
            raise ReplayError(
                f"the eager forward of {hidden.shape[0]} rows writes to {twin.data_ptr():#x}, the captured one to "
                f"{place:#x}: a buffer was made anew since the capture; make it once and keep it"
            )
        self._compare(replayed, twin[:rows])
        for index, (states, content) in enumerate(zip(self._states, after, strict=True)):
            if self._exact and not torch.equal(states.save()[1], content[1]):
                raise ReplayError(f"a replay left other states than its eager twin, in group of states {index}")
        hidden[:rows].copy_(replayed)

    def _compare(self, replayed: torch.Tensor, twin: torch.Tensor) -> None:
        _refuse_poison(replayed, twin)
        bound = 0.0 if self._exact else TOLERANCE
        allowed = bound * twin.abs().amax(dim=1, keepdim=True)
        wrong = ~((replayed - twin).abs() <= allowed) & ~torch.isnan(twin)
        if bool(wrong.any()):
            row, column = (int(place) for place in torch.nonzero(wrong)[0])
            raise ReplayError(
                f"a replay of {replayed.shape[0]} rows differs from its eager twin in {int(wrong.any(dim=1).sum())} "
                f"rows, first at row {row}, column {column}: {float(replayed[row, column])} against "
                f"{float(twin[row, column])}. What is captured read a tensor that is no longer the step's, or a number "
                "of the host's that has changed"
            )


def _refuse_poison(replayed: torch.Tensor, twin: torch.Tensor) -> None:
    rows = (torch.isnan(replayed) & ~torch.isnan(twin)).any(dim=1)
    if not bool(rows.any()):
        return
    raise ReplayError(
        f"a replay left {int(rows.sum())} of {replayed.shape[0]} rows unwritten, the first of them row "
        f"{int(torch.nonzero(rows)[0])}: it writes elsewhere than the forward it was captured from, or read poisoned "
        "memory of its own before writing it"
    )
