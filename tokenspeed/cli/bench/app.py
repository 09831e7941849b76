"""The commands of ``tokenspeed bench``. Nothing but typer is loaded until one of them runs."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

DEFAULT_COMMAND = "quick"

KeyFile = Annotated[str | None, typer.Option("--api-key-file", help="file with the key that the server asks for")]
Port = Annotated[int | None, typer.Option("--port", help="the server's port, where several run")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="print what would happen, and stop")]
Lengths = Annotated[str | None, typer.Option("--input-len", metavar="N|N:M", help="tokens of a prompt's own part")]
Answers = Annotated[str | None, typer.Option("--output-len", metavar="N|N:M", help="tokens of an answer")]
Seed = Annotated[
    int | None, typer.Option("--seed", help="of prompts and arrivals; without it a new one, which is told")
]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="write everything that was seen there")]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="draw a picture: .png, .svg or .pdf")]


class _BenchGroup(TyperGroup):
    """``bench`` without one of its subcommands measures the running server, whose name may follow."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = [DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)


bench_app = typer.Typer(
    cls=_BenchGroup,
    help="Measure: a running server, any OpenAI-compatible endpoint, kernels, layouts. Alone it is bench quick.",
    no_args_is_help=False,
    rich_markup_mode=None,
)


@bench_app.command(DEFAULT_COMMAND)
def quick(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="the served name, where several run")] = None,
    url: Annotated[str | None, typer.Option("--url", help="any OpenAI-compatible server of this project")] = None,
    port: Port = None,
    api_key_file: KeyFile = None,
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="at most so long")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
    dry_run: DryRun = False,
) -> None:
    """Measure a running server: prefill, time to the first token, decode at 1, 8 and 32 streams."""
    from tokenspeed.cli.benchmark import bench

    raise typer.Exit(bench(name, url, port, api_key_file, seconds, as_json=as_json, dry_run=dry_run))


@bench_app.command()
def serve(
    url: Annotated[
        str | None, typer.Option("--url", help="any OpenAI-compatible server; without it one of yours")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="the served name, where several are")] = None,
    port: Port = None,
    api_key_file: KeyFile = None,
    workload: Annotated[
        Literal["random", "shared-prefix", "sessions", "mixture", "file"],
        typer.Option("--workload", "-w", help="what is asked"),
    ] = "random",
    api: Annotated[
        Literal["completions", "chat"] | None, typer.Option("--api", help="without it: what suits the workload")
    ] = None,
    input_len: Lengths = None,
    output_len: Answers = None,
    prefix_len: Annotated[
        int | None, typer.Option("--prefix-len", min=1, help="shared-prefix, sessions: tokens in common")
    ] = None,
    groups: Annotated[int | None, typer.Option("--groups", min=1, help="shared-prefix: how many prefixes")] = None,
    sessions: Annotated[int | None, typer.Option("--sessions", min=1, help="sessions: how many")] = None,
    turns: Annotated[int | None, typer.Option("--turns", min=1, help="sessions: requests of each")] = None,
    decoders: Annotated[int | None, typer.Option("--decoders", min=1, help="mixture: streams that run")] = None,
    prompt_len: Annotated[
        int | None, typer.Option("--prompt-len", min=1, help="mixture: tokens of the long prompt; 32768")
    ] = None,
    prompts: Annotated[int | None, typer.Option("--prompts", min=1, help="mixture: how many long prompts")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE.jsonl", help='file: lines with "prompt" or "messages"')
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option("--concurrency", "-c", metavar="N[,N...]", help="so many at once; closed loop")
    ] = None,
    rate: Annotated[
        str | None, typer.Option("--rate", "-r", metavar="R[,R...]", help="so many a second; open loop")
    ] = None,
    arrivals: Annotated[
        Literal["poisson", "constant", "burst"] | None, typer.Option("--arrivals", help="with --rate; poisson")
    ] = None,
    burst: Annotated[int | None, typer.Option("--burst", min=1, help="with --arrivals burst: how many at once")] = None,
    requests: Annotated[int | None, typer.Option("--requests", "-n", min=1, help="of each level")] = None,
    duration: Annotated[
        float | None, typer.Option("--duration", min=0.1, metavar="S", help="no request of a level begins later")
    ] = None,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="requests before, which count nowhere")] = 2,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, metavar="S", help="a request that takes longer has failed")
    ] = 600.0,
    seed: Seed = None,
    goodput: Annotated[
        list[str] | None,
        typer.Option("--goodput", metavar="ttft:MS,tpot:MS,e2e:MS", help="what a request has to meet to count as good"),
    ] = None,
    label: Annotated[str | None, typer.Option("--label", help="what to call this beside others")] = None,
    devices: Annotated[int, typer.Option("--devices", min=1, help="that the server runs on, for bench pareto")] = 1,
    json_file: JsonFile = None,
    plot: Plot = None,
    dry_run: DryRun = False,
) -> None:
    """Load an OpenAI-compatible server: throughput, percentiles, goodput (exit code 1: nothing was answered)."""
    given: dict[str, Any] = dict(locals())
    from tokenspeed.cli.bench.options import ServeOptions
    from tokenspeed.cli.bench.serve import bench_serve

    given |= {"key_file": given.pop("api_key_file"), "json": given.pop("json_file"), "goodput": tuple(goodput or ())}
    raise typer.Exit(bench_serve(ServeOptions(**given)))


@bench_app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def kernels(context: typer.Context) -> None:
    """Time every kernel that runs here beside the reference and the memory's speed (kernels --help has its options)."""
    from tokenspeed.cli.bench.kernels import bench_kernels

    raise typer.Exit(bench_kernels(context.args))


@bench_app.command()
def pareto(
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE_OR_PATH]", help="what to serve in each layout")
    ] = None,
    profile: Annotated[str | None, typer.Option("--profile", help="the recipe's profile; else one is chosen")] = None,
    layouts: Annotated[
        list[str] | None,
        typer.Option("--layout", metavar="NAME[:KEY=VALUE,...]", help="keys of a recipe that make a layout; repeat it"),
    ] = None,
    concurrency: Annotated[
        str, typer.Option("--concurrency", "-c", metavar="N[,N...]", help="the points of each curve")
    ] = "1,2,4,8,16,32",
    input_len: Lengths = None,
    output_len: Answers = None,
    requests: Annotated[int | None, typer.Option("--requests", "-n", min=1, help="of each point")] = None,
    seed: Seed = None,
    first_token_ms: Annotated[
        float | None,
        typer.Option("--first-token-ms", min=0, metavar="MS", help="a point that takes longer to it is not optimal"),
    ] = None,
    earlier: Annotated[
        list[Path] | None,
        typer.Option("--from", metavar="FILE.json", help="a curve of what --json wrote earlier; repeat it"),
    ] = None,
    json_file: JsonFile = None,
    plot: Plot = None,
    dry_run: DryRun = False,
) -> None:
    """Throughput of a device against tokens/s of a user, one curve a layout: which settings buy which speed."""
    from tokenspeed.cli.bench.pareto import ParetoOptions, bench_pareto

    options = ParetoOptions(
        recipe=recipe,
        profile=profile,
        layouts=tuple(layouts or ()),
        concurrency=concurrency,
        input_len=input_len,
        output_len=output_len,
        requests=requests,
        seed=seed,
        first_token_ms=first_token_ms,
        earlier=tuple(earlier or ()),
        json=json_file,
        plot=plot,
        dry_run=dry_run,
    )
    raise typer.Exit(bench_pareto(options))
