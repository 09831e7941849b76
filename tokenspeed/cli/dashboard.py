"""``top``: hands over to the dashboard's own command line."""

from tokenspeed.cli.records import ServerError, running_servers


def show_dashboard(arguments: list[str]) -> int:
    """Runs the dashboard; without --url it looks at the only running server. Returns the exit code."""
    try:
        from tokenspeed_tui import main as dashboard
    except ImportError as error:
        raise ServerError(
            f"the dashboard is not installed ({error}): pip install 'tokenspeed-appliance[tui]' from this project's "
            "checkout, or make top"
        ) from error
    elsewhere = any(argument.startswith(("--url", "--replay", "--help")) for argument in arguments)
    if not elsewhere and len(servers := running_servers()) == 1:
        arguments = ["--url", servers[0].url, *arguments]
    return dashboard(arguments)
