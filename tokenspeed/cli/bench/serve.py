"""``bench serve``: loads an endpoint, and shows and keeps what was seen."""

import asyncio
import random
import resource
import secrets
import signal
import sys
import time
from dataclasses import replace

from tokenspeed.cli.bench.endpoint import Api, Endpoint, connect, takes_chat
from tokenspeed.cli.bench.load import Load, run_load, until_stopped
from tokenspeed.cli.bench.mixture import MixtureWorkload, run_mixture
from tokenspeed.cli.bench.options import AnyWorkload, ServeOptions
from tokenspeed.cli.bench.prompts import PromptMaker
from tokenspeed.cli.bench.report import Level, MixtureLevel, ServeReport, write_json
from tokenspeed.cli.bench.statistics import parse_targets, summarize
from tokenspeed.cli.bench.table import render
from tokenspeed.cli.bench.tiers import Tiers
from tokenspeed.cli.bench.workloads import Asker, FileWorkload
from tokenspeed.cli.benchmark import read_key, url_of
from tokenspeed.cli.output import say, shout
from tokenspeed.cli.records import ServerError

EXIT_NOTHING_ANSWERED, EXIT_INTERRUPTED = 1, 130
_WARM_TOKENS = 8
_SPARE_TOKENS = 64
"""What a template or a first token of the server's own may add to a prompt."""


def bench_serve(options: ServeOptions) -> int:
    """Measures; returns the exit code: 1 where nothing was answered, 130 where it was interrupted."""
    options.check()
    parse_targets(options.goodput)
    seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    workload = options.build(random.Random(seed))
    loads = options.loads()
    if options.plot is not None:
        from tokenspeed.cli.bench.figures import require_plotting

        require_plotting(options.plot)
    target = options.url or url_of(options.model, options.port)
    if options.dry_run:
        say(f"would load {target}: {workload.described}", *(f"  {load.label}" for load in loads))
        say("nothing was sent (dry run)")
        return 0
    report = asyncio.run(measure(options, target, workload, loads, seed))
    say(*render(report))
    if report.endpoint.model.endswith("-smoke"):
        shout("RANDOM WEIGHTS of small dimensions: these figures say nothing of the model it is named after")
    if options.json is not None:
        write_json(options.json, report.document)
    if options.plot is not None:
        from tokenspeed.cli.bench.figures import draw_serve

        draw_serve(report, options.plot)
    if report.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_NOTHING_ANSWERED if report.failed else 0


async def measure(
    options: ServeOptions, target: str, workload: AnyWorkload, loads: list[Load], seed: int
) -> ServeReport:
    """Connects, warms and runs every load. Ctrl-C ends the load that runs and keeps what was seen. Raises ServerError.

    Every load has prompts of its own, so that none finds those of another in a cache.
    """
    _allow_many_connections()
    api = _api_of(options, workload)
    # A served name of ours found the server; with --url it says which of the endpoint's models to ask for.
    model = options.model if options.url else None
    endpoint = await connect(target, read_key(options.key_file), model, api, options.timeout)
    try:
        if options.workload == "sessions" and options.api is None:
            refusal = await takes_chat(endpoint)
            api = "completions" if refusal else "chat"
            if refusal:
                endpoint.notes.append(f"no chat ({refusal}): sessions are plain completions")
        workload = _fitted(options, workload, endpoint)
        asker = Asker(endpoint, await PromptMaker.of(endpoint, api), api)
        ids = bool(asker.maker.ids) and api == "completions" and not isinstance(workload, FileWorkload)
        kind = "the file has them" if isinstance(workload, FileWorkload) else "token ids" if ids else "text"
        label = options.label or endpoint.model
        described = workload.described
        report = ServeReport(endpoint, label, options.devices, options.workload, described, api, kind, seed)
        report.notes = endpoint.notes
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, _interrupt, loop, stop)
        try:
            await _run(options, workload, loads, asker, report, stop)
        finally:
            loop.remove_signal_handler(signal.SIGINT)
        report.interrupted = stop.is_set()
        return report
    finally:
        endpoint.wire.close()


async def _run(
    options: ServeOptions,
    workload: AnyWorkload,
    loads: list[Load],
    asker: Asker,
    report: ServeReport,
    stop: asyncio.Event,
) -> None:
    await until_stopped(_warm(options.warmup, asker, random.Random(f"{report.seed} warm-up")), stop)
    if isinstance(workload, MixtureWorkload):
        _tell(f"measuring: {workload.described}")
        report.mixture = MixtureLevel.of(await run_mixture(workload, asker, random.Random(report.seed), stop))
        return
    targets = parse_targets(options.goodput)
    for number, load in enumerate(loads):
        if stop.is_set():
            break
        count = options.count(load, workload)
        kind = "sessions" if options.workload == "sessions" else "requests"
        _tell(f"measuring {load.label}: {f'{count} {kind}' if count else f'for {load.duration_s:g} s'}")
        source = random.Random(f"{report.seed} load {number}")
        conversations = workload.conversations(asker, source, count)
        before = await asker.endpoint.counters()
        cpu, wall = time.process_time(), time.perf_counter()
        outcome = await run_load(load, conversations, asker.endpoint.send, stop, source)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        summary = summarize(
            outcome,
            load=load.label,
            concurrency=load.concurrency,
            rate=load.rate,
            targets=targets,
            client_cpu=cpu / max(wall, 1e-9),
            by_turn=workload.by_turn,
        )
        after = None if stop.is_set() else await asker.endpoint.counters()
        report.levels.append(Level(summary, outcome, Tiers.between(before, after)))


async def _warm(count: int, asker: Asker, source: random.Random) -> None:
    """Requests that count nowhere: a server's first ones pay for what comes once."""
    requests = [asker.request(asker.prompt(source, _WARM_TOKENS), _WARM_TOKENS, 0) for _ in range(count)]
    await asyncio.gather(*(asker.endpoint.send(request) for request in requests))


def _allow_many_connections() -> None:
    """An open loop against a slow server holds thousands; shells begin with room for a thousand."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _api_of(options: ServeOptions, workload: AnyWorkload) -> Api:
    if not isinstance(workload, FileWorkload):
        return options.api or "completions"
    if options.api not in (None, workload.api):
        raise ServerError(f"--api {options.api}: {workload.path} is for {workload.api}")
    return workload.api


def _fitted(options: ServeOptions, workload: AnyWorkload, endpoint: Endpoint) -> AnyWorkload:
    """The workload, with a long prompt that nobody asked for cut to what the server takes. Raises ServerError."""
    limit = endpoint.abilities.max_len
    if limit is None:
        return workload
    if isinstance(workload, MixtureWorkload):
        room = limit - _SPARE_TOKENS
        if options.prompt_len is None and workload.prompt_len > room:
            endpoint.notes.append(f"the long prompt has {room:,} tokens: the server takes {limit:,} in one request")
            workload = replace(workload, prompt_len=room)
        if options.output_len is None and workload.input_len + workload.output_len > room:
            workload = replace(workload, output_len=max(1, room - workload.input_len))
        longest = max(workload.prompt_len + 1, workload.input_len + workload.output_len)
    else:
        longest = workload.longest
    if longest > limit:
        raise ServerError(
            f"requests of up to {longest:,} tokens, answer included: {endpoint.model} at {endpoint.url} takes "
            f"{limit:,}; ask for shorter lengths" + (" or fewer --turns" if options.workload == "sessions" else "")
        )
    return workload


def _interrupt(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """The first Ctrl-C ends the measuring, the second the program."""
    loop.remove_signal_handler(signal.SIGINT)
    stop.set()


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
