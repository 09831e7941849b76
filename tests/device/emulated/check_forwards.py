"""Whole forwards on the emulated device: the host's tokens, nothing mixed, no hidden wait."""

import pytest
from emulated_builds import GRANULARITY, LLAMA, built, outputs, requests, smoke_model
from emulated_streams import DEVICE

from tokenspeed.recipes.resolved import ModelSource
from tokenspeed_kernel.platform import current_platform


def draws_what_the_host_draws(source: ModelSource, granularity: int = GRANULARITY, kv_dtype: str = "auto") -> None:
    host = built(source, "cpu", granularity=granularity, kv_dtype=kv_dtype)
    expected = outputs(host, requests(), granularity=granularity)
    host.handle.shutdown()
    made = built(source, "npu", granularity=granularity, kv_dtype=kv_dtype)
    with DEVICE.watching():
        found = outputs(made, requests(), granularity=granularity)
    made.handle.shutdown()
    assert found == expected
    assert made.specs.device == "npu" and made.specs.untouched_bytes == 0


def test_llama_and_the_platform() -> None:
    draws_what_the_host_draws(LLAMA)
    assert current_platform().key == "npu-emulated_1"


def test_experts_and_latents() -> None:
    draws_what_the_host_draws(smoke_model("kimi-k2.5"))


def test_a_cache_of_eight_bits() -> None:
    draws_what_the_host_draws(LLAMA, kv_dtype="float8_e4m3")


@pytest.mark.long
@pytest.mark.parametrize(
    "recipe",
    ["inkling", "gpt-oss-20b", "qwen3.8-flash-next", "deepseek-v3.2", "glm-5.3", "kimi-k3", "minimax-m3",
     "qwen3.6-35b-a3b", "smollm3-3b", "ernie-4.5-21b-a3b", "qwen3-8b"],
)  # fmt: skip
def test_every_other_architecture(recipe: str) -> None:
    draws_what_the_host_draws(smoke_model(recipe))


@pytest.mark.long
@pytest.mark.parametrize("kv_dtype", ["auto", "float8_e4m3"])
def test_entries_that_stand_for_many_tokens(kv_dtype: str) -> None:
    draws_what_the_host_draws(smoke_model("deepseek-v4-flash"), 128, kv_dtype)
