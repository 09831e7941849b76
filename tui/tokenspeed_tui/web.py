"""The dashboard in a browser: textual-serve runs the same command once for each page that is open, and draws it there.

The page has no login. It listens on this machine alone unless told otherwise, and a page of another site that a browser
has open cannot reach it: a web socket is only accepted from the page itself.
"""

import ipaddress
import shlex
from collections.abc import Sequence
from typing import NamedTuple

WEB_PORT = 8001
NOT_INSTALLED = (
    "--web needs the package textual-serve, which is not installed: make top-web installs it, and so does "
    "pip install 'textual-serve>=1.1,<2'"
)


class WebAddress(NamedTuple):
    """Where the page is served."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """What to type into a browser."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def parse_address(text: str) -> WebAddress:
    """Reads [HOST:]PORT; raises ValueError in words."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is no [HOST:]PORT, such as {WEB_PORT} or 192.168.1.7:{WEB_PORT}")
    host = host.strip("[]") or "127.0.0.1"
    if host in ("0.0.0.0", "::"):
        raise ValueError(
            f"{text!r}: browsers cannot be sent to {host}; name the address that they reach this machine by"
        )
    return WebAddress(host, int(port))


def serve_page(command: Sequence[str], address: WebAddress) -> None:
    """Serves until Ctrl-C. Raises RuntimeError where textual-serve is missing, OSError where the port is taken."""
    try:
        from aiohttp import web
        from textual_serve.server import Server
    except ImportError as error:
        raise RuntimeError(NOT_INSTALLED) from error

    class Page(Server):
        """One page, for its own visitors."""

        async def on_startup(self, app: web.Application) -> None:
            """Says nothing: nobody can come yet."""

        async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
            """Only from this page: a browser tells which one asks, and lets no page lie about it."""
            if request.headers.get("Origin") != address.url:
                raise web.HTTPForbidden(text=f"open {address.url} itself")
            return await super().handle_websocket(request)

    page = Page(shlex.join(command), address.host, address.port, "tokenspeed top", address.url)

    def announce(_: str) -> None:
        print(f"the dashboard is at {address.url}; Ctrl-C ends it", flush=True)

    # As Server.serve does it, but without its log, and with the words once it listens.
    web.run_app(page._make_app(), host=address.host, port=address.port, print=announce)
