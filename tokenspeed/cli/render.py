"""``recipe render``: a recipe as a container's command line, a compose file, or manifests for Kubernetes."""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tokenspeed.cli.output import say, shout
from tokenspeed.recipes.catalogue import load_hardware
from tokenspeed.recipes.container import container_spec
from tokenspeed.recipes.container_command import ContainerEngine, run_command, shell_lines
from tokenspeed.recipes.document import RecipeError, merge
from tokenspeed.recipes.machine import Machine, described_machine, detect_machine
from tokenspeed.recipes.overrides import flag_values, set_values
from tokenspeed.recipes.plan import Plan, make_plan
from tokenspeed.recipes.render.build import deployment_of
from tokenspeed.recipes.render.compose import compose_file
from tokenspeed.recipes.render.kubernetes import Workload, manifests
from tokenspeed.recipes.resolve import Resolution, resolve
from tokenspeed.telemetry.redaction import is_secret_name

Form = Literal["container", "compose", "kubernetes"]


def render_recipe(
    target: str,
    form: Form,
    profile: str | None,
    assignments: list[str],
    flags: Mapping[str, Any],
    *,
    hardware: str | None = None,
    nodes: int | None = None,
    workload: Workload = "leader-worker-set",
    monitoring: bool = False,
    output: str | None = None,
) -> int:
    """Prints the text, or writes it to ``output``. Raises the errors that main turns into messages.

    What is unsupported or does not fit is rendered all the same, and said loudly.
    """
    machine = described_machine(load_hardware(hardware)) if hardware else detect_machine()
    if nodes is not None:
        assignments = [*assignments, f"parallel.nodes={nodes}"]
    overrides = merge(set_values(assignments), flag_values(flags))
    resolution = resolve(target, machine, profile=profile, overrides=overrides)
    _refuse_secrets(resolution)
    plan = make_plan(resolution, machine)
    shout(*resolution.warnings, *_doubts(resolution, plan))
    if form == "container":
        text = _container(resolution, machine, portable=hardware is not None, monitoring=monitoring)
    else:
        command = ("tokenspeed", *without_output(sys.argv[1:]))
        deployment = deployment_of(resolution, machine, plan, command, monitoring=monitoring)
        text = compose_file(deployment) if form == "compose" else manifests(deployment, workload)
    if output is None:
        say(text.rstrip("\n"))
    else:
        _write(Path(output), text)
        say(f"wrote {output}; its first lines say how to start it")
    return 0


def _refuse_secrets(resolution: Resolution) -> None:
    """What is rendered is kept, sent and committed, so it holds no secret. Raises RecipeError."""
    named = [name for name, value in resolution.keys.env.items() if value and is_secret_name(name)]
    if named:
        place = resolution.sources[f"env.{named[0]}"]
        raise RecipeError(
            f"{place}: env.{named[0]} looks like a secret, and a rendered file would hold its value; take it away and "
            "give it as a file: the hub's token and the API key are read from /run/secrets (docs/deploying.md)"
        )


def _doubts(resolution: Resolution, plan: Plan) -> list[str]:
    lines = []
    if resolution.missing:
        what = f"profile {resolution.profile} of {resolution.name}" if resolution.profile else resolution.name
        lines.append(f"{what} is unsupported, the engine refuses to start it: {'; '.join(resolution.missing)}")
    return lines + [f"does not fit {plan.machine.summary}: {problem}" for problem in plan.problems]


def _container(resolution: Resolution, machine: Machine, *, portable: bool, monitoring: bool) -> str:
    if monitoring:
        raise RecipeError("--monitoring is for --as compose and --as kubernetes: one command starts one container")
    if resolution.keys.parallel.nodes > 1:
        raise RecipeError("one command starts a container on one machine; for several nodes take --as kubernetes")
    program: Literal["docker", "podman"] = (
        "podman" if shutil.which("podman") and not shutil.which("docker") else "docker"
    )
    uid = 0 if portable else os.getuid()
    spec = container_spec(resolution, machine, portable=portable)
    command = run_command(spec, ContainerEngine(program=program, uid=uid), os.environ)
    return "\n".join(shell_lines(command, spec.image))


def without_output(arguments: list[str]) -> list[str]:
    """The command line without -o FILE: the same text, wherever it is kept."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip or argument.startswith(("--output=", "-o")):
            skip = argument == "-o"
        elif argument == "--output":
            skip = True
        else:
            kept.append(argument)
    return kept


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise RecipeError(f"{path} cannot be written: {error.strerror or error}; name another with -o") from None
