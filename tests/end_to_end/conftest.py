"""What the end-to-end tests share: the real default model, and one server of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from running_server import RunningServer

from tokenspeed.recipes.prepare import resolve_model

RECIPE = "smollm2-135m"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's GGUF file, fetched where it is not in the cache yet."""
    path = Path(resolve_model(RECIPE, {}).model.path)
    assert path.suffix == ".gguf"
    return path


@pytest.fixture(scope="session")
def server(smollm2: Path) -> Iterator[RunningServer]:
    """A server of the default recipe that tests share; none of them may end it."""
    flags = ("--max-model-len", "2048", "--overlap-depth", "1")  # the other servers run with the default, 0
    guarded = {"TOKENSPEED_GUARD_CONTROL_PLANE": "1"}  # a tensor operation on the loop's thread ends the engine
    with RunningServer(RECIPE, *flags, environment=guarded) as running:
        yield running
