"""``verify``: runs a profile's server through smoke, API shape, accuracy and performance, and writes what was seen."""

import asyncio
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from tokenspeed.cli.benchmark import read_key
from tokenspeed.cli.checks import CHECKS, PROSE_CHECK, Check, prose_logprob, run_checks
from tokenspeed.cli.client import connect
from tokenspeed.cli.measure import Measurement, measure, render_measurement
from tokenspeed.cli.output import say, shout
from tokenspeed.cli.records import ServerError, running_servers
from tokenspeed.cli.temporary_server import temporary_server
from tokenspeed.recipes.cache_folder import cache_directory
from tokenspeed.recipes.catalogue import LoadedRecipe
from tokenspeed.recipes.machine import Machine, detect_machine
from tokenspeed.recipes.resolve import Resolution, resolve
from tokenspeed.recipes.resolved import GIB
from tokenspeed.recipes.schema import RandomWeights
from tokenspeed.recipes.verified_text import write_verified

_ALLOWED_LOSS = 0.02
"""Where a recipe states no threshold: how much of the mean log-probability may be lost against its baseline."""


@dataclass(frozen=True)
class Outcome:
    """What was seen of one server."""

    checks: list[Check]
    measurement: Measurement
    prose: float | None

    @property
    def passed(self) -> bool:
        """Whether every check did, and something was measured: the section says which streams were."""
        return all(check.passed for check in self.checks) and bool(self.measurement.decode)


def verify_recipe(
    name: str, profile: str | None, key_file: str | None, seconds: float, *, write: bool, as_json: bool, dry_run: bool
) -> int:
    """Verifies a recipe's profile on this machine; 0 where all passed, 1 where something did not."""
    machine = detect_machine()
    resolution = resolve(name, machine, profile=profile)
    if resolution.loaded is None:
        raise ServerError(f"{name} is a path: there is no recipe to verify; see tokenspeed bench")
    resolution.refuse_missing()
    if dry_run:
        say(
            f"would check {resolution.served_name}, profile {resolution.profile}: {', '.join(CHECKS)}, accuracy, speed",
            f"would write {_state_path(resolution)}"
            + (f" and {resolution.loaded.path}" if write else "")
            + " (dry run)",
        )
        return 0
    with _server(resolution, own=write) as url:
        outcome = asyncio.run(_examine(url, read_key(key_file), resolution, seconds))
    section = _section(resolution, machine, outcome)
    path = _keep(resolution, section)
    if as_json:
        checks = [{"name": check.name, "passed": check.passed, "told": check.told} for check in outcome.checks]
        say(json.dumps({"passed": outcome.passed, "checks": checks, "verified": section, "file": str(path)}, indent=2))
    else:
        for check in outcome.checks:
            say(f"{'ok' if check.passed else 'FAIL':<4}  {check.name}: {check.told}")
        say(*render_measurement(outcome.measurement), f"kept in {path}")
    if write:
        _write(resolution, outcome, section)
    return 0 if outcome.passed else 1


@contextmanager
def _server(resolution: Resolution, *, own: bool) -> Iterator[str]:
    """The running server of that name, or one that is started for the purpose and stopped again.

    ``own`` asks for the latter: what is written into a recipe was seen of a server that runs as the recipe says.
    """
    served = next((record for record in running_servers() if record.name == resolution.served_name), None)
    if served is not None and not own:
        shout(f"using the server that runs at {served.url}; its settings may not be the recipe's")
        yield served.url
        return
    assert resolution.loaded is not None
    target = str(resolution.loaded.path)
    arguments = ["serve", target, "--profile", resolution.profile, "--host", "127.0.0.1"]
    with temporary_server(arguments, resolution.name) as url:
        yield url


async def _examine(url: str, api_key: str, resolution: Resolution, seconds: float) -> Outcome:
    async with connect(url, api_key) as client:
        if client.model != resolution.served_name:
            raise ServerError(f"{url} serves {client.model}, not {resolution.served_name}")
        checks = await run_checks(client)
        prose = None
        if not isinstance(resolution.weights, RandomWeights):
            prose = await prose_logprob(client)
            checks.append(_judge_prose(prose, resolution))
        return Outcome(checks, await measure(client, seconds), prose)


def _judge_prose(value: float, resolution: Resolution) -> Check:
    """Holds the model's opinion of plain text to what the recipe's last verification saw, where there is one."""
    assert resolution.loaded is not None
    verified = resolution.loaded.recipe.profiles[resolution.profile].verified
    declared = verified.accuracy.get(PROSE_CHECK) if verified is not None else None
    if declared is None:
        return Check("accuracy", True, f"{PROSE_CHECK} {value:.4f}; the recipe has no baseline yet")
    told = f"{PROSE_CHECK} {value:.4f}, baseline {declared.baseline:.4f}, threshold {declared.threshold:.4f}"
    return Check("accuracy", value >= declared.threshold, told)


def _section(resolution: Resolution, machine: Machine, outcome: Outcome) -> dict[str, Any]:
    """The verified section, as the schema has it."""
    assert resolution.loaded is not None
    drivers = sorted({found.driver for found in machine.accelerators if found.driver})
    section: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _commit(),
        "hardware": _hardware(machine),
        "workload": outcome.measurement.workload,
        "results": outcome.measurement.results,
    }
    if drivers:
        section["driver"] = ", ".join(drivers)
    if outcome.prose is not None:
        verified = resolution.loaded.recipe.profiles[resolution.profile].verified
        declared = verified.accuracy.get(PROSE_CHECK) if verified is not None else None
        value = round(outcome.prose, 4)
        baseline = declared.baseline if declared is not None else value
        threshold = declared.threshold if declared is not None else round(value * (1 + _ALLOWED_LOSS), 4)
        section["accuracy"] = {PROSE_CHECK: {"value": value, "baseline": baseline, "threshold": threshold}}
    return section


def _hardware(machine: Machine) -> str:
    """What it ran on, without what changes from hour to hour."""
    devices = ", ".join(f"{found.count} x {found.description}" for found in machine.accelerators)
    isa = ", ".join(machine.isa)
    host = f"{machine.cores} cores {machine.architecture} ({isa}), {machine.memory_bytes / GIB:.0f} GiB"
    return f"{devices} in {host}" if devices else host


def _commit() -> str:
    """The commit of this checkout; "" outside of one."""
    folder = Path(__file__).resolve().parent
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _keep(resolution: Resolution, section: dict[str, Any]) -> Path:
    """Writes the section beside the other state of this machine."""
    path = _state_path(resolution)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump({"verified": section}, sort_keys=False, width=120))
    except OSError as error:
        raise ServerError(f"{path} cannot be written ({error})") from error
    return path


def _state_path(resolution: Resolution) -> Path:
    return cache_directory() / "verified" / f"{resolution.name}-{resolution.profile}.yaml"


def _write(resolution: Resolution, outcome: Outcome, section: dict[str, Any]) -> None:
    """Puts the section into the recipe, unless something failed. Raises ServerError, RecipeError."""
    assert resolution.loaded is not None
    loaded: LoadedRecipe = resolution.loaded
    if not outcome.passed:
        raise ServerError(f"{loaded.path} was not changed: not everything passed")
    if not section["commit"]:
        raise ServerError(f"{loaded.path} was not changed: outside a git checkout there is no commit to name")
    write_verified(loaded.path, resolution.profile, section)
    say(f"written to {loaded.path}, profile {resolution.profile}; its status is yours to raise: status: verified")
