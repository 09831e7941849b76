"""The commands of ``tokenspeed``. Each imports what it needs when it runs, so that --help answers at once."""

import inspect
from collections.abc import Callable
from pathlib import Path
from shutil import which
from typing import Annotated, Any, Literal

import typer

from tokenspeed.cli.bench.app import bench_app
from tokenspeed.recipes.flags import FLAGS, Flag

CONTAINER_PROGRAMS = ("docker", "podman")
"""Where one of them is here, a model may run in a container: only then is it known where."""

app = typer.Typer(
    name="tokenspeed",
    help="Serves an open-weight model behind an OpenAI-compatible API, and shows what the engine is doing.",
    epilog="Exit codes: 0 done, 1 not ready, 2 a wrong argument, file or recipe, 3 it does not fit this machine.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
recipe_app = typer.Typer(help="Recipes: which there are, what they say, what they need.", no_args_is_help=True)
app.add_typer(recipe_app, name="recipe", rich_help_panel=None)
app.add_typer(bench_app, name="bench", rich_help_panel=None)

_TYPES: dict[str, type] = {"text": str, "integer": int, "number": float, "switch": bool, "gib": float}

Target = Annotated[str, typer.Argument(metavar="RECIPE_OR_PATH", help="a recipe's name, a .gguf file, or a folder")]
RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="a recipe's name, or the path of a recipe file")]
ProfileOption = Annotated[str | None, typer.Option("--profile", help="the recipe's profile; without it one is chosen")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="sets any key of a recipe")]
HardwareOption = Annotated[str | None, typer.Option("--hardware", help="plan for this machine, not the one at hand")]
Form = Literal["container", "compose", "kubernetes"]
NodesWorkload = Literal["leader-worker-set", "stateful-set"]
DryRun = Annotated[bool, typer.Option("--dry-run", help="print what would happen, and stop")]
Detach = Annotated[bool, typer.Option("--detach", help="run in the background; see tokenspeed logs, status, stop")]
Port = Annotated[int | None, typer.Option("--port", help="the server's port, where several run")]
Engine = Annotated[
    Literal["container", "native"] | None,
    typer.Option("--engine", envvar="TOKENSPEED_ENGINE", help="without it: a container where the image is here"),
]
VendorOption = Annotated[
    Literal["cpu", "nvidia", "amd", "npu"] | None,
    typer.Option("--vendor", envvar="TOKENSPEED_VENDOR", help="whose devices count; without it: what is detected"),
]
KeyFile = Annotated[str | None, typer.Option("--api-key-file", help="file with the key that the server asks for")]
AsJson = Annotated[bool, typer.Option("--json", help="as JSON")]


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Gives ``command`` an option for each of FLAGS; it receives their values in ``flags`` (None: not given)."""
    own = [
        parameter
        for parameter in inspect.signature(command).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    options = [
        inspect.Parameter(flag.parameter, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(flag))
        for flag in FLAGS
    ]
    command.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *options]}
    return command


def _annotation(flag: Flag) -> Any:
    declaration = f"{flag.name}/--no-{flag.name[2:]}" if flag.kind == "switch" else flag.name
    return Annotated[_TYPES[flag.kind] | None, typer.Option(declaration, help=flag.help, show_default=False)]


@app.command()
@with_flags
def serve(
    target: Target,
    profile: ProfileOption = None,
    assignments: SetOption = None,
    dry_run: DryRun = False,
    detach: Detach = False,
    **flags: Any,
) -> None:
    """Serve a recipe, a GGUF file or a checkpoint's folder."""
    from tokenspeed.launch.early_engine import early_engine

    with early_engine(not (dry_run or detach)) as early:
        from tokenspeed.cli.start import StartOptions, start

        options = StartOptions(dry_run=dry_run, detach=detach, engine="native")
        raise typer.Exit(start(target, profile, assignments or [], flags, options, early))


@app.command()
@with_flags
def run(
    target: Target,
    profile: ProfileOption = None,
    assignments: SetOption = None,
    engine: Engine = None,
    vendor: VendorOption = None,
    image: Annotated[str, typer.Option("--image", help="the container's image; without it the vendor's")] = "",
    replace: Annotated[
        bool, typer.Option("--replace", help="take a running server's place: it retires once this one is ready")
    ] = False,
    replace_after: Annotated[
        bool, typer.Option("--replace-after", help="the same where there is room for one: it retires first")
    ] = False,
    dry_run: DryRun = False,
    detach: Detach = False,
    **flags: Any,
) -> None:
    """Serve a model in the way that suits this machine: profile, devices, container or not."""
    from tokenspeed.launch.early_engine import early_engine

    here = engine == "native" or (engine is None and not any(map(which, CONTAINER_PROGRAMS)))
    with early_engine(here and not (dry_run or detach or replace_after)) as early:
        from tokenspeed.cli.start import StartOptions, start

        options = StartOptions(
            dry_run=dry_run,
            detach=detach,
            engine=engine or "",
            vendor=vendor,
            image=image,
            replace="after" if replace_after else "ready" if replace else "",
        )
        raise typer.Exit(start(target, profile, assignments or [], flags, options, early))


