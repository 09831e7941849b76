"""The administration's port: taken at once, refused by name, and waited for where another server still has it."""

import asyncio

import httpx
import pytest
from fastapi import FastAPI

from tokenspeed.launch import admin_port
from tokenspeed.launch.admin_port import AdminPort
from tokenspeed.recipes.resolved import ApiSettings


def application(name: str) -> FastAPI:
    app = FastAPI()
    app.add_api_route("/", lambda: name)
    return app


async def asked(address: str) -> str:
    async with httpx.AsyncClient() as client:
        return str((await client.get(f"{address}/")).json())


async def test_a_server_that_follows_gets_the_port_when_the_other_one_leaves_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admin_port, "TAKE_AGAIN_S", 0.01)
    first = AdminPort(ApiSettings(admin_port=0), follows=False)
    first.serve(application("first"))
    assert first.address.startswith("http://127.0.0.1:") and await asked(first.address) == "first"
    port = int(first.address.rpartition(":")[2])
    with pytest.raises(OSError, match=f"127.0.0.1:{port}.*--admin-port"):
        AdminPort(ApiSettings(admin_port=port), follows=False)
    second = AdminPort(ApiSettings(admin_port=port), follows=True)
    assert second.address == ""
    second.serve(application("second"))
    assert await asked(first.address) == "first"
    await first.close()
    async with asyncio.timeout(10):
        while not second.address:
            await asyncio.sleep(0)
    assert await asked(f"http://127.0.0.1:{port}") == "second"
    await second.close()


async def test_one_that_never_got_the_port_leaves_all_the_same() -> None:
    first = AdminPort(ApiSettings(admin_port=0), follows=False)
    port = int(first.address.rpartition(":")[2])
    second = AdminPort(ApiSettings(admin_port=port), follows=True)
    second.serve(application("second"))
    await asyncio.sleep(0)
    await second.close()
    await first.close()
    AdminPort(ApiSettings(admin_port=port), follows=False)._listener.close()  # type: ignore[union-attr]


async def test_without_a_port_there_is_nothing() -> None:
    nothing = AdminPort(ApiSettings(), follows=False)
    nothing.serve(application("x"))
    assert nothing.address == ""
    await nothing.close()
