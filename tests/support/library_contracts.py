"""Signatures of other projects' libraries, as scripts/library_signatures.py wrote them down, to bind our calls to."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tokenspeed_kernel.ops.attention import reference_extend
from tokenspeed_kernel.registry import KernelFunction


class Contract:
    """The functions of one library. ``used`` collects those that were called."""

    def __init__(self, path: Path) -> None:
        facts = json.loads(path.read_text(encoding="utf-8"))
        self.distribution: str = facts["distribution"]
        self.version: str = facts["version"]
        self.used: set[str] = set()
        self._signatures = {place: self._signature(found) for place, found in facts["functions"].items()}

    @staticmethod
    def _signature(parameters: list[list[Any]]) -> inspect.Signature:
        return inspect.Signature(
            [
                inspect.Parameter(
                    name, inspect._ParameterKind[kind], default=None if default else inspect.Parameter.empty
                )
                for name, kind, default in parameters
            ]
        )

    @property
    def places(self) -> set[str]:
        return set(self._signatures)

    def bind(self, place: str, *arguments: Any, **named: Any) -> dict[str, Any]:
        """The arguments by name, as the function at ``place`` would see them; TypeError for a call it refuses."""
        self.used.add(place)
        try:
            return dict(self._signatures[place].bind(*arguments, **named).arguments)
        except TypeError as error:
            raise TypeError(f"{place}: {error}") from None


def whole_page_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    length: int,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a library finds for one row: out [n, H, V] and the natural lse [n, H], float32.

    q [n, H, D], keys [Hkv, positions, D] and values [Hkv, positions, V] of whole pages, of which ``length`` positions
    were written. What lies behind is read and gets a weight of 0; a query without any key finds NaN.
    """
    count, heads, _ = q.shape
    if keys.shape[1] == 0:
        return torch.full((count, heads, values.shape[2]), torch.nan), torch.full((count, heads), torch.nan)
    positions = torch.arange(keys.shape[1])
    per_kv = heads // keys.shape[0]
    wide_keys, wide_values = (x.float().repeat_interleave(per_kv, 0) for x in (keys, values))
    scores = torch.einsum("nhd,hpd->nhp", q.float(), wide_keys) * scale
    if soft_cap > 0.0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    own = length - count + torch.arange(count)
    visible = positions[None] <= own[:, None]
    if window:
        visible &= positions[None] > own[:, None] - window
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[None, :, None].expand(count, heads, 1)], dim=-1)
    most = scores.amax(-1, keepdim=True)
    powers = torch.exp(scores - most)
    total = powers.sum(-1, keepdim=True)
    weights = powers[..., : keys.shape[1]].to(q.dtype).float()
    out = torch.einsum("nhp,hpv->nhv", weights, wide_values) / total
    return out, (most + torch.log(total)).squeeze(-1)


def check_rows_behind_others(extend: KernelFunction) -> None:
    """attention.extend where the rows of a call begin behind queries that are nobody's, which keep what out has."""
    generator = torch.Generator().manual_seed(7)
    cache = torch.randn(9, 2, 2, 16, 64, generator=generator).to(torch.bfloat16)
    q, table = torch.randn(9, 4, 64, generator=generator), torch.arange(1, 9, dtype=torch.int32).view(2, 4)
    starts, lengths = torch.tensor([3, 5, 8], dtype=torch.int32), torch.tensor([40, 3], dtype=torch.int32)
    found, exact = torch.full_like(q, 5.0), torch.full_like(q, 5.0)
    for fn, out in ((extend, found), (reference_extend, exact)):
        fn(q, cache[:, 0], cache[:, 1], table, starts, lengths, 0.125, 0, out)
    assert torch.equal(found[[0, 1, 2, 8]], exact[[0, 1, 2, 8]])
    assert torch.allclose(found, exact, atol=0.05)


def forget(*caches: Callable[..., Any]) -> None:
    """Empties functools caches, so that neither a stand-in's modules nor its plans outlive a test."""
    for cached in caches:
        cached.cache_clear()  # type: ignore[attr-defined]


def contract_beside(test_file: str, name: str) -> Contract:
    """The contract in the folder of a test."""
    return Contract(Path(test_file).with_name(name))
