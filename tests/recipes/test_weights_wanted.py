"""Which files of a repository are fetched: lists of real repositories, by name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.recipes.weights import FetchError
from tokenspeed.recipes.weights.manifest import HubFile
from tokenspeed.recipes.weights.wanted import wanted_files

TEXT = ["config.json", "generation_config.json", "tokenizer_config.json"]
CASES = {
    "several formats side by side": (
        [*TEXT, "tokenizer.json", "model.safetensors", "pytorch_model.bin", "tf_model.h5", "flax_model.msgpack"],
        [*TEXT, "tokenizer.json", "model.safetensors"],
    ),
    "shards, code and pictures (Kimi K2.5)": (
        [
            *TEXT, "tiktoken.model", "chat_template.jinja", "preprocessor_config.json", "model.safetensors.index.json",
            "model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors", "modeling_deepseek.py",
            "figures/demo.png", "README.md", "LICENSE", ".gitattributes",
        ],
        [
            *TEXT, "tiktoken.model", "chat_template.jinja", "preprocessor_config.json", "model.safetensors.index.json",
            "model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors",
        ],
    ),
    "copies in subfolders (gpt-oss)": (
        [
            *TEXT, "tokenizer.json", "special_tokens_map.json", "model.safetensors.index.json",
            "model-00000-of-00001.safetensors", "original/model.safetensors", "original/generation_config.json",
            "metal/model.bin",
        ],
        [
            *TEXT, "tokenizer.json", "special_tokens_map.json", "model.safetensors.index.json",
            "model-00000-of-00001.safetensors",
        ],
    ),
    "the vendor's own copy (Mistral)": (
        [
            *TEXT, "tekken.json", "params.json", "consolidated.safetensors", "model.safetensors.index.json",
            "model-00001-of-00001.safetensors", "tokenizer.model.v3",
        ],
        [*TEXT, "tekken.json", "model.safetensors.index.json", "model-00001-of-00001.safetensors"],
    ),
    "quantised, with the index of another format": (
        [
            *TEXT, "hf_quant_config.json", "merges.txt", "vocab.json", "model.safetensors",
            "pytorch_model.bin.index.json", "qwen.tiktoken",
        ],
        [*TEXT, "hf_quant_config.json", "merges.txt", "vocab.json", "model.safetensors", "qwen.tiktoken"],
    ),
    "safetensors win over a GGUF": (
        ["config.json", "model.safetensors", "m-Q4_0.gguf"],
        ["config.json", "model.safetensors"],
    ),
    "one GGUF": (["README.md", "config.json", "m-q4_0.gguf"], ["m-q4_0.gguf"]),
}  # fmt: skip


def listed(*names: str) -> list[HubFile]:
    return [HubFile(path=name, size=1, blob="0" * 40) for name in names]


@pytest.mark.parametrize("case", CASES)
def test_what_the_engine_needs(case: str) -> None:
    names, wanted = CASES[case]
    assert sorted(file.path for file in wanted_files("a/b", listed(*names), "")) == sorted(wanted)


@pytest.mark.parametrize(
    ("weight_format", "chosen"),
    [("gguf-q8_0", "m-Q8_0.gguf"), ("gguf-q4_k_m", "m.Q4_K_M.gguf"), ("gguf-bf16", "BF16/m-bf16.gguf")],
)
def test_a_gguf_is_chosen_by_its_format(weight_format: str, chosen: str) -> None:
    files = listed("m-Q8_0.gguf", "m.Q4_K_M.gguf", "m-Q4_0.gguf", "BF16/m-bf16.gguf", "model.safetensors")
    assert [file.path for file in wanted_files("a/b", files, weight_format)] == [chosen]


def test_what_is_ambiguous_or_unreadable_is_refused() -> None:
    many = listed(*[f"m-{kind}.gguf" for kind in range(9)])
    with pytest.raises(FetchError, match=r"a/b holds 9 GGUF files \(m-0.gguf, .* and 3 more\); say which"):
        wanted_files("a/b", many, "gguf-q4_0")
    with pytest.raises(FetchError, match=r"holds neither \*.safetensors nor \*.gguf; name a repository"):
        wanted_files("a/b", listed("config.json"), "")


NAMES = st.sampled_from(sorted({name for names, _ in CASES.values() for name in names}))


def test_a_split_gguf_is_taken_whole() -> None:
    parts = [f"Q4_K_M/m-Q4_K_M-0000{number}-of-00003.gguf" for number in (2, 1, 3)]
    files = listed("m-Q8_0.gguf", *parts)
    assert [file.path for file in wanted_files("a/b", files, "gguf-q4_k_m")] == sorted(parts)
    assert [file.path for file in wanted_files("a/b", listed(*parts), "")] == sorted(parts)
    with pytest.raises(FetchError, match=r"holds 2 GGUF files \(Q4_K_M/m-Q4_K_M\.gguf, m-Q8_0\.gguf\)"):
        wanted_files("a/b", files, "")


@given(st.lists(NAMES, unique=True), st.sampled_from(["", "bfloat16", "gguf-q4_0"]))
def test_never_two_formats_and_never_what_is_not_there(names: list[str], weight_format: str) -> None:
    try:
        chosen = [file.path for file in wanted_files("a/b", listed(*names), weight_format)]
    except FetchError:
        return
    assert set(chosen) <= set(names)
    assert len(chosen) == len(set(chosen))
    weights = {name.rsplit(".", 1)[1] for name in chosen if name.endswith((".safetensors", ".gguf", ".bin", ".h5"))}
    assert weights in ({"safetensors"}, {"gguf"})
    if any(name.endswith(".gguf") for name in chosen):
        assert len(chosen) == 1
