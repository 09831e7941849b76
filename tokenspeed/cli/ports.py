"""The port, taken note of before anything is loaded."""

import errno
import socket

from tokenspeed.cli.records import ServerError, running_servers


def claim_port(host: str, port: int) -> int:
    """Returns the port, a free one for 0; raises ServerError where another process listens or the host is not ours."""
    try:
        with socket.create_server((host, port), family=_family(host), reuse_port=False) as probe:
            return int(probe.getsockname()[1])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            way_out = f"--port {port + 1} (make run PORT={port + 1})"
            ours = next((record for record in running_servers() if record.port == port), None)
            holder = f" by {ours.name} ({ours.where})" if ours else ""
            stop = (
                f"tokenspeed stop --port {port}, or --replace to swap them"
                if ours
                else f"see who it is: ss -ltnp 'sport = :{port}'"
            )
            raise ServerError(
                f"port {port} on {host} is taken{holder}: choose another with {way_out}, or {stop}"
            ) from None
        if error.errno == errno.EACCES:
            raise ServerError(f"port {port} needs root: choose one above 1023 with --port") from None
        raise ServerError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; see --host and --port"
        ) from None


def port_plan(host: str, port: int) -> str:
    """Which ports a server takes."""
    return (
        f"ports     {host}:{port}: API, probes, metrics, dashboard; no other (the engine is reached by local sockets)"
    )


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
