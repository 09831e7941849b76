"""What one command of the command line did, for tests that run it in their own process."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """Exit code, standard output, standard error."""

    code: int
    out: str
    err: str


Command = Callable[..., Outcome]
"""Runs a command line, one argument each."""
