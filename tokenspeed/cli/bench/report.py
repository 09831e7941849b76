"""What ``bench serve`` saw, as one JSON document. Its shape has a version; see docs/benchmarking.md."""

import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tokenspeed.cli.bench.answers import Answer
from tokenspeed.cli.bench.endpoint import Endpoint
from tokenspeed.cli.bench.load import Outcome
from tokenspeed.cli.bench.mixture import MixtureOutcome, PhaseFigures, phase_figures
from tokenspeed.cli.bench.statistics import Summary
from tokenspeed.cli.bench.tiers import Tiers
from tokenspeed.cli.records import ServerError
from tokenspeed.recipes.machine import Machine, detect_machine
from tokenspeed.recipes.resolved import GIB

SERVE_SCHEMA, SERVE_VERSION = "tokenspeed.bench.serve", 1


@dataclass(frozen=True)
class Level:
    """One load and what was seen of it; ``tiers`` of a server of ours."""

    summary: Summary
    outcome: Outcome
    tiers: Tiers | None = None


@dataclass(frozen=True)
class MixtureLevel:
    """What was seen of the streams and of the long prompts."""

    outcome: MixtureOutcome
    phases: Sequence[PhaseFigures]

    @classmethod
    def of(cls, outcome: MixtureOutcome) -> "MixtureLevel":
        return cls(outcome, phase_figures(outcome))


@dataclass
class ServeReport:
    """One run of ``bench serve``.

    Attributes:
        label: what to call it beside others.
        devices: that the server runs on; on a CPU the machine is one.
        prompts: "token ids" or "text".
        notes: what to know before comparing.
        interrupted: it was stopped before it had seen everything.
    """

    endpoint: Endpoint
    label: str
    devices: int
    workload: str
    described: str
    api: str
    prompts: str
    seed: int
    levels: list[Level] = field(default_factory=list)
    mixture: MixtureLevel | None = None
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False
    began: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def failed(self) -> bool:
        """Whether nothing was answered."""
        if self.mixture is not None:
            return not self.mixture.phases
        return not any(level.summary.completed for level in self.levels)

    @property
    def document(self) -> dict[str, Any]:
        """For JSON."""
        mixture = self.mixture
        return {
            "schema": SERVE_SCHEMA,
            "version": SERVE_VERSION,
            "command": sys.argv[1:],
            "label": self.label,
            "began": self.began.isoformat(timespec="seconds"),
            "client": client_facts(detect_machine()),
            "server": {
                "url": self.endpoint.url,
                "model": self.endpoint.model,
                "devices": self.devices,
                "abilities": asdict(self.endpoint.abilities),
                "facts": self.endpoint.facts,
            },
            "workload": {
                "name": self.workload,
                "described": self.described,
                "api": self.api,
                "prompts": self.prompts,
                "seed": self.seed,
            },
            "notes": self.notes,
            "interrupted": self.interrupted,
            "levels": [_level(level) for level in self.levels],
            "mixture": None if mixture is None else _mixture(mixture),
        }


def _level(level: Level) -> dict[str, Any]:
    began = level.outcome.began
    return {
        **asdict(level.summary),
        "tiers": None if level.tiers is None else asdict(level.tiers),
        "client_limited": level.summary.client_limited,
        "answers": [_answer(answer, began) for answer in level.outcome.answers],
    }


def _mixture(level: MixtureLevel) -> dict[str, Any]:
    outcome = level.outcome
    return {
        "whole": outcome.whole,
        "phases": [asdict(phase) for phase in level.phases],
        "prompts": [_answer(answer, outcome.began) for answer in outcome.prompts],
        "streams": [_answer(answer, outcome.began) for answer in outcome.streams],
    }


def _answer(answer: Answer, began: float) -> dict[str, Any]:
    """One request, in seconds from the beginning of its level."""

    def since(at: float) -> float:
        return round(at - began, 6)

    return {
        "conversation": answer.conversation,
        "turn": answer.turn,
        "scheduled": since(answer.scheduled),
        "sent": since(answer.sent),
        "first": since(answer.arrivals[0]) if answer.arrivals else None,
        "last": since(answer.arrivals[-1]) if answer.arrivals else None,
        "chunks": len(answer.arrivals),
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "cached_tokens": answer.cached_tokens,
        "error": answer.error,
    }


def client_facts(machine: Machine) -> dict[str, Any]:
    """The machine that measured, which is often the one that served."""
    devices = [f"{found.count} x {found.description}" for found in machine.accelerators]
    return {
        "cores": machine.cores,
        "memory_gib": round(machine.memory_bytes / GIB, 1),
        "architecture": machine.architecture,
        "isa": list(machine.isa),
        "accelerators": devices,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Writes a document; raises ServerError where that cannot be."""
    try:
        path.expanduser().write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    except OSError as error:
        raise ServerError(f"--json {path} cannot be written: {error.strerror}") from error
