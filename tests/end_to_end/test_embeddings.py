"""Embeddings over HTTP, with the official client, of the recipe's smoke profile."""

from collections.abc import Iterator

import numpy as np
import openai
import pytest
from running_server import RunningServer

MODEL = "qwen3-embedding-0.6b-smoke"
TEXTS = [f"Block {number} of {'very ' * (number % 40)}many." for number in range(48)]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    guarded = {"TOKENSPEED_GUARD_CONTROL_PLANE": "1"}  # a tensor operation on the loop's thread ends the engine
    flags = ("--profile", "smoke", "--overlap-depth", "1", "--chunked-prefill-size", "48", "--kv-cache-gb", "0.05")
    with RunningServer("qwen3-embedding-0.6b", *flags, environment=guarded) as running:
        yield openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


def vectors(client: openai.OpenAI, texts: list[str], **fields: object) -> np.ndarray:
    answer = client.embeddings.create(model=MODEL, input=texts, **fields)  # type: ignore[arg-type]
    assert [item.index for item in answer.data] == list(range(len(texts)))
    return np.array([item.embedding for item in answer.data])


def test_many_at_once_are_those_of_each_alone(client: openai.OpenAI) -> None:
    together = vectors(client, TEXTS)
    assert together.shape == (48, 256) and np.abs(np.linalg.norm(together, axis=1) - 1).max() < 1e-6
    alone = np.concatenate([vectors(client, [text]) for text in TEXTS[::7]])
    assert np.abs(together[::7] - alone).max() < 1e-5
    assert (together @ together.T)[~np.eye(48, dtype=bool)].max() < 1 - 1e-4, "other texts have other vectors"


def test_float_and_base64_are_the_same_numbers(client: openai.OpenAI) -> None:
    """The client asks for base64 where nothing is said."""
    assert (vectors(client, TEXTS[:4]) == vectors(client, TEXTS[:4], encoding_format="float")).all()


def test_the_first_elements_are_those_of_the_whole_vector(client: openai.OpenAI) -> None:
    whole, cut = vectors(client, TEXTS[:4]), vectors(client, TEXTS[:4], dimensions=64)
    first = whole[:, :64] / np.linalg.norm(whole[:, :64], axis=1, keepdims=True)
    assert cut.shape == (4, 64) and np.abs(cut - first).max() < 1e-6
    with pytest.raises(openai.BadRequestError, match="32-1024, up to 256"):
        vectors(client, TEXTS[:1], dimensions=31)
