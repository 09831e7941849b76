"""``--web``: the dashboard in a browser, for those who may, and clear words where it cannot be."""

import asyncio
import os
import signal
import socket
import subprocess
import sys

import aiohttp
import pytest

from tokenspeed_tui import main
from tokenspeed_tui.command import without_web
from tokenspeed_tui.web import WEB_PORT, WebAddress, parse_address


@pytest.mark.parametrize(
    ("text", "address", "local"),
    [
        ("8001", WebAddress("127.0.0.1", 8001), True),
        ("localhost:80", WebAddress("localhost", 80), True),
        ("[::1]:8001", WebAddress("::1", 8001), True),
        ("192.168.1.7:9000", WebAddress("192.168.1.7", 9000), False),
        ("gpu-7:9000", WebAddress("gpu-7", 9000), False),
    ],
)
def test_an_address_is_a_port_of_this_machine_unless_it_says_more(text, address, local):
    assert parse_address(text) == address
    assert address.is_local is local
    assert address.url.startswith("http://[::1]:8001" if ":" in address.host else f"http://{address.host}:")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x", "is no [HOST:]PORT"),
        ("70000", "is no [HOST:]PORT"),
        ("0.0.0.0:8001", "name the address"),
        ("[::]:8001", "name the address"),
    ],
)
def test_what_is_no_address_is_refused(text, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--web", text])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "left"),
    [
        (["--web", "--url", "x"], ["--url", "x"]),
        (["--url", "x", "--web", "8002"], ["--url", "x"]),
        (["--web=8002", "--demo", "7"], ["--demo", "7"]),
        (["--demo", "7", "--web"], ["--demo", "7"]),
    ],
)
def test_the_page_runs_the_same_command_without_it(argv, left):
    assert without_web(argv) == left


def test_without_the_package_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "textual_serve.server", None)
    assert main(["--web"]) == 2
    error = capsys.readouterr().err
    assert "make top-web" in error
    assert "pip install 'textual-serve" in error
    assert error.count("\n") == 1


def test_a_port_that_is_taken_is_named(capsys):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        assert main(["--web", str(port)]) == 2
    assert f"http://127.0.0.1:{port} cannot be listened on" in capsys.readouterr().err


def test_a_page_is_for_the_screen(capsys):
    for extra in (["--once"], ["--record", "x"]):
        with pytest.raises(SystemExit):
            main(["--web", *extra])
        assert "--web shows the live screen" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--web", "--allow-admin", "--admin-url", "x"])
    assert "--web only shows" in capsys.readouterr().err
    assert WEB_PORT != 8000, "a server's own port"


async def _drawn(url: str) -> str:
    """What the page's socket brings until the demo's load is on the screen."""
    drawn = b""
    async with aiohttp.ClientSession() as browser:
        async with browser.get(url) as page:
            assert "tokenspeed top" in await page.text()
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await browser.ws_connect(f"{url}/ws?width=100&height=30", origin="http://elsewhere.example")
        assert refused.value.status == 403
        async with browser.ws_connect(f"{url}/ws?width=100&height=30", origin=url) as terminal:
            async for message in terminal:
                drawn += message.data if isinstance(message.data, bytes) else message.data.encode()
                if b"Submitted" in drawn and b"Decoding" in drawn:
                    return drawn.decode(errors="replace")
    raise AssertionError(f"the page closed: {drawn!r}")


def test_a_browser_sees_the_dashboard_and_another_site_does_not():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tokenspeed.cli", "top", "--demo", "--web", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"the dashboard is at http://127.0.0.1:{port}; Ctrl-C ends it\n"
        asyncio.run(asyncio.wait_for(_drawn(f"http://127.0.0.1:{port}"), 60))
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
