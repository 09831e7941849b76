"""What the frontend's tests share: the real default model, and a frontend over a scripted engine."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from scripted_engine import Stack

from tokenspeed.frontend.text_assets import TextAssets, load_text_assets
from tokenspeed.recipes.prepare import resolve_model
from tokenspeed.recipes.resolved import ModelSource


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's GGUF file, fetched where it is not in the cache yet."""
    return Path(resolve_model("smollm2-135m", {}).model.path)


@pytest.fixture(scope="session")
def smollm2_text(smollm2: Path) -> TextAssets:
    return load_text_assets(ModelSource(kind="gguf", path=str(smollm2)))


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    """A frontend with a scripted engine that is ready."""
    stack = Stack()
    await stack.new_engine()
    yield stack
    await stack.close()
