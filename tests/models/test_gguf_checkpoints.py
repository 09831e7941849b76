"""GGUF files: the header reader equals the gguf package's, the weights give the logits of what they encode."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from model_checks import check_prompt
from plan_maker import Request, run
from tiny_models import build, resolved, save, transformers_model

from tokenspeed.recipes.gguf_file import GgufError, read_gguf_header
from tokenspeed.recipes.gguf_formats import FILE_TYPES, TENSOR_FORMATS
from tokenspeed.recipes.model_config import CheckpointError, read_model_config
from tokenspeed.recipes.resolved import ModelSource
from tokenspeed_kernel.numerics.k_quants import random_blocks

TYPES = {
    name: gguf.GGMLQuantizationType[name]
    for name in ("F32", "F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "TQ2_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
}
MIXTURES = {"Q4_K_M": {"v_proj": "Q6_K", "down_proj": "Q5_K", "o_proj": "Q3_K", "up_proj": "Q2_K", "": "Q4_K"}}
"""Name of a file type that mixes formats to the format of what a tensor's name contains, the first that fits."""
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name.replace("model.layers.", "blk.")


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """The row order that converters give the q and k projections of llama models."""
    rows = values.shape[0]
    shape = (heads, 2, rows // heads // 2, *values.shape[1:])
    return values.reshape(shape).swapaxes(1, 2).reshape(values.shape)


def encoded(values: np.ndarray, type_name: str) -> np.ndarray:
    """The bytes of ``values`` in a format; of a K format, which the gguf package cannot write, random bytes that are
    weights of about the same size."""
    if not type_name.endswith("_K"):
        return gguf.quants.quantize(values, TYPES[type_name])
    rows, columns = values.shape
    blocks = random_blocks(f"gguf_{type_name.lower()}", rows, columns // 256, 0.2, torch.Generator().manual_seed(rows))
    return blocks.plane.reshape(rows, -1).numpy()


def write(
    model: torch.nn.Module, path: Path, type_name: str, *, family: str, metadata: dict[str, object] | None = None
) -> torch.nn.Module:
    """Writes ``model`` as GGUF with matrices of ``type_name`` and puts what they encode back into ``model``."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_token_list(["<a>", "é", "<b>"])
    writer.add_array("test.empty", [1.5])
    writer.add_bool("test.flag", True)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    for key, value in (metadata or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_float32)(key, value)
    mixture = MIXTURES.get(type_name, {"": type_name})
    state = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values, heads = value.numpy(), 0
        if family == "llama" and "q_proj" in name:
            heads = config.num_attention_heads
        if family == "llama" and "k_proj" in name:
            heads = config.num_key_value_heads
        stored_as = next(kind for part, kind in mixture.items() if part in name) if values.ndim == 2 else "F32"
        kind = TYPES[stored_as]
        stored = encoded(values, stored_as)
        decoded = gguf.quants.dequantize(stored, kind)
        state[name] = torch.from_numpy(np.ascontiguousarray(decoded)).view(value.shape)
        stored = interleaved(stored, heads) if heads else stored
        writer.add_tensor(gguf_name(name), stored, raw_dtype=kind if values.ndim == 2 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.load_state_dict(state, strict=False)
    return model


def source(path: Path) -> ModelSource:
    return ModelSource(kind="gguf", path=str(path))


@pytest.mark.parametrize(
    ("family", "type_name", "changes"),
    [
        ("llama", "Q4_1", {"tie_word_embeddings": True}),
        ("llama", "Q4_0", {}),
        ("llama", "Q8_0", {"attention_bias": True}),
        ("llama", "Q5_0", {}),
        ("llama", "F16", {}),
        ("qwen3", "Q8_0", {"tie_word_embeddings": True}),
        ("qwen3", "Q5_1", {}),
        ("qwen3", "F32", {}),
        ("llama", "Q4_K_M", {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "num_hidden_layers": 1}),
        ("qwen3", "Q6_K", {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256, "num_hidden_layers": 1}),
    ],
)
def test_logits_are_those_of_the_encoded_weights(
    family: str, type_name: str, changes: dict[str, object], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    model = write(transformers_model(family, **changes), path, type_name, family=family)
    device = build(resolved(source(path), kv_dtype="float32"))
    try:
        check_prompt(model, device, [3, 1, 4, 1, 5, 9, 2, 6])
    finally:
        device.handle.shutdown()


def test_rotary_factors_in_the_file_are_applied(tmp_path: Path) -> None:
    path, plain = tmp_path / "factors.gguf", tmp_path / "plain"
    model = transformers_model("llama", rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0})
    save(model, plain)
    extended = transformers_model("llama")
    extended.load_state_dict(model.state_dict())
    write(extended, path, "F32", family="llama")
    with_factors(path, np.full(8, 2.0, np.float32))
    outputs = []
    for where in (source(path), plain):
        device = build(resolved(where))
        outputs.append(run(device.handle, [Request(prompt=list(range(30)), row=1, max_new_tokens=16)], granularity=16))
        device.handle.shutdown()
    assert outputs[0] == outputs[1]


def with_factors(path: Path, factors: np.ndarray) -> None:
    """Writes the file at ``path`` again with the tensor rope_freqs.weight added."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(str(path.with_suffix(".new")), "llama")
    for name, field in reader.fields.items():
        if name.startswith(("llama.", "tokenizer.ggml.eos")):
            writer.add_key_value(name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".new").rename(path)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    write(transformers_model("llama"), tmp_path / "small.gguf", "Q8_0", family="llama")
    return tmp_path / "small.gguf"


def test_the_formats_numbers_are_the_packages() -> None:
    sizes = {int(kind): (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGML_QUANT_SIZES}
    # A newer package may know more; what stands here must be right.
    assert {kind: sizes[kind] for kind in TENSOR_FORMATS} == TENSOR_FORMATS
    plain = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
    for number, name in FILE_TYPES.items():
        theirs = gguf.LlamaFileType(number).name.removeprefix("MOSTLY_").removeprefix("ALL_").lower()
        assert plain.get(theirs, theirs) == name


def test_the_header_equals_what_the_gguf_package_reads(small: Path) -> None:
    ours, theirs = read_gguf_header(small), gguf.GGUFReader(small)
    expected = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == expected
    places = {
        tensor.name: (
            tuple(int(extent) for extent in reversed(tensor.shape)),
            tensor.tensor_type.name,
            int(tensor.data_offset),
            int(tensor.n_bytes),
        )
        for tensor in theirs.tensors
    }
    assert {t.name: (t.shape, t.type_name, t.offset, t.nbytes) for t in ours.tensors.values()} == places


def test_the_configuration(small: Path) -> None:
    config = read_model_config(source(small))
    assert (config.architecture, config.vocab_size, config.num_layers, config.head_dim) == ("llama", 128, 2, 16)
    assert (config.eos_token_ids, config.dtype, config.q_and_k_permuted) == ((2, 5), "q4_1", True)
    assert not config.tie_word_embeddings


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "rotary scaling 'longrope'"),
        ({"llama.rope.scaling.attn_factor": 1.5}, r"rope\.scaling\.attn_factor is 1\.5, supported is 1\.0"),
        ({"llama.expert_count": "8"}, "expert_count is '8'"),
    ],
)
def test_what_would_have_to_be_ignored_is_refused(tmp_path: Path, metadata: dict[str, object], words: str) -> None:
    path = tmp_path / "model.gguf"
    write(transformers_model("llama"), path, "F32", family="llama", metadata=metadata)
    with pytest.raises(CheckpointError, match=words):
        read_model_config(source(path))


