"""AITER, as far as we call it, by PyTorch on the CPU: it binds calls to the real signatures, refuses what the real
functions refuse, and computes what their documentation says. What it does not show is that the real ones do so."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from library_contracts import Contract, whole_page_attention

BFLOAT16 = torch.bfloat16


class StandIn:
    """The modules of the library."""

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self.tokens: list[torch.Tensor] = []

    def unified_attention(self, *arguments: Any, **named: Any) -> None:
        given = self.contract.bind("aiter/ops/triton/unified_attention.py:unified_attention", *arguments, **named)
        q, keys, values, out = (given[name] for name in ("q", "k", "v", "out"))
        starts, lengths, table = given["cu_seqlens_q"], given["seqused_k"], given["block_table"]
        assert given["causal"] is True and given["q_descale"] is None
        assert q.dtype is keys.dtype is values.dtype is out.dtype is BFLOAT16
        assert q.stride(-1) == keys.stride(-1) == values.stride(-1) == out.stride(-1) == 1
        assert starts.dtype is lengths.dtype is table.dtype is torch.int32 and table.stride(-1) == 1
        assert int(starts[0]) == 0, "a row is found by its first query, and the first row's is 0"
        assert given["max_seqlen_q"] >= int((starts[1:] - starts[:-1]).max())
        assert given["max_seqlen_k"] >= int(lengths.max())
        page, window = keys.shape[1], 1 + given["window_size"][0]
        assert page & (page - 1) == 0 and page >= 16, "a page is a tile"
        for row, length in enumerate(lengths.tolist()):
            mine = slice(int(starts[row]), int(starts[row + 1]))
            pages = table[row, : -(-length // page)].long()
            gathered = [cache[pages].permute(2, 0, 1, 3).flatten(1, 2) for cache in (keys, values)]
            out[mine] = whole_page_attention(
                q[mine], *gathered, length, scale=given["softmax_scale"], window=window,
                soft_cap=given["softcap"], sinks=given["sinks"],
            )[0].to(out.dtype)  # fmt: skip

    def mla_decode_fwd(self, *arguments: Any, **named: Any) -> None:
        given = self.contract.bind("aiter/mla.py:mla_decode_fwd", *arguments, **named)
        q, entries, out = given["q"], given["kv_buffer"], given["o"]
        _, page, kv_heads, width = entries.shape
        assert (page, kv_heads, width, given["max_seqlen_q"]) == (1, 1, q.shape[2], 1)
        assert q.is_contiguous() and q.dtype is entries.dtype is out.dtype is BFLOAT16 and q.shape[1] in (16, 128)
        assert entries.stride(0) == width
        starts = given["kv_indptr"].tolist()
        assert given["qo_indptr"].tolist() == list(range(q.shape[0] + 1))
        assert given["kv_last_page_lens"].tolist() == [1] * q.shape[0]
        self.tokens.append(given["kv_indices"])
        for row in range(q.shape[0]):
            mine = given["kv_indices"][starts[row] : starts[row + 1]].long()
            found = entries[mine, 0, 0].unsqueeze(0)
            latents = found[..., : out.shape[2]]
            scale = given["sm_scale"]
            out[row] = whole_page_attention(q[row : row + 1], found, latents, len(mine), scale=scale)[0][0].to(
                out.dtype
            )

    def rms_norm(self, *arguments: Any, **named: Any) -> torch.Tensor:
        given = self.contract.bind("aiter/ops/triton/rmsnorm.py:rms_norm", *arguments, **named)
        x = given["input"]
        assert x.shape[1] % 16 == 0, "rows begin at multiples of 16"
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + given["epsilon"]) * given["weight"]

    def add_norm(self, *arguments: Any, **named: Any) -> torch.Tensor:
        given = self.contract.bind("aiter/ops/triton/rmsnorm.py:rmsnorm2d_fwd_with_add", *arguments, **named)
        out, x, before, after = (given[name] for name in ("out", "input", "residual_in", "residual_out"))
        assert x.shape[1] % 16 == 0, "rows begin at multiples of 16"
        after.copy_(x + before)
        out.copy_(after * torch.rsqrt(after.square().mean(-1, keepdim=True) + given["epsilon"]) * given["weight"])
        return out

    def product(self, *arguments: Any, **named: Any) -> torch.Tensor:
        place = "aiter/ops/triton/gemm_a16w8_blockscale.py:gemm_a16w8_blockscale"
        given = self.contract.bind(place, *arguments, **named)
        x, weight, scales = given["x"], given["w"], given["w_scale"]
        assert x.dtype is BFLOAT16 and weight.itemsize == 1 and given["dtype"] is given["y"].dtype
        whole = scales.repeat_interleave(weight.shape[0] // scales.shape[0], 0)
        whole = whole.repeat_interleave(weight.shape[1] // scales.shape[1], 1)
        given["y"].copy_(x.float() @ (weight.float() * whole).T)
        return given["y"]

    def shuffle_weight(self, *arguments: Any, **named: Any) -> torch.Tensor:
        given = self.contract.bind("aiter/ops/shuffle.py:shuffle_weight", *arguments, **named)
        x, (rows, lanes) = given["x"], given["layout"]
        assert x.shape[-2] % rows == 0 and x.shape[-1] % (2 * lanes) == 0
        laid_out = x.clone()
        laid_out.is_shuffled = True  # type: ignore[attr-defined]
        return laid_out

    def fused_moe(self, *arguments: Any, **named: Any) -> torch.Tensor:
        given = self.contract.bind("aiter/fused_moe.py:fused_moe", *arguments, **named)
        x, first, second = given["hidden_states"], given["w1"], given["w2"]
        ids, weights = given["topk_ids"], given["topk_weight"]
        assert first.is_shuffled and second.is_shuffled, "the matrix instructions read tiles"
        assert x.dtype is first.dtype is second.dtype is BFLOAT16 and weights.dtype is torch.float32
        assert ids.dtype is torch.int32 and int(ids.min()) >= 0 and int(ids.max()) < first.shape[0]
        assert (given["activation"], given["quant_type"]) == ("silu", "no")
        out = torch.zeros(x.shape)
        for slot in range(ids.shape[1]):
            gate, up = torch.einsum("th,tih->ti", x.float(), first[ids[:, slot].long()].float()).chunk(2, dim=1)
            inner = (torch.nn.functional.silu(gate) * up).to(BFLOAT16).float()
            out += weights[:, slot, None] * torch.einsum("ti,thi->th", inner, second[ids[:, slot].long()].float())
        return out.to(x.dtype)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Puts the modules where ``import aiter.…`` finds them."""
        kinds = {"ActivationType": SimpleNamespace(Silu="silu"), "QuantType": SimpleNamespace(No="no")}
        members: dict[str, dict[str, Any]] = {
            "aiter": {},
            "aiter.ops": {},
            "aiter.ops.triton": {},
            "aiter.ops.enum": kinds,
            "aiter.ops.shuffle": {"shuffle_weight": self.shuffle_weight},
            "aiter.ops.triton.unified_attention": {"unified_attention": self.unified_attention},
            "aiter.ops.triton.rmsnorm": {"rms_norm": self.rms_norm, "rmsnorm2d_fwd_with_add": self.add_norm},
            "aiter.ops.triton.gemm_a16w8_blockscale": {"gemm_a16w8_blockscale": self.product},
            "aiter.mla": {"mla_decode_fwd": self.mla_decode_fwd},
            "aiter.fused_moe": {"fused_moe": self.fused_moe},
        }
        for name, found in members.items():
            module: Any = ModuleType(name)
            module.__dict__.update(found)
            monkeypatch.setitem(sys.modules, name, module)
