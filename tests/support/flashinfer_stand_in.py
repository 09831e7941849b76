"""FlashInfer, as far as we call it, by PyTorch on the CPU: it binds calls to the real signatures, refuses what the real
functions refuse, and computes what their documentation says. What it does not show is that the real ones do so."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from library_contracts import Contract, whole_page_attention

SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def pages_of(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """[heads, positions, D] of a cache [pages, heads, page, D]."""
    found = cache[pages.long()]
    return found.transpose(0, 1).flatten(1, 2)


def check_caches(keys: torch.Tensor, values: torch.Tensor) -> None:
    assert keys.stride() == values.stride(), "K and V strides differ"
    assert keys.stride(-1) == 1
    assert keys.dtype in SIXTEEN_BITS


def check_list(tensor: torch.Tensor, size: int | None = None) -> None:
    assert tensor.dtype is torch.int32 and tensor.dim() == 1 and tensor.is_contiguous()
    assert size is None or tensor.shape[0] == size


class StandIn:
    """The modules of the library; ``plans`` counts what was planned."""

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self.plans = 0

    def prefill_wrapper(self) -> type:
        outer = self
        where = "flashinfer/prefill.py:BatchPrefillWithPagedKVCacheWrapper"

        class BatchPrefillWithPagedKVCacheWrapper:
            place = where

            def __init__(self, *arguments: Any, **named: Any) -> None:
                self.made = outer.contract.bind(f"{self.place}.__init__", self, *arguments, **named)
                assert self.made["kv_layout"] == "HND" and self.made["backend"] in ("fa2", "fa3")
                assert self.made["float_workspace_buffer"].data_ptr() % 16 == 0

            def plan(self, *arguments: Any, **named: Any) -> None:
                outer.plans += 1
                self.planned = planned = outer.contract.bind(f"{where}.plan", self, *arguments, **named)
                rows = planned["paged_kv_last_page_len"].shape[0]
                for name in ("qo_indptr", "paged_kv_indptr"):
                    check_list(planned[name], rows + 1)
                    assert int(planned[name][0]) == 0
                check_list(planned["paged_kv_indices"], int(planned["paged_kv_indptr"][-1]))

            def run(self, *arguments: Any, **named: Any) -> torch.Tensor:
                given = outer.contract.bind(f"{self.place}.run", self, *arguments, **named)
                planned = self.planned
                return outer.planned_attention(planned, given, sinks=None, scale=planned["sm_scale"])

        return BatchPrefillWithPagedKVCacheWrapper

    def sink_wrapper(self, base: Any) -> type:
        outer = self

        class BatchAttentionWithAttentionSinkWrapper(base):
            place = "flashinfer/attention/_core.py:BatchAttentionWithAttentionSinkWrapper"

            def run(self, *arguments: Any, **named: Any) -> torch.Tensor:
                given = outer.contract.bind(f"{self.place}.run", self, *arguments, **named)
                sinks, scale = given["args"]
                assert sinks.dtype is torch.float32
                assert not self.planned.get("logits_soft_cap"), "the variant with sinks has no soft cap"
                assert self.made["window_left"] == self.planned["window_left"]
                given |= given.pop("kwargs")
                return outer.planned_attention(self.planned, given, sinks=sinks, scale=scale)

        return BatchAttentionWithAttentionSinkWrapper

    def planned_attention(
        self, planned: dict[str, Any], given: dict[str, Any], sinks: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        q, (keys, values), out = given["q"], given["paged_kv_cache"], given["out"]
        check_caches(keys, values)
        assert planned["causal"] is True and q.dtype is planned["q_data_type"] is out.dtype is keys.dtype
        assert q.shape == out.shape == (int(planned["qo_indptr"][-1]), planned["num_qo_heads"], planned["head_dim_qk"])
        assert keys.shape[1:] == (planned["num_kv_heads"], planned["page_size"], planned["head_dim_qk"])
        queries, starts = planned["qo_indptr"].tolist(), planned["paged_kv_indptr"].tolist()
        for row, last in enumerate(planned["paged_kv_last_page_len"].tolist()):
            mine = slice(queries[row], queries[row + 1])
            pages = planned["paged_kv_indices"][starts[row] : starts[row + 1]]
            length = max(0, len(pages) - 1) * planned["page_size"] + last
            kept = pages_of(values, pages)
            kept[:, length:] = (
                0  # the library zeroes the values behind a row's end, and does not look at the keys there
            )
            out[mine] = whole_page_attention(
                q[mine], pages_of(keys, pages), kept, length, scale=scale, window=planned["window_left"] + 1,
                soft_cap=planned["logits_soft_cap"] or 0.0, sinks=sinks,
            )[0].to(out.dtype)  # fmt: skip
        return out

    def mla_wrapper(self) -> type:
        outer = self
        place = "flashinfer/mla/_batch_mla/_wrapper.py:BatchMLAPagedAttentionWrapper"

        class BatchMLAPagedAttentionWrapper:
            def __init__(self, *arguments: Any, **named: Any) -> None:
                made = outer.contract.bind(f"{place}.__init__", self, *arguments, **named)
                assert made["backend"] in ("fa2", "fa3")

            def plan(self, *arguments: Any, **named: Any) -> None:
                outer.plans += 1
                self.planned = planned = outer.contract.bind(f"{place}.plan", self, *arguments, **named)
                rows = planned["metadata"]
                check_list(rows["qo_indptr"], rows["kv_len_arr"].shape[0] + 1)
                check_list(rows["kv_indptr"], rows["kv_len_arr"].shape[0] + 1)
                check_list(rows["kv_indices"], int(rows["kv_indptr"][-1]))
                wanted = -(-rows["kv_len_arr"] // planned["page_size"])
                assert torch.equal(rows["kv_indptr"][1:] - rows["kv_indptr"][:-1], wanted)
                refuse_tile_boundaries(rows, planned["num_heads"])

            def run(self, *arguments: Any, **named: Any) -> torch.Tensor:
                given = outer.contract.bind(f"{place}.run", self, *arguments, **named)
                return outer.planned_latent(self.planned, given)

        return BatchMLAPagedAttentionWrapper

    def planned_latent(self, planned: dict[str, Any], given: dict[str, Any]) -> torch.Tensor:
        (q, q_rope), (latents, rotated), out = given["query"], given["kv_cache"], given["out"]
        with_lse = planned["lse_mode"] == "basee"
        assert with_lse == given["return_lse"] == given["return_lse_base_on_e"] == (given["lse"] is not None)
        assert (planned["query_layout"], planned["kv_cache_layout"]) == ("split", "split")
        assert {x.dtype for x in (q, q_rope, latents, rotated, out)} == {planned["q_data_type"]}
        for tensor in (q, q_rope, latents, rotated):
            assert tensor.stride(-1) == 1
            assert all(tensor.stride(axis) * tensor.element_size() % 16 == 0 for axis in range(tensor.dim() - 1))
        rows = planned["metadata"]
        queries, starts = rows["qo_indptr"].tolist(), rows["kv_indptr"].tolist()
        keys = torch.cat([latents, rotated], dim=-1).unsqueeze(1)
        for row, length in enumerate(rows["kv_len_arr"].tolist()):
            mine = slice(queries[row], queries[row + 1])
            pages = rows["kv_indices"][starts[row] : starts[row + 1]]
            gathered = pages_of(keys, pages)
            gathered[:, length:] = 0
            found = whole_page_attention(
                torch.cat([q[mine], q_rope[mine]], dim=-1), gathered, gathered[..., : latents.shape[-1]], length,
                scale=planned["sm_scale"],
            )  # fmt: skip
            out[mine] = found[0].to(out.dtype)
            if with_lse:
                given["lse"][mine] = found[1]
        return out

    def csr(self, *arguments: Any, **named: Any) -> dict[str, torch.Tensor]:
        given = self.contract.bind(
            "flashinfer/mla/_batch_mla/_contracts.py:MLAPlanMetadata.csr", None, *arguments, **named
        )
        del given["cls"]
        return given

    def batch_decode(self, *arguments: Any, **named: Any) -> torch.Tensor:
        given = self.contract.bind("flashinfer/decode.py:trtllm_batch_decode_with_kv_cache", *arguments, **named)
        width = given["q_len_per_req"]
        assert given["query"].shape[0] == given["seq_lens"].shape[0] * width
        starts = torch.arange(0, given["query"].shape[0] + 1, width, dtype=torch.int32)
        return self.by_table(given, starts)

    def batch_context(self, *arguments: Any, **named: Any) -> torch.Tensor:
        given = self.contract.bind("flashinfer/prefill.py:trtllm_batch_context_with_kv_cache", *arguments, **named)
        starts = given["cum_seq_lens_q"]
        check_list(starts, given["batch_size"] + 1)
        assert given["causal"] is True and int(starts[0]) == 0
        assert given["max_q_len"] >= int((starts[1:] - starts[:-1]).max())
        assert given["max_kv_len"] >= int(given["seq_lens"].max())
        lengths = given["cum_seq_lens_kv"][1:] - given["cum_seq_lens_kv"][:-1]
        assert torch.equal(lengths, given["seq_lens"])
        return self.by_table(given, starts)

    def by_table(self, given: dict[str, Any], starts: torch.Tensor) -> torch.Tensor:
        q, (keys, values), out, table = given["query"], given["kv_cache"], given["out"], given["block_tables"]
        check_caches(keys, values)
        check_list(given["seq_lens"], table.shape[0])
        assert q.is_contiguous() and table.is_contiguous() and table.dtype is torch.int32
        assert (given["kv_layout"], given["backend"], given["bmm2_scale"]) == ("HND", "trtllm-gen", 1.0)
        assert not given["workspace_buffer"].any(), "the counters must be zero"
        page = keys.shape[2]
        for row, length in enumerate(given["seq_lens"].tolist()):
            mine = slice(int(starts[row]), int(starts[row + 1]))
            pages = table[row, : -(-length // page)]
            out[mine] = whole_page_attention(
                q[mine], pages_of(keys, pages), pages_of(values, pages), length, scale=given["bmm1_scale"],
                window=given["window_left"] + 1, sinks=given["sinks"],
            )[0].to(out.dtype)  # fmt: skip
        return out

    def latent_decode(self, *arguments: Any, **named: Any) -> torch.Tensor:
        given = self.contract.bind("flashinfer/mla/_core.py:trtllm_batch_decode_with_kv_cache_mla", *arguments, **named)
        q, cache, out, table = given["query"], given["kv_cache"], given["out"], given["block_tables"]
        latent = given["kv_lora_rank"]
        assert q.shape[-1] == latent + given["qk_rope_head_dim"] == cache.shape[-1] and cache.shape[2] in (32, 64)
        assert not 64 < q.shape[2] < 128, "there is no kernel for so many heads"
        assert given["qk_nope_head_dim"] == 128 and q.dtype is cache.dtype is out.dtype is torch.bfloat16
        for row, length in enumerate(given["seq_lens"].tolist()):
            entries = pages_of(cache, table[row, : -(-length // cache.shape[2])])
            found = whole_page_attention(q[row], entries, entries[..., :latent], length, scale=given["bmm1_scale"])
            out[row] = found[0].to(out.dtype)
            if given["lse"] is not None:
                assert given["return_lse_base"] == "basee"
                given["lse"].view(*q.shape[:3])[row] = found[1]
        return out

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Puts the modules where ``import flashinfer`` finds them, and forgets what was made of others before."""
        wrapper = self.prefill_wrapper()
        members: dict[str, dict[str, Any]] = {
            "flashinfer": {"BatchPrefillWithPagedKVCacheWrapper": wrapper},
            "flashinfer.attention": {"BatchAttentionWithAttentionSinkWrapper": self.sink_wrapper(wrapper)},
            "flashinfer.mla": {
                "BatchMLAPagedAttentionWrapper": self.mla_wrapper(),
                "MLAPlanMetadata": SimpleNamespace(csr=self.csr),
                "trtllm_batch_decode_with_kv_cache_mla": self.latent_decode,
            },
            "flashinfer.decode": {"trtllm_batch_decode_with_kv_cache": self.batch_decode},
            "flashinfer.prefill": {"trtllm_batch_context_with_kv_cache": self.batch_context},
        }
        for name, found in members.items():
            module: Any = ModuleType(name)
            module.__dict__.update(found)
            monkeypatch.setitem(sys.modules, name, module)


def refuse_tile_boundaries(rows: dict[str, torch.Tensor], heads: int) -> None:
    """The library's own refusal of rows whose tiles end within a query at a key that begins a tile of keys."""
    counts = (rows["qo_indptr"][1:] - rows["qo_indptr"][:-1]).tolist()
    tile = 64 * (2 if sum(counts) * heads // len(counts) > 64 else 1)
    for count, length in zip(counts, rows["kv_len_arr"].tolist(), strict=True):
        for end in range(tile, count * heads, tile):
            query, rest = divmod(end, heads)
            assert tile % heads == 0 or not (rest and query < count and (length - count + query) % 16 == 0)