def test_a_factor_of_attention_is_that_of_the_checkpoint_it_came_from(tmp_path: Path) -> None:
    """Converters write what config.json calls attention_factor."""
    path, place = tmp_path / "model.gguf", "llama.rope.scaling"
    scaling = {f"{place}.type": "yarn", f"{place}.factor": 4.0, f"{place}.original_context_length": 64.0}
    write(transformers_model("llama"), path, "F32", family="llama", metadata=scaling)
    assert read_model_config(source(path)).rope.parameters["attention_factor"] == 0.0  # by the length, as always
    factors = {f"{place}.yarn_attn_factor": 1.25, f"{place}.attn_factor": 1.0}
    write(transformers_model("llama"), path, "F32", family="llama", metadata=scaling | factors)
    assert read_model_config(source(path)).rope.parameters["attention_factor"] == 1.25


def test_an_unsupported_quantisation_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shape = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256, "num_hidden_layers": 1}
    write(transformers_model("llama", **shape), path, "TQ2_0", family="llama")
    with pytest.raises(
        CheckpointError, match=r"token_embd\.weight is stored as TQ2_0; supported are F32, F16, BF16, Q4"
    ):
        build(resolved(source(path)))


def test_every_way_of_cutting_a_file_short_is_refused(small: Path) -> None:
    data = small.read_bytes()
    header_end = min(tensor.offset for tensor in read_gguf_header(small).tensors.values())
    for length in [0, 3, *range(4, header_end, 37), header_end, len(data) - 40]:
        small.write_bytes(data[:length])
        with pytest.raises(GgufError, match=r"small\.gguf: "):
            read_gguf_header(small)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (0, b"GGML", "does not begin with GGUF"),
        (4, (1).to_bytes(4, "little"), "GGUF version 1"),
        (8, (1 << 40).to_bytes(8, "little"), "cut short or damaged"),
        (16, (1 << 50).to_bytes(8, "little"), "damaged|unknown type"),
        (24, (1 << 62).to_bytes(8, "little"), "cut short or damaged"),
    ],
)
def test_a_damaged_header(small: Path, place: int, value: bytes, words: str) -> None:
    data = bytearray(small.read_bytes())
    data[place : place + len(value)] = value
    small.write_bytes(data)
    with pytest.raises(GgufError, match=words):
        read_gguf_header(small)


def test_a_missing_file_and_a_wrong_architecture(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no such file"):
        read_model_config(source(tmp_path / "none.gguf"))
    writer = gguf.GGUFWriter(str(tmp_path / "clip.gguf"), "clip")
    writer.add_tensor("x", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"general\.architecture is 'clip'; supported are llama, qwen2, qwen3"):
        read_model_config(source(tmp_path / "clip.gguf"))
