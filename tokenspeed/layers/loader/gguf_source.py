"""One GGUF file; its tensors are read in place, in the format they are stored in."""

import re
from pathlib import Path

import torch

from tokenspeed.layers.loader.source import MappedFile
from tokenspeed.layers.weights import WeightSpec
from tokenspeed.recipes.gguf_file import GgufError, read_gguf_header
from tokenspeed.recipes.model_config import CheckpointError
from tokenspeed_kernel.quantized import QuantizedTensor

_DENSE = {
    "F32": (torch.float32, "float32"),
    "F16": (torch.float16, "float16"),
    "BF16": (torch.bfloat16, "bfloat16"),
}
_QUANTIZED = {
    "Q4_0": "gguf_q4_0",
    "Q4_1": "gguf_q4_1",
    "Q5_0": "gguf_q5_0",
    "Q5_1": "gguf_q5_1",
    "Q8_0": "gguf_q8_0",
    "Q2_K": "gguf_q2_k",
    "Q3_K": "gguf_q3_k",
    "Q4_K": "gguf_q4_k",
    "Q5_K": "gguf_q5_k",
    "Q6_K": "gguf_q6_k",
}

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROTARY_FACTORS = "rope_freqs.weight"


class GgufSource:
    """The tensors of one file under their Hugging Face names."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        try:
            header = read_gguf_header(path)
        except GgufError as error:
            raise CheckpointError(str(error)) from error
        self._file = MappedFile(path)
        self._factors = header.tensors.get(_ROTARY_FACTORS)
        self._tensors = {_name(name): tensor for name, tensor in header.tensors.items() if name != _ROTARY_FACTORS}

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def matrix(self, spec: WeightSpec) -> QuantizedTensor:
        tensor = self._tensors[spec.name]
        rows, columns = tensor.shape
        source = f"{Path(self.where).name}:{tensor.name}"
        if tensor.type_name in _DENSE:
            dtype, name = _DENSE[tensor.type_name]
            data = self._file.view(tensor.offset, tensor.nbytes, dtype).view(rows, columns)
            return QuantizedTensor(format=name, shape=(rows, columns), planes={"data": data}, source=source)
        if tensor.type_name in _QUANTIZED:
            blocks = self._file.view(tensor.offset, tensor.nbytes, torch.uint8).view(rows, tensor.nbytes // rows)
            quantized = _QUANTIZED[tensor.type_name]
            return QuantizedTensor(format=quantized, shape=(rows, columns), planes={"blocks": blocks}, source=source)
        raise CheckpointError(
            f"{self.where}: {tensor.name} is stored as {tensor.type_name}; supported are "
            f"{', '.join([*_DENSE, *_QUANTIZED])}: take a file quantised to one of these"
        )

    def converted(self, _spec: WeightSpec) -> QuantizedTensor | None:
        return None

    def is_converted(self, _name: str) -> bool:
        return False

    def vector(self, spec: WeightSpec) -> torch.Tensor:
        tensor = self._tensors[spec.name]
        return self._float_vector(tensor.name, tensor.type_name, tensor.offset, tensor.nbytes).view(spec.shape)

    def forget(self, name: str) -> None:
        tensor = self._tensors[name]
        self._file.forget(tensor.offset, tensor.nbytes)

    def rotary_factors(self) -> torch.Tensor | None:
        tensor = self._factors
        if tensor is None:
            return None
        return self._float_vector(tensor.name, tensor.type_name, tensor.offset, tensor.nbytes)

    def _float_vector(self, name: str, type_name: str, offset: int, nbytes: int) -> torch.Tensor:
        if type_name not in _DENSE:
            raise CheckpointError(
                f"{self.where}: {name} is stored as {type_name}; a vector is one of {', '.join(_DENSE)}"
            )
        return self._file.view(offset, nbytes, _DENSE[type_name][0]).to(torch.float32, copy=True)


def _name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name without counterpart stays as it is (and is refused later)."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer and layer[2] in _LAYER:
        return f"model.layers.{layer[1]}.{_LAYER[layer[2]]}.{layer[3]}"
    top = re.fullmatch(r"(\w+)\.(weight|bias)", name)
    if top and top[1] in _TOP:
        return f"{_TOP[top[1]]}.{top[2]}"
    return name
