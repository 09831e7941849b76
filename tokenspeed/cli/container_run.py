"""Runs a server in a container: its output is the operator's terminal, or it stays in the background."""

import os
import subprocess
import sys
from dataclasses import replace

from tokenspeed.cli.background import LINES_AFTER_READY, says_ready
from tokenspeed.cli.containers import exit_code, remove_ended
from tokenspeed.cli.engine_choice import EngineChoice
from tokenspeed.cli.output import say
from tokenspeed.cli.records import ServerError, ServerRecord, start_time, write_record
from tokenspeed.recipes.container import ContainerSpec, container_spec
from tokenspeed.recipes.container_command import ContainerError, run_command
from tokenspeed.recipes.machine import Machine
from tokenspeed.recipes.resolve import Resolution
from tokenspeed.recipes.schema import HuggingFaceWeights, RandomWeights


def container_command(resolution: Resolution, machine: Machine, choice: EngineChoice, *, detach: bool) -> list[str]:
    """The exact command that runs the server. Raises ServerError."""
    return _command(_spec(resolution, machine, choice), choice, detach=detach)


def run_container(resolution: Resolution, machine: Machine, choice: EngineChoice, port: int, *, detach: bool) -> int:
    """Runs it; in the foreground this process becomes the container engine's program, whose signals reach the server.

    Detached, it waits until the server is ready and returns the exit code. Raises ServerError.
    """
    assert choice.engine is not None
    spec = _spec(resolution, machine, choice, port)
    command = _command(spec, choice, detach=detach)
    program = choice.engine.program
    remove_ended(program, spec.name)
    record = ServerRecord(
        pid=0 if detach else os.getpid(),
        started=0 if detach else start_time(os.getpid()) or 0,
        name=resolution.served_name,
        host=spec.host,
        port=port,
        container=spec.name,
        program=program,
        grace_s=spec.grace_s,
        random=isinstance(resolution.weights, RandomWeights),
    )
    if not detach:
        write_record(record)
        sys.stdout.flush()
        os.execvp(program, command)
    started = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if started.returncode != 0:
        raise ServerError(f"{program} did not start {spec.image}: {started.stderr.strip() or 'it says nothing'}")
    write_record(record)
    say(f"starting in the background, container {spec.name}; log: tokenspeed logs --port {port}")
    return _wait_ready(record)


def _wait_ready(record: ServerRecord) -> int:
    """Shows what the server writes, to the end of its banner; the container's exit code where it ends before."""
    command = [record.program, "logs", "--follow", record.container]
    left = None
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as shown:
        assert shown.stdout is not None
        for line in shown.stdout:
            say(line.rstrip("\n"))
            left = LINES_AFTER_READY if says_ready(line) else left - 1 if left is not None else None
            if left == 0:
                shown.terminate()
                return 0
    return exit_code(record.program, record.container) or 1


def _spec(resolution: Resolution, machine: Machine, choice: EngineChoice, port: int | None = None) -> ContainerSpec:
    if port is not None and port != resolution.keys.api.port:  # 0 was asked for
        keys = resolution.keys
        api = keys.api.model_copy(update={"port": port})
        resolution = replace(resolution, keys=keys.model_copy(update={"api": api}))
    gated = isinstance(resolution.weights, HuggingFaceWeights)
    return container_spec(
        resolution,
        machine,
        image=choice.image,
        token_file=os.environ.get("HF_TOKEN_PATH", "") if gated else "",
        certificates=os.environ.get("SSL_CERT_FILE", ""),
    )


def _command(spec: ContainerSpec, choice: EngineChoice, *, detach: bool) -> list[str]:
    assert choice.engine is not None
    try:
        return run_command(spec, choice.engine, os.environ, detach=detach)
    except ContainerError as error:
        raise ServerError(str(error)) from error
