"""Runs a part in a process of its own, within a bound of time; what it found comes back in a file."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.device_check.numerics import PREFIX, Progress, kernels_here
from scripts.device_check.results import KernelOutcome, PartResult

LAST_LINES = 5
GRACE_SECONDS = 15.0
"""What a part that is out of time has for ending its servers and engines."""


@dataclass(frozen=True)
class Child:
    """How a process ended.

    Attributes:
        result: what it found; None where it did not come to it.
        end: "ended", "ended with status 3", "killed by SIGSEGV" or "out of time".
        last_words: the end of what it wrote.
    """

    result: PartResult | None
    end: str
    last_words: str


def run_child(arguments: Sequence[str], limit: float, environment: Mapping[str, str]) -> Child:
    """Runs ``python -m scripts.device_check`` with these arguments, at most ``limit`` seconds long.

    Where it takes longer it is interrupted, so that it ends what it started, and its group is killed behind that.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder) / "result.json", Path(folder) / "log"
        command = [sys.executable, "-m", "scripts.device_check", *arguments, "--result", str(path)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        try:
            end = _end_of(process.wait(timeout=max(limit, 0.1)))
        except subprocess.TimeoutExpired:
            end = "out of time"
            _interrupt(process)
        finally:
            _kill_group(process)
        words = "\n".join(log.read_text("utf-8", errors="replace").strip().splitlines()[-LAST_LINES:])
        result = PartResult.from_json(json.loads(path.read_text("utf-8"))) if path.exists() else None
        return Child(result, end, words)


def _end_of(status: int) -> str:
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return "ended" if status == 0 else f"ended with status {status}"


def _interrupt(process: "subprocess.Popen[bytes]") -> None:
    """As Ctrl-C: servers that it started in the background have a session of their own, and only it knows them."""
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=GRACE_SECONDS)


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):  # all of it has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_isolated(name: str, arguments: Sequence[str], limit: float, environment: Mapping[str, str]) -> PartResult:
    """What a part found; where its process ended before that, how."""
    child = run_child(["--run-part", name, *arguments, "--seconds", str(limit)], limit, environment)
    if child.result is not None:
        return child.result
    if child.end == "out of time":
        return PartResult(name, "out of time", f"it took more than {limit:.0f} s; {child.last_words}")
    return PartResult(name, "crashed", f"{child.end}: {child.last_words}")


def run_family_isolated(
    family: str, arguments: Sequence[str], limit: float, environment: Mapping[str, str]
) -> PartResult:
    """The numerics of a family: where a kernel ends the process, the others go on in another one."""
    begin = time.monotonic()
    result = PartResult(PREFIX + family)
    with tempfile.TemporaryDirectory() as folder:
        while True:
            progress = Progress(Path(folder) / "progress.json")
            passed_over = ",".join(outcome.kernel for outcome in result.kernels)
            left = limit - (time.monotonic() - begin)
            own = ["--run-part", result.name, "--progress", str(Path(folder) / "progress.json"), "--done", passed_over]
            child = run_child([*own, *arguments], left, environment)
            done, running = progress.read()
            result.kernels += done
            progress.note([], "")
            if child.result is not None:
                return result.settle()
            if child.end == "out of time":
                return _cut_short(result, family, limit)
            if not running:
                return PartResult(result.name, "crashed", f"{child.end}: {child.last_words}", kernels=result.kernels)
            operation = next(k.spec.operation for k in kernels_here(family) if k.spec.name == running)
            result.kernels.append(
                KernelOutcome(running, operation, "crashed", details=(f"{child.end}: {child.last_words}",))
            )


def _cut_short(result: PartResult, family: str, limit: float) -> PartResult:
    """``result`` with the kernels that time did not reach."""
    reached = {outcome.kernel for outcome in result.kernels}
    missing = [kernel.spec for kernel in kernels_here(family) if kernel.spec.name not in reached]
    result.kernels += [KernelOutcome(spec.name, spec.operation, "not reached") for spec in missing]
    if result.settle().status == "passed" and missing:
        result.status = "out of time"
        result.reason = f"{len(missing)} kernels were not reached within {limit:.0f} s, {missing[0].name} the first"
    return result


def write_result(result: PartResult, path: Path) -> None:
    """What ``run_child`` reads."""
    path.write_text(json.dumps(asdict(result)), encoding="utf-8")
