"""``doctor``: looks for what would keep a model from running here; each finding has the line that mends it."""

import json
from collections.abc import Iterator
from dataclasses import asdict

from tokenspeed.cli import doctor_devices as devices
from tokenspeed.cli import doctor_host as host
from tokenspeed.cli.finding import Finding
from tokenspeed.cli.output import say
from tokenspeed.recipes.machine import Machine, detect_machine
from tokenspeed.recipes.plan import make_plan
from tokenspeed.recipes.resolve import Resolution, resolve
from tokenspeed.recipes.schema import Vendor
from tokenspeed.recipes.selection import DoesNotFit

EXIT_FAIL = 2


def examine(port: int, model: str | None, vendor: Vendor | None, *, as_json: bool) -> int:
    """Prints all findings, those for ``model`` too; 2 where one of them keeps a model from running."""
    findings = list(_findings(port, model, vendor))
    if as_json:
        say(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            say(f"{finding.level:<4}  {finding.what}" + (f"\n      -> {finding.mend}" if finding.mend else ""))
    return EXIT_FAIL if any(finding.level == "fail" for finding in findings) else 0


def _findings(port: int, model: str | None, vendor: Vendor | None) -> Iterator[Finding]:
    machine = detect_machine().told_vendor(vendor)
    resolution, fit = _model(model, machine)
    yield host.check_python()
    yield host.check_compiler()
    yield host.check_packages()
    yield host.check_cores(machine)
    yield host.check_memory(machine)
    yield host.check_huge_pages()
    yield host.check_locked_memory(machine)
    yield host.check_shared_memory(resolution)
    yield host.check_disk(resolution)
    yield host.check_caches()
    yield host.check_clock()
    yield host.check_port(port)
    yield from devices.check_accelerators(machine)
    yield from devices.check_driver(machine, resolution)
    yield from devices.check_device_files(machine)
    yield from devices.check_containers(machine, resolution)
    yield from fit


def _model(model: str | None, machine: Machine) -> tuple[Resolution | None, list[Finding]]:
    """What is to run, and whether it can; raises RecipeError for a model that nobody knows."""
    if model is None:
        return None, []
    mend = f"tokenspeed recipe plan {model} shows what it needs"
    try:
        resolution = resolve(model, machine)
    except DoesNotFit as error:
        return None, [Finding("fail", str(error).splitlines()[0], mend)]
    plan = make_plan(resolution, machine)
    problems = [*(f"unsupported: {feature}" for feature in resolution.missing), *plan.problems]
    what = f"{model}, profile {resolution.profile or '-'}"
    return resolution, [Finding("fail", f"{what}: {problem}", mend) for problem in problems] or [
        Finding("ok", f"{what}: fits")
    ]
