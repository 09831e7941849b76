"""The command line: arguments, files, and which of the three ways to run."""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tokenspeed.telemetry.api_keys import ApiKey, ApiKeyError, read_key_file
from tokenspeed_tui.controls import DEFAULT_INTERVAL, Controls
from tokenspeed_tui.observation import Source
from tokenspeed_tui.recording import Recorder, RecordingError, ReplaySource, read_recording

if TYPE_CHECKING:
    from tokenspeed_tui.admin import Administration

DEFAULT_URL = "http://127.0.0.1:8000"
EXIT_NO_SERVER = 1
EXIT_USAGE = 2


class UsageError(ValueError):
    """An argument or a file that cannot be used, in words for the person who gave it."""


class Feed(NamedTuple):
    """A source with what belongs to it: the URL it shows and whether it is a recording."""

    source: Source
    url: str
    replaying: bool


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="tokenspeed top",
        description="Shows what a running TokenSpeed server is doing: its requests by state, its KV cache, its rates.",
        epilog="Keys are listed on the screen; ? explains them. NO_COLOR in the environment turns colour off.",
    )
    parser.add_argument(
        "--url",
        default=os.environ.get("TOKENSPEED_URL") or DEFAULT_URL,
        help="the server (default: %(default)s; the environment variable TOKENSPEED_URL changes it)",
    )
    parser.add_argument(
        "--interval",
        type=_interval,
        default=DEFAULT_INTERVAL,
        metavar="SECONDS",
        help="time between polls, and between the steps of a replay (default: %(default)s)",
    )
    parser.add_argument("--once", action="store_true", help="print the screen once and exit; 1 where no server answers")
    parser.add_argument("--json", action="store_true", help="with --once: print JSON instead of the screen")
    parser.add_argument("--record", type=Path, metavar="FILE", help="append every observation to FILE (JSON lines)")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="show a recording instead of a server")
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="send the first key in FILE as a bearer token"
    )
    parser.add_argument("--theme", choices=("dark", "light"), default="dark", help="colours (default: %(default)s)")
    parser.add_argument(
        "--allow-admin",
        action="store_true",
        help="bind keys that abort a request, flush the cache and pause the engine; each asks first",
    )
    parser.add_argument(
        "--admin-url", metavar="URL", help="where --allow-admin finds the administration (the server's --admin-port)"
    )
    return parser


def run(argv: Sequence[str] | None) -> int:
    """Runs the dashboard; returns the exit status. A wrong option ends in SystemExit(2), as argparse does it."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.json and not arguments.once:
        parser.error("--json belongs to --once: the live screen cannot be printed as JSON")
    if arguments.replay and arguments.record:
        parser.error("--record and --replay exclude each other: a replay is a recording already")
    if arguments.allow_admin and (arguments.replay or arguments.once):
        parser.error("--allow-admin belongs to the live screen of a server: drop --replay and --once")
    if arguments.allow_admin and not arguments.admin_url:
        parser.error("--allow-admin needs --admin-url: start the server with --admin-port N, give http://127.0.0.1:N")
    if arguments.admin_url and not arguments.allow_admin:
        parser.error("--admin-url changes nothing without --allow-admin")
    try:
        with ExitStack() as stack:
            feed = _feed(arguments)
            recorder = stack.enter_context(_recorder(arguments.record)) if arguments.record else None
            return _once(arguments, feed, recorder) if arguments.once else _live(arguments, feed, recorder)
    except (UsageError, RecordingError) as error:
        print(f"tokenspeed top: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 130


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds") from error
    if not 0.05 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} s is outside 0.05 to 3600 s")
    return seconds


def _feed(arguments: argparse.Namespace) -> Feed:
    if arguments.replay is not None:
        observations = read_recording(arguments.replay)
        return Feed(ReplaySource(observations), observations[0].url, replaying=True)
    from tokenspeed_tui.client import HttpSource, normalised_url

    try:
        url = normalised_url(arguments.url)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return Feed(HttpSource(url, _api_key(arguments.api_key_file)), url, replaying=False)


def _administration(arguments: argparse.Namespace) -> "Administration | None":
    """The administration, with the first key of the file that opens it, or else the first."""
    if not arguments.allow_admin:
        return None
    from tokenspeed_tui.admin import HttpAdministration
    from tokenspeed_tui.client import normalised_url

    keys = _keys(arguments.api_key_file)
    key = next((entry for entry in keys if entry.admin), keys[0] if keys else None)
    try:
        url = normalised_url(arguments.admin_url)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return HttpAdministration(url, key.key if key is not None else None)


def _api_key(path: Path | None) -> str | None:
    """The first key of a file like the server's own."""
    keys = _keys(path)
    return keys[0].key if keys else None


def _keys(path: Path | None) -> list[ApiKey]:
    """The keys of a file; none without one."""
    if path is None:
        return []
    try:
        return read_key_file(path)
    except ApiKeyError as error:
        raise UsageError(str(error)) from error


def _recorder(path: Path) -> Recorder:
    try:
        return Recorder(path)
    except OSError as error:
        raise UsageError(f"the recording {path} cannot be written: {error.strerror}") from error


def _once(arguments: argparse.Namespace, feed: Feed, recorder: Recorder | None) -> int:
    from tokenspeed_tui.once import as_json, look, print_screen
    from tokenspeed_tui.render.header import START_HINT

    pause = None if feed.replaying else arguments.interval
    feed.source.watch_configuration(True)
    try:
        picture, observation = asyncio.run(look(feed.source, feed.url, pause=pause, recorder=recorder))
    except OSError as error:
        # Failures of the network never get here: they are observations.
        raise UsageError(f"the recording {arguments.record} cannot be written: {error.strerror}") from error
    if observation is None or (picture.error and not feed.replaying):
        print(f"tokenspeed top: {picture.error}; {START_HINT}", file=sys.stderr)
        return EXIT_NO_SERVER
    if arguments.json:
        print(as_json(picture, observation))
    else:
        controls = Controls(interval=arguments.interval, replaying=feed.replaying, ended=feed.replaying)
        print_screen(picture, observation, controls, sys.stdout)
    return 0


def _live(arguments: argparse.Namespace, feed: Feed, recorder: Recorder | None) -> int:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("the live screen needs a terminal; use --once, or --once --json in scripts")
    from tokenspeed_tui.app import Dashboard

    dashboard = Dashboard(
        feed.source,
        feed.url,
        interval=arguments.interval,
        recorder=recorder,
        replaying=feed.replaying,
        theme=arguments.theme,
        administration=_administration(arguments),
    )
    dashboard.run()
    return dashboard.return_code or 0
