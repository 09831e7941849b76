"""``--once``: one look, printed, for scripts and for outputs that are no terminal."""

import asyncio
import os
import shutil
import time
from typing import Any, TextIO

import msgspec
from rich.console import Console
from rich.text import Text

from tokenspeed_tui.controls import Controls
from tokenspeed_tui.observation import Observation, Source
from tokenspeed_tui.picture import Picture, advance
from tokenspeed_tui.rates import total_hit_rate
from tokenspeed_tui.recording import Recorder
from tokenspeed_tui.render import render_screen
from tokenspeed_tui.themes import THEMES

LONGEST_WAIT_S = 3.0


async def look(
    source: Source, url: str, *, pause: float | None, recorder: Recorder | None = None
) -> tuple[Picture, Observation | None]:
    """Reads a source until there are two snapshots to take rates from; an idle engine sends one a second.

    Args:
        source: a server or a recording.
        url: of the server, for the picture.
        pause: seconds between looks at a server, of which no more follow after LONGEST_WAIT_S, nor after one that
            brought no snapshot; None reads a recording to its end.
        recorder: gets each observation.

    Returns the picture and the last observation (None where the source brought none), which has the configuration as
    it was last told.
    """
    picture, last = Picture(url=url), None
    given_up = time.monotonic() + LONGEST_WAIT_S
    async for observation in source.observations():
        if recorder is not None:
            recorder.write(observation)
        picture, last = advance(picture, observation), _with_configuration(observation, last)
        if pause is None:
            continue
        if not picture.samples or picture.error or len(picture.samples) > 1 or time.monotonic() + pause > given_up:
            break
        await asyncio.sleep(pause)
    return picture, last


def _with_configuration(observation: Observation, last: Observation | None) -> Observation:
    """The observation with the configuration of the last one where it brought nothing new."""
    if last is None or observation.configuration is not None or observation.configuration_error:
        return observation
    return msgspec.structs.replace(
        observation, configuration=last.configuration, configuration_error=last.configuration_error
    )


def print_screen(picture: Picture, observation: Observation, controls: Controls, output: TextIO) -> None:
    """Prints the screen as it stood when the observation was made; in colour only on a terminal without NO_COLOR."""
    columns, rows = shutil.get_terminal_size((80, 24))
    print_lines(render_screen(picture, controls, observation.time, columns, rows - 1), columns, output)


def print_lines(lines: list[Text], columns: int, output: TextIO) -> None:
    """Prints lines without what is empty at their ends; in colour only on a terminal without NO_COLOR."""
    theme = THEMES["plain" if os.environ.get("NO_COLOR") else "terminal"]
    console = Console(file=output, width=columns, highlight=False, markup=False, emoji=False, theme=theme)
    for line in lines:
        line.rstrip()
    while lines and not lines[-1].plain:
        lines.pop()
    for line in lines:
        console.print(line, no_wrap=True, overflow="crop", crop=False)


def as_json(picture: Picture, observation: Observation) -> str:
    """The same knowledge as one JSON object; what is unknown is null. ``state`` and ``configuration`` are
    the server's answers as they came."""
    return msgspec.json.format(msgspec.json.encode(as_plain(picture, observation)), indent=2).decode()


def as_plain(picture: Picture, observation: Observation) -> dict[str, Any]:
    """What ``as_json`` writes, as plain data."""
    rates, room, snapshot = picture.rates, picture.room, picture.snapshot
    return {
        "url": picture.url,
        "time": observation.time,
        "error": picture.error or None,
        "probes": {
            "live": picture.live.passed,
            "ready": picture.ready.passed,
            "progress": picture.progress.passed,
        },
        "data_age_s": picture.data_age(observation.time),
        "rates": {
            "span_s": rates.span_s,
            "prefill_tokens_per_s": rates.prefill_tokens,
            "decode_tokens_per_s": rates.decode_tokens,
            "steps_per_s": rates.steps,
            "finished_per_s": rates.finished,
            "aborted_per_s": rates.aborted,
            "retractions_per_s": rates.retractions,
            "prefix_hit_rate": rates.hit_rate,
            "prefix_hit_rate_total": total_hit_rate(snapshot.counters) if snapshot is not None else None,
            "flows_per_s": [
                {"source": source, "target": target, "per_s": value} for (source, target), value in rates.flows.items()
            ],
        },
        "headroom": {
            "tokens": room.tokens,
            "typical_tokens": room.typical_tokens,
            "requests": room.requests,
            "largest": room.largest,
        },
        "state": observation.state,
        "configuration": observation.configuration,
        "configuration_error": picture.configuration_error or None,
    }
