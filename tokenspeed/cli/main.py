"""The command ``tokenspeed``: its exit codes, and how a mistake is told."""

import sys

from tokenspeed.cli.dashboard import show_dashboard
from tokenspeed.cli.identity import settle_home, settle_umask

EXIT_USAGE, EXIT_DOES_NOT_FIT, EXIT_INTERRUPTED = 2, 3, 130


def main() -> None:
    """The entry point; ends the process with its exit code. An operator's mistake is a message, never a traceback.

    The dashboard has a command line of its own. Without Typer before it the first screen is there a tenth of a second
    sooner.
    """
    settle_home()
    settle_umask()
    try:
        if sys.argv[1:2] == ["top"]:
            sys.exit(show_dashboard(sys.argv[2:]))
        from tokenspeed.cli.commands import app

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
    from tokenspeed.cli.records import ServerError
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
