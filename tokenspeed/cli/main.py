"""The command ``tokenspeed``. Every command imports what it needs when it runs, so that --help answers at once."""

import inspect
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from tokenspeed.recipes.flags import FLAGS, Flag

EXIT_OK, EXIT_NOT_READY, EXIT_USAGE, EXIT_DOES_NOT_FIT, EXIT_INTERRUPTED = 0, 1, 2, 3, 130

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

_TYPES: dict[str, type] = {"text": str, "integer": int, "number": float, "switch": bool, "gib": float}

Target = Annotated[str, typer.Argument(metavar="RECIPE_OR_PATH", help="a recipe's name, a .gguf file, or a folder")]
RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="a recipe's name, or the path of a recipe file")]
ProfileOption = Annotated[str | None, typer.Option("--profile", help="the recipe's profile; without it one is chosen")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="sets any key of a recipe")]
HardwareOption = Annotated[str | None, typer.Option("--hardware", help="plan for this machine, not the one at hand")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="print what would happen, and stop")]
Detach = Annotated[bool, typer.Option("--detach", help="run in the background; see tokenspeed logs, status, stop")]
Port = Annotated[int | None, typer.Option("--port", help="the server's port, where several run")]


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
    from tokenspeed.cli.start import start

    raise typer.Exit(start(target, profile, assignments or [], flags, dry_run=dry_run, detach=detach))


@app.command()
@with_flags
def run(
    recipe: RecipeName,
    profile: ProfileOption = None,
    assignments: SetOption = None,
    dry_run: DryRun = False,
    detach: Detach = False,
    **flags: Any,
) -> None:
    """Serve a recipe, with the profile that suits this machine."""
    from tokenspeed.cli.start import require_recipe, start

    require_recipe(recipe)
    raise typer.Exit(start(recipe, profile, assignments or [], flags, dry_run=dry_run, detach=detach))


@app.command()
def pull(recipe: RecipeName, profile: ProfileOption = None) -> None:
    """Fetch a recipe's weights, or check the ones that are here."""
    from tokenspeed.cli.start import pull_weights

    raise typer.Exit(pull_weights(recipe, profile))


@app.command()
def stop(port: Port = None) -> None:
    """Stop a running server: it drains first."""
    from tokenspeed.cli.servers import stop_server

    raise typer.Exit(stop_server(port))


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
    from tokenspeed.cli.dashboard import show_dashboard

    raise typer.Exit(show_dashboard(context.args))


@app.command()
def doctor(port: Annotated[int, typer.Option("--port", help="the port to look at")] = 8000) -> None:
    """Look for what would keep a model from running here; each finding has the line that mends it."""
    from tokenspeed.cli.doctor import examine

    raise typer.Exit(examine(port))


@app.command()
def replay(
    file: Annotated[str, typer.Argument(metavar="FILE", help="what --journal wrote")],
    dump: Annotated[int | None, typer.Option("--dump", metavar="N", help="print the rounds around round N")] = None,
) -> None:
    """Feed a journal to a fresh scheduler and compare every plan (exit code 1: one differs)."""
    from tokenspeed.cli.replay import replay_journal

    raise typer.Exit(replay_journal(file, dump))


@app.command()
def env(as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False) -> None:
    """Print versions, the machine and the kernels: what a report of a fault should hold."""
    from tokenspeed.cli.environment import show_environment

    raise typer.Exit(show_environment(as_json=as_json))


@recipe_app.command("list")
def recipe_list() -> None:
    """List the recipes and the profile of each that runs here."""
    from tokenspeed.cli.recipe import list_recipes

    raise typer.Exit(list_recipes())


@recipe_app.command("show")
def recipe_show(recipe: RecipeName) -> None:
    """Print a recipe as it stands after extends."""
    from tokenspeed.cli.recipe import show_recipe

    raise typer.Exit(show_recipe(recipe))


@recipe_app.command("validate")
def recipe_validate(recipes: Annotated[list[str], typer.Argument(metavar="RECIPE...")]) -> None:
    """Check recipes; every mistake with its file, line and column."""
    from tokenspeed.cli.recipe import validate_recipes

    raise typer.Exit(validate_recipes(recipes))


@recipe_app.command("plan")
@with_flags
def recipe_plan(
    target: Target,
    profile: ProfileOption = None,
    assignments: SetOption = None,
    hardware: HardwareOption = None,
    **flags: Any,
) -> None:
    """Print what would run, what it needs, and whether it fits (exit code 3: it does not)."""
    from tokenspeed.cli.recipe import plan_target

    raise typer.Exit(plan_target(target, profile, assignments or [], flags, hardware))


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


def main() -> None:
    """The entry point; ends the process with its exit code. An operator's mistake is a message, never a traceback."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except (ValueError, RuntimeError) as error:
        code = _exit_code(error)
        if code is None:
            raise
        for line in str(error).splitlines():
            print(f"tokenspeed: {line}", file=sys.stderr)
        sys.exit(code)


def _exit_code(error: Exception) -> int | None:
    """The code for an error that is the operator's to mend; None for one that is ours."""
    from tokenspeed.cli.servers import ServerError
    from tokenspeed.recipes.document import RecipeError
    from tokenspeed.recipes.model_config import CheckpointError
    from tokenspeed.recipes.resolve import UnsupportedError
    from tokenspeed.recipes.selection import DoesNotFit
    from tokenspeed.recipes.weights import FetchError
    from tokenspeed.telemetry.journal import JournalError

    if isinstance(error, DoesNotFit):
        return EXIT_DOES_NOT_FIT
    if isinstance(error, RecipeError | CheckpointError | UnsupportedError | FetchError | ServerError | JournalError):
        return EXIT_USAGE
    return None
