"""``top``: hands over to the dashboard's own command line."""

from tokenspeed.cli.records import ServerError

DASHBOARD_HINT = "pip install 'tokenspeed-appliance[tui]' from this project's checkout, or make top"


def show_dashboard(arguments: list[str]) -> int:
    """Runs the dashboard, which finds the servers that run here by itself. Returns the exit code."""
    try:
        from tokenspeed.cli.local import LocalMachine
        from tokenspeed_tui import main as dashboard
    except ImportError as error:
        raise ServerError(f"the dashboard is not installed ({error}): {DASHBOARD_HINT}") from error
    return dashboard(arguments, LocalMachine())
