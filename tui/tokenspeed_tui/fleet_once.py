"""``--once`` of several servers: one look at each, a row each."""

import asyncio
import shutil
import sys
import time
from collections.abc import Callable, Sequence

import msgspec

from tokenspeed_tui.controls import Controls
from tokenspeed_tui.observation import Source
from tokenspeed_tui.once import as_plain, look, print_lines
from tokenspeed_tui.render.fleet import Member, render_fleet

EXIT_NO_SERVER = 1
ROWS_BESIDE = 4
"""Lines of a table beside its rows: the frame, the heading, and what is said where there are none."""


async def print_fleet(urls: Sequence[str], connect: Callable[[str], Source], interval: float, *, as_json: bool) -> int:
    """Prints the table, or with ``as_json`` an object with what ``--once --json`` says of each.

    Returns the exit status: 1 where one of them did not answer, or there is none.
    """
    looks = await asyncio.gather(*(look(connect(url), url, pause=interval) for url in urls))
    if as_json:
        told = [as_plain(picture, observation) for picture, observation in looks if observation is not None]
        print(msgspec.json.format(msgspec.json.encode({"servers": told}), indent=2).decode())
    else:
        columns, _ = shutil.get_terminal_size((80, 24))
        members = [Member(picture, "") for picture, _ in looks]
        controls = Controls(interval=interval)
        lines = render_fleet(members, None, controls, time.time(), columns, len(members) + ROWS_BESIDE)
        print_lines(lines, columns, sys.stdout)
    return 0 if looks and not any(picture.error for picture, _ in looks) else EXIT_NO_SERVER
