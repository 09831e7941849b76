"""``serve`` and ``run``: resolve, print, refuse what cannot work, fetch, then hand over to the launch room."""

import errno
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

from tokenspeed.cli.output import ProgressLine, say, shout
from tokenspeed.cli.servers import ServerError, ServerRecord, record_running, spawn_detached
from tokenspeed.recipes.catalogue import find_recipe
from tokenspeed.recipes.document import RecipeError, merge
from tokenspeed.recipes.machine import Machine, detect_machine
from tokenspeed.recipes.overrides import flag_values, set_values
from tokenspeed.recipes.plan import make_plan, render_plan, render_settings
from tokenspeed.recipes.prepare import prepare
from tokenspeed.recipes.resolve import Resolution, resolve
from tokenspeed.recipes.weights import fetch, verify

FOREIGN_DISTRIBUTIONS = ("tokenspeed", "tokenspeed-scheduler", "tokenspeed-kernel", "tokenspeed-mla", "tokenspeed-tui")
"""Distributions of another project that bring our import names."""


def resolve_target(
    target: str, profile: str | None, assignments: list[str], flags: Mapping[str, Any], machine: Machine
) -> Resolution:
    """Resolves with what the command line says; a flag wins over SET."""
    return resolve(target, machine, profile=profile, overrides=merge(set_values(assignments), flag_values(flags)))


def require_recipe(name: str) -> None:
    """Raises RecipeError where ``name`` is no recipe: a path is for ``serve``."""
    if name.endswith((".yaml", ".yml")):
        return
    try:
        find_recipe(name)
    except RecipeError as error:
        hint = f"; a file or folder is served by: tokenspeed serve {name}" if os.path.exists(name) else ""
        raise RecipeError(f"{error}{hint}") from None


def start(
    target: str, profile: str | None, assignments: list[str], flags: Mapping[str, Any], *, dry_run: bool, detach: bool
) -> int:
    """Runs a server until it ends; returns the exit code. Raises the errors that main turns into messages."""
    machine = detect_machine()
    resolution = resolve_target(target, profile, assignments, flags, machine)
    plan = make_plan(resolution, machine)
    shout(*resolution.warnings)
    say(*render_plan(plan), "settings", *render_settings(resolution))
    if dry_run:
        plan.refuse_misfit()
        say("nothing was started (dry run)")
        return 0
    resolution.refuse_missing()
    plan.refuse_misfit()
    port = claim_port(resolution.keys.api.host, resolution.keys.api.port)
    refuse_foreign_distributions()
    require_engine()
    if detach:
        return spawn_detached(sys.argv[1:], resolution.keys.api.host, port)
    progress = ProgressLine()
    try:
        config = prepare(resolution, machine, progress)
    finally:
        progress.finish()
    config = config.model_copy(update={"api": config.api.model_copy(update={"port": port})})
    record = ServerRecord.of_this_process(config.served_name, config.api.host, port)
    with record_running(record):
        from tokenspeed.launch.serve import serve

        return serve(config)


def pull_weights(target: str, profile: str | None) -> int:
    """Fetches the weights of a recipe's profile, or checks the ones that are here; returns the exit code."""
    machine = detect_machine()
    resolution = resolve(target, machine, profile=profile)
    if resolution.located.present and resolution.located.path:
        say(f"{resolution.located.path} is here", verify(resolution.weights))
        return 0
    progress = ProgressLine()
    try:
        source = fetch(resolution.weights, progress)
    finally:
        progress.finish()
    say(source.path or "random weights: nothing to fetch")
    return 0


def claim_port(host: str, port: int) -> int:
    """Returns the port, a free one for 0; raises ServerError where another process listens or the host is not ours."""
    try:
        with socket.create_server((host, port), family=_family(host), reuse_port=False) as probe:
            return int(probe.getsockname()[1])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            way_out = f"--port {port + 1} (make run PORT={port + 1})"
            raise ServerError(
                f"port {port} on {host} is taken: choose another with {way_out}, or tokenspeed stop"
            ) from None
        if error.errno == errno.EACCES:
            raise ServerError(f"port {port} needs root: choose one above 1023 with --port") from None
        raise ServerError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; see --host and --port"
        ) from None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def refuse_foreign_distributions() -> None:
    """Raises ServerError where another project's distribution owns one of our import names."""
    from importlib.metadata import PackageNotFoundError, version

    for name in FOREIGN_DISTRIBUTIONS:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        raise ServerError(
            f"the distribution {name} {found} is installed and brings an import name of ours; "
            f"remove it: pip uninstall {name}, then install this project again"
        )


def require_engine() -> None:
    """Raises ServerError where the base is installed without its engine."""
    from importlib.util import find_spec

    absent = [name for name in ("torch", "tokenspeed_scheduler", "tokenspeed_kernel") if find_spec(name) is None]
    if absent:
        raise ServerError(
            f"the engine is not installed ({', '.join(absent)} missing): "
            "make run installs everything, docs/dependencies.md says how by hand"
        )
