"""``env``: what a report of a fault should hold, on the screen or as one file to send."""

import io
import json
import os
import pkgutil
import tarfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from tokenspeed.cli.output import say
from tokenspeed.cli.records import ServerError, running_servers
from tokenspeed.launch.facts import OUR_DISTRIBUTIONS, THIRD_PARTY, environment_facts, installed
from tokenspeed.recipes.cache_folder import cache_directory
from tokenspeed.telemetry.redaction import Redactor, known_secrets

__all__ = ["OUR_DISTRIBUTIONS", "THIRD_PARTY", "installed", "show_environment", "write_report"]

_LOG_BYTES = 1 << 20
_LOGS = 3
_CRASHES = 2
"""So many of the newest go into a report."""


def show_environment(*, as_json: bool, kernels: bool) -> int:
    """Prints versions and the machine; with ``kernels`` also what runs here, which takes the seconds torch takes."""
    facts = _facts(Redactor(known_secrets()), kernels=kernels)
    if as_json:
        say(json.dumps(facts, indent=2))
    else:
        width = max(map(len, facts))
        for name, value in facts.items():
            shown = " ".join(f"{key}={item}" for key, item in value.items()) if isinstance(value, dict) else value
            say(f"{name:<{width}}  {shown or 'none'}")
    return 0


def write_report(path: str) -> int:
    """Writes a .tar.gz with the facts, the last crash bundles and the ends of the last logs; secrets are blanked.

    Raises ServerError where the file cannot be written or is there already.
    """
    redact = Redactor(known_secrets())
    target = Path(path).expanduser()
    names: list[str] = []
    try:
        # Only the owner may read it, and nothing that is there is overwritten.
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name, text in _report(redact):
                _add(archive, f"tokenspeed-report/{name}", text)
                names.append(name)
    except FileExistsError:
        raise ServerError(f"{target} is there already: choose another name") from None
    except OSError as error:
        raise ServerError(f"{target} cannot be written: {error.strerror}") from None
    say(f"{target}:", *(f"  {name}" for name in names), "Read it before you send it: it has what the logs have.")
    return 0


def _report(redact: Redactor) -> Iterator[tuple[str, str]]:
    from tokenspeed.launch.crash import crash_bundles, crash_directory  # the supervisor with it: only where needed

    yield "environment.json", json.dumps(_facts(redact, kernels=True), indent=2) + "\n"
    for folder in crash_bundles(crash_directory())[-_CRASHES:]:
        for file in sorted(folder.iterdir()):
            yield f"crashes/{folder.name}/{file.name}", redact(_end_of(file))
    for file in _log_files():
        yield f"logs/{file.name}", redact(_end_of(file))


def _log_files() -> list[Path]:
    """The newest logs of servers in the background, and the files that running ones write to."""
    named = {Path(record.log) for record in running_servers() if record.log}
    kept = [path for path in {*(cache_directory() / "logs").glob("*.log"), *named} if path.is_file()]
    return sorted(kept, key=lambda path: path.stat().st_mtime, reverse=True)[:_LOGS]


def _end_of(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LOG_BYTES))
        return file.read(_LOG_BYTES).decode(errors="replace")


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    data = text.encode()
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), 0o600
    archive.addfile(member, io.BytesIO(data))


def _facts(redact: Redactor, *, kernels: bool) -> dict[str, object]:
    return {
        **environment_facts(redact),
        "attention backends": _files_of("tokenspeed.device.attention.backends"),
        "sampling backends": _files_of("tokenspeed.device.sampling.backends"),
        **(_kernels() if kernels else {"kernels": "tokenspeed env --kernels lists them"}),
    }


def _files_of(package: str) -> str:
    """The modules of a package of which each file is a backend; nothing of it is imported."""
    found = find_spec(package)
    places = found.submodule_search_locations if found is not None else None
    return ", ".join(sorted(module.name for module in pkgutil.iter_modules(places))) if places else "none"


def _kernels() -> dict[str, str]:
    """Per backend the solutions, and per operation the kernels, that run on this machine."""
    if installed("torch") is None:
        return {"kernels": "not known without torch"}
    from tokenspeed.launch.backends import backend_facts
    from tokenspeed_kernel.platform import current_platform
    from tokenspeed_kernel.plugins.loading import loaded_registry

    registry, here = loaded_registry(), current_platform()
    return backend_facts() | {
        operation.name: ", ".join(
            kernel.spec.name
            for kernel in registry.kernels(operation.family, operation.mode)
            if kernel.spec.capability.refusal(here) is None
        )
        for operation in registry.operations()
    }