@app.command()
def pull(
    recipe: RecipeName,
    profile: ProfileOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="of weights that are here, compare sizes only")] = False,
    repair: Annotated[bool, typer.Option("--repair", help="fetch damaged files again")] = False,
    token_file: Annotated[Path | None, typer.Option("--token-file", help="file with a token for gated models")] = None,
    dry_run: DryRun = False,
) -> None:
    """Fetch a recipe's weights, or compare the ones that are here with their checksums."""
    from tokenspeed.cli.pull import PullOptions, pull_weights

    options = PullOptions(quick=quick, repair=repair, token_file=token_file, dry_run=dry_run)
    raise typer.Exit(pull_weights(recipe, profile, options))


@app.command()
def stop(port: Port = None, dry_run: DryRun = False) -> None:
    """Stop a running server: it drains first."""
    from tokenspeed.cli.servers import stop_server

    raise typer.Exit(stop_server(port, dry_run=dry_run))


@app.command()
def status(port: Port = None) -> None:
    """Show the running servers and what their probes say."""
    from tokenspeed.cli.servers import show_status

    raise typer.Exit(show_status(port))


@app.command()
def logs(
    port: Port = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on with what is written")] = False,
) -> None:
    """Print the log of a server that runs in the background."""
    from tokenspeed.cli.servers import show_log

    raise typer.Exit(show_log(port, follow=follow))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def top(context: typer.Context) -> None:
    """Show a running server's inside: states, KV cache, requests, rates (top --help has its options)."""
    # Where it is the first word ``main`` does this by itself, without Typer.
    from tokenspeed.cli.dashboard import show_dashboard

    raise typer.Exit(show_dashboard(context.args))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def demo(
    context: typer.Context,
    target: Annotated[
        str, typer.Argument(metavar="[RECIPE_OR_PATH]", help="a small model", show_default=True)
    ] = "smollm2-135m",
    dry_run: DryRun = False,
) -> None:
    """Serve a model in too small a pool, let agents load it, and watch: requests wait, give way and come back.

    What else is given goes to the dashboard (see top --help).
    """
    from tokenspeed.cli.demo import run_demo

    raise typer.Exit(run_demo(target, context.args, dry_run=dry_run))


@app.command()
def doctor(
    model: Annotated[str | None, typer.Argument(metavar="[RECIPE_OR_PATH]", help="a model that is to run here")] = None,
    port: Annotated[int, typer.Option("--port", help="the port to look at")] = 8000,
    vendor: VendorOption = None,
    as_json: AsJson = False,
) -> None:
    """Look for what would keep a model from running here; each finding with its mend (exit code 2: a failure)."""
    from tokenspeed.cli.doctor import examine

    raise typer.Exit(examine(port, model, vendor, as_json=as_json))


@app.command()
@recipe_app.command("verify")
def verify(
    recipe: RecipeName,
    profile: ProfileOption = None,
    api_key_file: KeyFile = None,
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="measure for at most so long")] = 120.0,
    write: Annotated[bool, typer.Option("--write", help="put the verified section into the recipe's file")] = False,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Check a profile on this machine: answers, streams, API, accuracy, speed (exit code 1: something failed)."""
    from tokenspeed.cli.verify import verify_recipe

    raise typer.Exit(
        verify_recipe(recipe, profile, api_key_file, seconds, write=write, as_json=as_json, dry_run=dry_run)
    )


@app.command()
def replay(
    file: Annotated[str, typer.Argument(metavar="FILE", help="what --journal wrote")],
    dump: Annotated[int | None, typer.Option("--dump", metavar="N", help="print the rounds around round N")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="show it round by round, forward and back")] = False,
    at: Annotated[int, typer.Option("--round", min=1, metavar="N", help="with --watch: the round to begin with")] = 1,
) -> None:
    """Feed a journal to a fresh scheduler and compare every plan (exit code 1: one differs)."""
    from tokenspeed.cli.replay import replay_journal

    raise typer.Exit(replay_journal(file, dump, watch=watch, at=at))


@app.command()
def explain(
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="its id, the end of it, or its handle")],
    url: Annotated[str | None, typer.Option("--url", help="the server; without it the one that runs here")] = None,
    port: Port = None,
    api_key_file: KeyFile = None,
    journal: Annotated[
        Path | None, typer.Option("--journal", metavar="FILE", help="ask what --journal wrote, not a server")
    ] = None,
    at: Annotated[
        int | None, typer.Option("--round", min=1, metavar="N", help="with --journal: how it stood after round N")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print what one request waits for or holds, in the scheduler's words, and every state it was in."""
    from tokenspeed.cli.explain import explain_request

    code = explain_request(request, url=url, port=port, key_file=api_key_file, journal=journal, at=at, as_json=as_json)
    raise typer.Exit(code)


