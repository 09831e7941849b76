"""``bench``: measures a running server and prints a small table, or JSON."""

import asyncio
import json

from tokenspeed.cli.client import connect
from tokenspeed.cli.measure import Measurement, measure, render_measurement
from tokenspeed.cli.output import say, shout
from tokenspeed.cli.records import ServerError, find_server, running_servers
from tokenspeed.telemetry.api_keys import ApiKeyError, read_key_file


def bench(
    name: str | None,
    url: str | None,
    port: int | None,
    key_file: str | None,
    budget_s: float,
    *,
    as_json: bool,
    dry_run: bool,
) -> int:
    """Measures the server at ``url``, or the running one that is called ``name``; returns the exit code."""
    target = url or url_of(name, port)
    if dry_run:
        say(f"would measure {target} for at most {budget_s:.0f} s (dry run)")
        return 0
    found = asyncio.run(measure_url(target, read_key(key_file), budget_s))
    if as_json:
        say(json.dumps({"url": target, **found.as_dict}, indent=2))
    else:
        say(*render_measurement(found))
        if found.model.endswith("-smoke"):
            shout("RANDOM WEIGHTS of small dimensions: these figures say nothing of the model it is named after")
    return 0


async def measure_url(url: str, api_key: str, budget_s: float) -> Measurement:
    """Connects and measures; raises ServerError."""
    async with connect(url, api_key) as client:
        return await measure(client, budget_s)


def read_key(path: str | None) -> str:
    """The first key of a key file, "" without one; raises ServerError."""
    if path is None:
        return ""
    try:
        return read_key_file(path)[0].key
    except ApiKeyError as error:
        raise ServerError(str(error)) from error


def url_of(name: str | None, port: int | None) -> str:
    """Where the server is that is called ``name``, or is on ``port``, or is the only one. Raises ServerError."""
    if name is None:
        return find_server(port).url
    servers = [record for record in running_servers() if record.name in (name, f"{name}-smoke")]
    if not servers:
        running = ", ".join(record.name for record in running_servers()) or "none"
        raise ServerError(f"no server of yours serves {name} (running: {running}); start it: tokenspeed run {name}")
    return servers[0].url
