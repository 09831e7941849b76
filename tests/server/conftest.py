"""The real application over a scripted engine: in process for most tests, on a real port where connections matter."""

from collections.abc import AsyncIterator

import httpx
import pytest
from app_server import serving
from fastapi import FastAPI
from scripted_engine import Stack

from tokenspeed.server.app import create_app


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    """A frontend with a scripted engine that is ready."""
    stack = Stack()
    await stack.new_engine()
    yield stack
    await stack.close()


@pytest.fixture
def app(stack: Stack) -> FastAPI:
    return create_app(stack.llm)


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """HTTP without a network."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.fixture
async def url(app: FastAPI) -> AsyncIterator[str]:
    """A real server on a free port."""
    async with serving(app) as url:
        yield url