@app.command()
def env(
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
    kernels: Annotated[bool, typer.Option("--kernels", help="also the kernels that run on this machine")] = False,
    bundle: Annotated[
        str | None,
        typer.Option("--bundle", metavar="FILE.tar.gz", help="write it to a file, with the last crashes and logs"),
    ] = None,
) -> None:
    """Print versions and the machine: what a report of a fault should hold."""
    from tokenspeed.cli.environment import show_environment, write_report

    raise typer.Exit(write_report(bundle) if bundle else show_environment(as_json=as_json, kernels=kernels))


@recipe_app.command("list")
def recipe_list(
    fits: Annotated[bool, typer.Option("--fits", help="only what fits with its real weights")] = False,
    hardware: HardwareOption = None,
) -> None:
    """List the recipes, the profile of each that runs here, and what it needs."""
    from tokenspeed.cli.recipe import list_recipes

    raise typer.Exit(list_recipes(fits=fits, hardware=hardware))


@recipe_app.command("show")
def recipe_show(recipe: RecipeName) -> None:
    """Print a recipe as it stands after extends."""
    from tokenspeed.cli.recipe import show_recipe

    raise typer.Exit(show_recipe(recipe))


@recipe_app.command("validate")
def recipe_validate(
    recipes: Annotated[list[str] | None, typer.Argument(metavar="RECIPE...", help="without one: all")] = None,
) -> None:
    """Check recipes; every mistake with its file, line and column."""
    from tokenspeed.cli.recipe import validate_recipes

    raise typer.Exit(validate_recipes(recipes or []))


@recipe_app.command("schema")
def recipe_schema() -> None:
    """Print the JSON Schema of recipes, for editors."""
    from tokenspeed.cli.recipe import print_schema

    raise typer.Exit(print_schema())


@recipe_app.command("diff")
@with_flags
def recipe_diff(
    old: Target,
    new: Annotated[str | None, typer.Argument(metavar="[RECIPE_OR_PATH]", help="without it: see below")] = None,
    profile: ProfileOption = None,
    assignments: SetOption = None,
    hardware: HardwareOption = None,
    **flags: Any,
) -> None:
    """Print which keys and how much memory change between two recipes, by what is set, or since the last start."""
    from tokenspeed.cli.recipe import diff_targets

    raise typer.Exit(diff_targets(old, new, profile, assignments or [], flags, hardware))


@recipe_app.command("plan")
@with_flags
def recipe_plan(
    target: Target,
    profile: ProfileOption = None,
    assignments: SetOption = None,
    hardware: HardwareOption = None,
    solve: Annotated[
        str | None, typer.Option("--solve", metavar="KEY", help="the largest max_len or max_seqs that fits")
    ] = None,
    **flags: Any,
) -> None:
    """Print what would run, what it needs, and whether it fits (exit code 3: it does not)."""
    from tokenspeed.cli.recipe import plan_target

    raise typer.Exit(plan_target(target, profile, assignments or [], flags, hardware, solve_for=solve))


@recipe_app.command("explain")
@with_flags
def recipe_explain(
    target: Target,
    profile: ProfileOption = None,
    assignments: SetOption = None,
    hardware: HardwareOption = None,
    **flags: Any,
) -> None:
    """Print every key of the final configuration with the place its value comes from."""
    from tokenspeed.cli.recipe import explain_target

    raise typer.Exit(explain_target(target, profile, assignments or [], flags, hardware))


@recipe_app.command("render")
@with_flags
def recipe_render(
    target: RecipeName,
    form: Annotated[Form, typer.Option("--as", help="what to write")],
    profile: ProfileOption = None,
    assignments: SetOption = None,
    hardware: HardwareOption = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="machines that share the model")] = None,
    workload: Annotated[
        NodesWorkload, typer.Option("--workload", help="what several nodes run as")
    ] = "leader-worker-set",
    monitoring: Annotated[bool, typer.Option("--monitoring", help="with Prometheus and Grafana")] = False,
    output: Annotated[str | None, typer.Option("--output", "-o", metavar="FILE", help="write it there")] = None,
    **flags: Any,
) -> None:
    """Write a recipe as a container's command line, a compose file, or manifests for Kubernetes."""
    from tokenspeed.cli.render import render_recipe

    code = render_recipe(
        target,
        form,
        profile,
        assignments or [],
        flags,
        hardware=hardware,
        nodes=nodes,
        workload=workload,
        monitoring=monitoring,
        output=output,
    )
    raise typer.Exit(code)
