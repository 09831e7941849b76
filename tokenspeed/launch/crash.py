"""Crash bundles: what is known when an engine process dies, in a folder of its own that a person can send on.

Nothing here may stand in the way of the restart: the facts that vanish are taken at once, everything else is done on a
thread, and what goes wrong there is one line in the log.
"""

import contextlib
import json
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tokenspeed.engine.supervisor import EXIT_CONFIGURATION, EngineDeath
from tokenspeed.launch.engine_streams import EngineOutput
from tokenspeed.launch.facts import environment_facts
from tokenspeed.recipes.cache_folder import cache_directory
from tokenspeed.recipes.resolved import ResolvedConfig
from tokenspeed.telemetry.redaction import Redactor
from tokenspeed.telemetry.snapshot import StateSnapshot

logger = logging.getLogger(__name__)

KEPT = 10
"""So many bundles stay; the oldest go."""

LONGEST_FILE = 1 << 20
"""Bytes of one file of a bundle; of a log the end is kept, of others the beginning."""

LAST_WORDS_S = 1.0
"""How long a dead engine's output may still take to arrive."""

_UNFINISHED = ".unfinished-"


def crash_directory() -> Path:
    """Where bundles are kept."""
    return cache_directory() / "crashes"


def crash_bundles(root: Path) -> list[Path]:
    """Returns the bundles, the oldest first."""
    with contextlib.suppress(OSError):
        return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    return []


@dataclass(frozen=True, kw_only=True)
class Crash:
    """One death and what is known of it.

    Attributes:
        when: seconds since the epoch.
        engine: what it said of itself when it became ready, kernels included.
        snapshot: its last one, with the counts of the states and the KV blocks.
        server_log, engine_log: the last lines of both processes.
        traceback: the Python stacks of a fatal signal.
        others: of an engine of several ranks, by the names of their files: what the other ranks left of the same.
    """

    when: float
    death: EngineDeath
    config: ResolvedConfig
    engine: Mapping[str, object]
    snapshot: StateSnapshot | None
    server_log: str = ""
    engine_log: str = ""
    traceback: str = ""
    environment: Mapping[str, object] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)


def write_bundle(root: Path, crash: Crash, redact: Redactor) -> Path:
    """Writes a bundle and removes the oldest beyond KEPT; returns its folder. Raises OSError.

    The folder appears whole or not at all.
    """
    root.mkdir(parents=True, exist_ok=True)
    _forget_unfinished(root)
    unfinished = root / f"{_UNFINISHED}{os.getpid()}-{crash.death.pid}"
    unfinished.mkdir(mode=0o700)
    try:
        for name, text in _files(crash, redact).items():
            (unfinished / name).write_text(text, encoding="utf-8", errors="replace")
        path = _free_name(root, crash)
        unfinished.rename(path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    for old in crash_bundles(root)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return path


def _files(crash: Crash, redact: Redactor) -> dict[str, str]:
    texts = {
        "crash.json": _json(redact.values(_summary(crash))),
        "config.json": _json(redact.values(crash.config.model_dump(mode="json"))),
        "environment.json": _json(crash.environment),
        "engine.log": redact(_end(crash.engine_log)),
        "server.log": redact(_end(crash.server_log)),
    }
    if crash.snapshot is not None:
        snapshot = msgspec.to_builtins(crash.snapshot)
        texts["snapshot.json"] = _json(redact.values(snapshot))
    if crash.traceback:
        texts["traceback.txt"] = redact(crash.traceback)
    texts |= {name: redact(_end(text)) for name, text in crash.others.items()}
    return {name: text[:LONGEST_FILE] for name, text in texts.items()}


def _summary(crash: Crash) -> dict[str, object]:
    death = crash.death
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(crash.when)),
        "cause": death.cause,
        "exit_status": death.status,
        "signal": signal.Signals(-death.status).name if -death.status in set(signal.Signals) else None,
        "configuration_error": death.status == EXIT_CONFIGURATION,
        "pid": death.pid,
        "ran_s": round(death.ran_s, 3),
        "was_ready": death.was_ready,
        "recipe": crash.config.recipe,
        "profile": crash.config.profile,
        "recipe_hash": crash.config.recipe_hash,
        "model": crash.config.served_name,
        "journal": crash.config.scheduler.journal or None,
        "engine": dict(crash.engine),
    }


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n"


