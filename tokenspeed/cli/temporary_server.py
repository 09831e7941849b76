"""A server for the length of a measurement or a check: started in the background, and stopped again."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from tokenspeed.cli.background import spawn_detached
from tokenspeed.cli.ports import claim_port
from tokenspeed.cli.records import ServerError, running_servers
from tokenspeed.cli.servers import end_process


@contextmanager
def temporary_server(arguments: list[str], name: str) -> Iterator[str]:
    """Starts ``tokenspeed ARGUMENTS`` on a free port, yields its URL once it is ready, and stops it at the end.

    Args:
        arguments: without a port; they say on which host.
        name: what to call it in an error.

    Raises ServerError where it does not start.
    """
    port = claim_port("127.0.0.1", 0)
    with redirect_stdout(sys.stderr):  # standard output is the report's
        code = spawn_detached(arguments, port, outlives=False)
    if code != 0:
        raise ServerError(f"the server of {name} did not start; see above, and tokenspeed logs --port {port}")
    record = next(record for record in running_servers() if record.port == port)
    try:
        yield record.url
    finally:
        end_process(record)
