"""``serve`` and ``run``: resolve, print, refuse what cannot work; then here, in the background, or in a container."""

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenspeed.cli.engine_choice import EngineChoice, Wanted, choose_engine
from tokenspeed.cli.first_screen import without_accelerators
from tokenspeed.cli.installation import refuse_foreign_distributions, refuse_small_shared_memory, require_engine
from tokenspeed.cli.output import ProgressLine, say, shout
from tokenspeed.cli.ports import claim_port, port_plan
from tokenspeed.cli.records import ServerError, ServerRecord, remove_record, write_record
from tokenspeed.cli.takeover import ReplaceMode, machine_without, server_to_replace, take_place
from tokenspeed.recipes.document import merge
from tokenspeed.recipes.machine import Machine, detect_machine
from tokenspeed.recipes.overrides import flag_values, set_values
from tokenspeed.recipes.plan import make_plan
from tokenspeed.recipes.plan_text import render_plan, render_settings
from tokenspeed.recipes.prepare import prepare
from tokenspeed.recipes.resolve import Resolution, resolve
from tokenspeed.recipes.schema import Vendor
from tokenspeed.telemetry.redaction import Redactor, known_secrets, secret_values

if TYPE_CHECKING:
    from tokenspeed.launch.early_engine import EarlyEngine


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """How to start, beside what: the options of ``run`` that are no keys of a recipe.

    Attributes:
        dry_run: print what would happen, and stop.
        detach: run in the background.
        engine: "container", "native", or "" to choose by what is here.
        vendor: whose devices count, in place of what is detected.
        image: of the container, in place of the profile's and the vendor's.
        replace: take the place of the server that runs on the port.
    """

    dry_run: bool = False
    detach: bool = False
    engine: Wanted = ""
    vendor: Vendor | None = None
    image: str = ""
    replace: ReplaceMode = ""


def resolve_target(
    target: str, profile: str | None, assignments: list[str], flags: Mapping[str, Any], machine: Machine
) -> Resolution:
    """Resolves with what the command line says; a flag wins over SET."""
    return resolve(target, machine, profile=profile, overrides=merge(set_values(assignments), flag_values(flags)))


def start(
    target: str,
    profile: str | None,
    assignments: list[str],
    flags: Mapping[str, Any],
    options: StartOptions,
    early: "EarlyEngine | None" = None,
) -> int:
    """Runs a server until it ends; returns the exit code. Raises the errors that main turns into messages.

    ``early``: an engine process that loads its libraries already, for a server in this process.
    """
    replaced = server_to_replace(options.replace, flags.get("port"))
    if replaced is not None:
        flags = {**flags, "host": replaced.host, "port": replaced.port}
    machine = detect_machine().told_vendor(options.vendor)
    if replaced is not None and options.replace == "after":
        machine = machine_without(replaced, machine)
    resolution = resolve_target(target, profile, assignments, flags, machine)
    plan = make_plan(resolution, machine)
    choice = _choice(resolution, options, replaced)
    say(*without_accelerators(resolution, machine))
    shout(*resolution.warnings)
    api = resolution.keys.api
    # This goes to the log of a server in the background or in a container, where no secret may stand.
    redact = Redactor(known_secrets() | secret_values(resolution.keys.env))
    shown = (*render_plan(plan), choice.line, port_plan(api.host, api.port), "settings", *render_settings(resolution))
    say(*map(redact, shown))
    if options.dry_run:
        say("command", *(redact(f"  {line}") for line in _command_lines(resolution, choice, machine)))
    else:
        resolution.refuse_missing()
    plan.refuse_misfit()
    if choice.problem:
        raise ServerError(choice.problem)
    if options.dry_run:
        say("nothing was started (dry run)")
        return 0
    port = replaced.port if replaced is not None else claim_port(api.host, api.port)
    if choice.engine is not None:
        from tokenspeed.cli.container_run import run_container

        return run_container(resolution, machine, choice, port, detach=options.detach)
    refuse_foreign_distributions()
    require_engine()
    refuse_small_shared_memory(resolution.keys.parallel.tp)
    if options.detach:
        from tokenspeed.cli.background import spawn_detached

        return spawn_detached(sys.argv[1:], port)
    return _serve_here(resolution, machine, port, replaced, options.replace, early)


def _choice(resolution: Resolution, options: StartOptions, replaced: ServerRecord | None) -> EngineChoice:
    if replaced is not None:
        return EngineChoice(None, line=f"engine    native, in the place of {replaced.name}")
    return choose_engine(options.engine, resolution, options.image)


def _serve_here(
    resolution: Resolution,
    machine: Machine,
    port: int,
    replaced: ServerRecord | None,
    mode: ReplaceMode,
    early: "EarlyEngine | None",
) -> int:
    """Serves in this process, in the place of ``replaced`` where that is given."""
    from tokenspeed.launch.handover import Place
    from tokenspeed.launch.serve import bind, serve

    try:
        place = Place(bind(resolution.keys.api.host, port)) if replaced is None else None
    except OSError as error:  # another process took it since it was looked at
        raise ServerError(str(error)) from error
    progress = ProgressLine()
    try:
        config = prepare(resolution, machine, progress)
    finally:
        progress.finish()
    config = config.model_copy(
        update={
            "api": config.api.model_copy(update={"port": port}),
            "settings": {**config.settings, "api.port": port},
        }
    )
    random = config.model.kind == "random"
    record = ServerRecord.of_this_process(config.served_name, config.api.host, port, log=config.log.file, random=random)
    if replaced is None:
        write_record(record)
    else:
        place = take_place(replaced, record, mode)
    try:
        return serve(config, place, early)
    finally:
        remove_record(record)


def _command_lines(resolution: Resolution, choice: EngineChoice, machine: Machine) -> list[str]:
    """The exact command that would run."""
    if choice.engine is None:
        return [shlex.join(["tokenspeed", *(argument for argument in sys.argv[1:] if argument != "--dry-run")])]
    from tokenspeed.cli.container_run import container_command
    from tokenspeed.recipes.container_command import shell_lines

    return shell_lines(container_command(resolution, machine, choice, detach=False), choice.image)