def _end(text: str) -> str:
    return text[-LONGEST_FILE:]


def _free_name(root: Path, crash: Crash) -> Path:
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(crash.when))
    base = f"{stamp}-{crash.config.name}".replace("/", "_")
    path, number = root / base, 2
    while path.exists():
        path, number = root / f"{base}-{number}", number + 1
    return path


def _forget_unfinished(root: Path) -> None:
    """Removes what processes left that ended while they wrote; an hour is longer than any writing takes."""
    for path in root.glob(f"{_UNFINISHED}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > 3600:
                shutil.rmtree(path, ignore_errors=True)


class CrashReporter:
    """Writes a bundle for each engine that ends unasked.

    Args:
        config: of the engine.
        output: of the engine, of several ranks of rank 0.
        other_outputs: of the other ranks.
        redact: blanks secrets.
        server_log: returns the last lines of this process's own log.
        engine_facts: returns what the engine said of itself, and its last snapshot.
        on_written: hears each bundle's path, on the thread that wrote it.
    """

    def __init__(
        self,
        *,
        config: ResolvedConfig,
        output: EngineOutput,
        redact: Redactor,
        server_log: Callable[[], str],
        engine_facts: Callable[[], tuple[Mapping[str, object], StateSnapshot | None]],
        on_written: Callable[[Path], None],
        other_outputs: Sequence[EngineOutput] = (),
    ) -> None:
        self._config = config
        self._output = output
        self._other_outputs = list(other_outputs)
        self._redact = redact
        self._server_log = server_log
        self._engine_facts = engine_facts
        self._on_written = on_written
        self._thread: threading.Thread | None = None

    def engine_died(self, death: EngineDeath) -> None:
        """Takes what will be gone in a moment and starts writing. Does not wait."""
        when = time.time()
        facts, snapshot = self._engine_facts()
        traceback = self._output.traceback()
        tracebacks = {
            f"rank{rank}-traceback.txt": text
            for rank, output in enumerate(self._other_outputs, 1)
            if (text := output.traceback())
        }
        ends = [output.relay.end_of_last() for output in (self._output, *self._other_outputs)]

        def write() -> None:
            for relay_ended in ends:
                relay_ended.wait(LAST_WORDS_S)
            logs = {f"rank{rank}.log": output.relay.last_lines() for rank, output in enumerate(self._other_outputs, 1)}
            crash = Crash(
                when=when,
                death=death,
                config=self._config,
                engine=facts,
                snapshot=snapshot,
                server_log=self._server_log(),
                engine_log=self._output.relay.last_lines(),
                traceback=traceback,
                environment=environment_facts(self._redact),
                others=logs | tracebacks,
            )
            path = write_bundle(crash_directory(), crash, self._redact)
            logger.error("crash bundle: %s", path)
            self._on_written(path)

        for text in filter(None, (traceback, *tracebacks.values())):
            logger.error("the engine's Python stacks when it ended:\n%s", text.rstrip())
        self._thread = threading.Thread(target=_guarded, args=(write,), name="crash bundle", daemon=True)
        self._thread.start()

    def finish(self, timeout_s: float) -> None:
        """Waits for the bundle that is being written, at most so long."""
        if self._thread is not None:
            self._thread.join(timeout_s)


def _guarded(write: Callable[[], None]) -> None:
    try:
        write()
    except OSError as error:
        logger.warning("no crash bundle: %s cannot be written: %s", error.filename or crash_directory(), error.strerror)
    except Exception:
        logger.exception("no crash bundle")
