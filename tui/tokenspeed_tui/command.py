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
from tokenspeed_tui.demo import URL as DEMO_URL
from tokenspeed_tui.demo import DemoSource
from tokenspeed_tui.local import Local
from tokenspeed_tui.observation import Source
from tokenspeed_tui.recording import Recorder, RecordingError, ReplaySource, read_recording
from tokenspeed_tui.web import WEB_PORT, WebAddress, parse_address

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
        action="append",
        default=[],
        help="the server; repeat it for several, a row each. Without it TOKENSPEED_URL of the environment names them, "
        f"else it is what runs here, or {DEFAULT_URL}",
    )
    parser.add_argument(
        "--fleet", action="store_true", help="show servers a row each, also where there is one, and find more here"
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
        "--demo",
        type=int,
        nargs="?",
        const=0,
        metavar="SEED",
        help="show the real scheduler at work on a scripted load: no server, no model; another SEED is another load",
    )
    parser.add_argument(
        "--web",
        type=_web_address,
        nargs="?",
        const=str(WEB_PORT),
        metavar="[HOST:]PORT",
        help=f"show it in a browser, on port {WEB_PORT} of this machine alone unless said otherwise",
    )
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


def run(argv: Sequence[str] | None, local: Local | None = None) -> int:
    """Runs the dashboard; returns the exit status. A wrong option ends in SystemExit(2), as argparse does it."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    _refuse(parser, arguments)
    try:
        if arguments.web:
            return _web(arguments.web, sys.argv[1:] if argv is None else argv, local)
        urls = [] if arguments.replay or arguments.demo is not None else _addresses(arguments, local)
        if len(urls) > 1 or arguments.fleet:
            return _fleet(arguments, urls, local)
        with ExitStack() as stack:
            feed = _feed(arguments, urls, local)
            recorder = stack.enter_context(_recorder(arguments.record)) if arguments.record else None
            return _once(arguments, feed, recorder) if arguments.once else _live(arguments, feed, recorder)
    except (UsageError, RecordingError) as error:
        print(f"tokenspeed top: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 130


def _refuse(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Ends with status 2 where options do not go together."""
    if arguments.json and not arguments.once:
        parser.error("--json belongs to --once: the live screen cannot be printed as JSON")
    if arguments.replay and arguments.demo is not None:
        parser.error("--demo and --replay exclude each other: each of them is what is shown")
    if arguments.replay and arguments.record:
        parser.error("--record and --replay exclude each other: a replay is a recording already")
    if arguments.web and (arguments.once or arguments.record):
        parser.error("--web shows the live screen: --once and --record are for the terminal")
    if arguments.allow_admin and (arguments.replay or arguments.once):
        parser.error("--allow-admin belongs to the live screen of a server: drop --replay and --once")
    if arguments.allow_admin and not arguments.admin_url:
        parser.error("--allow-admin needs --admin-url: start the server with --admin-port N, give http://127.0.0.1:N")
    if arguments.admin_url and not arguments.allow_admin:
        parser.error("--admin-url changes nothing without --allow-admin")
    if arguments.web and arguments.allow_admin:
        parser.error("--web only shows: whoever reaches the page could change the engine with --allow-admin")
    if arguments.fleet and (arguments.replay or arguments.demo is not None):
        parser.error("--fleet is of servers: drop --replay and --demo")


def in_browser() -> bool:
    """Whether textual-serve started this process and draws what it shows."""
    return "WebDriver" in os.environ.get("TEXTUAL_DRIVER", "")


def _web_address(text: str) -> WebAddress:
    try:
        return parse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds") from error
    if not 0.05 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} s is outside 0.05 to 3600 s")
    return seconds


def _addresses(arguments: argparse.Namespace, local: Local | None) -> list[str]:
    """The servers that are meant: those that were named, or those that run here, or where one would run."""
    from tokenspeed_tui.client import normalised_url

    named = arguments.url or os.environ.get("TOKENSPEED_URL", "").split()
    if not named and local is not None:
        named = [server.url for server in local.servers()]
    if not named and arguments.fleet:
        return []
    try:
        return list(dict.fromkeys(map(normalised_url, named or [DEFAULT_URL])))
    except ValueError as error:
        raise UsageError(str(error)) from error


def _fleet(arguments: argparse.Namespace, urls: list[str], local: Local | None) -> int:
    if arguments.record or arguments.allow_admin:
        raise UsageError(
            f"--record and --allow-admin are for one server, name it with --url: there are {len(urls)} here"
        )
    from tokenspeed_tui.client import HttpSource

    key = _api_key(arguments.api_key_file)

    def connect(url: str) -> Source:
        return HttpSource(url, key)

    if arguments.once:
        from tokenspeed_tui.fleet_once import print_fleet

        return asyncio.run(print_fleet(urls, connect, arguments.interval, as_json=arguments.json))
    _require_terminal()
    from tokenspeed_tui.fleet import Fleet

    given = bool(arguments.url or os.environ.get("TOKENSPEED_URL"))
    find = local.find if local is not None and (arguments.fleet or not given) else None
    fleet = Fleet(urls if given else [], connect, interval=arguments.interval, theme=arguments.theme, find=find)
    fleet.run()
    return fleet.return_code or 0


def _feed(arguments: argparse.Namespace, urls: list[str], local: Local | None) -> Feed:
    if arguments.replay is not None:
        observations = read_recording(arguments.replay)
        return Feed(ReplaySource(observations), observations[0].url, replaying=True)
    if arguments.demo is not None:
        return Feed(_demo(arguments.demo, local), DEMO_URL, replaying=False)
    from tokenspeed_tui.client import HttpSource

    (url,) = urls
    return Feed(HttpSource(url, _api_key(arguments.api_key_file)), url, replaying=False)


def _demo(seed: int, local: Local | None) -> Source:
    if local is None:
        raise UsageError("--demo runs the scheduler: start the dashboard with `tokenspeed top --demo`")
    try:
        return DemoSource(local.demo(seed))
    except RuntimeError as error:
        raise UsageError(str(error)) from error


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


def _web(address: WebAddress, argv: Sequence[str], local: Local | None) -> int:
    from tokenspeed_tui.web import serve_page

    start = local.command if local is not None else (sys.executable, "-m", "tokenspeed_tui")
    if not address.is_local:
        print(f"note: whoever reaches {address.url} sees this server's requests: there is no login", file=sys.stderr)
    try:
        serve_page([*start, *without_web(argv)], address)
    except RuntimeError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"--web: {address.url} cannot be listened on: {error.strerror or error}") from error
    return 0


def without_web(argv: Sequence[str]) -> list[str]:
    """The arguments without --web and its address."""
    kept: list[str] = []
    for position, argument in enumerate(argv):
        if argument == "--web" or argument.startswith("--web="):
            continue
        if position and argv[position - 1] == "--web" and not argument.startswith("-"):
            continue
        kept.append(argument)
    return kept


def _require_terminal() -> None:
    if not (in_browser() or (sys.stdin.isatty() and sys.stdout.isatty())):
        raise UsageError("the live screen needs a terminal; use --once, or --once --json in scripts")


def _live(arguments: argparse.Namespace, feed: Feed, recorder: Recorder | None) -> int:
    _require_terminal()
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
