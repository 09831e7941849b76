"""Grouped-query attention: projections, head norms, rotary, the write to the cache, attention, output."""

from collections.abc import Callable, Sequence

import torch

from tokenspeed.layers.batch import ForwardBatch, LayerCache
from tokenspeed.layers.communication import Communication
from tokenspeed.layers.kernel_choice import Kernel
from tokenspeed.layers.parts import ModelParts
from tokenspeed.layers.weights import Ranks, RowOrder, WeightSpec, paired_rotary_rows
from tokenspeed.recipes.model_config import ModelConfig, RopeConfig


def attention_weights(config: ModelConfig, place: str, ranks: Ranks) -> list[WeightSpec]:
    """q, k, v with their biases and norms, o, and sinks, at ``place`` ("model.layers.0.self_attn")."""
    hidden, dim = config.hidden_size, config.head_dim
    specs = []
    turned = paired_rotary_rows(dim, config.rope.rotated(dim)) if config.rope.paired else None
    keys = ranks.sharing(config.num_kv_heads)
    for name, heads, rotary, shared in (
        ("q", config.num_heads, config.num_heads, ranks),
        ("k", config.num_kv_heads, config.num_kv_heads, keys),
        ("v", config.num_kv_heads, 0, keys),
    ):
        order = {"rotary_heads": rotary, "row_order": turned if rotary else None}
        rows = heads * dim
        if config.output_gate and name == "q":
            rows, order = 2 * rows, {"row_order": _gates_behind(dim)}
        specs.append(shared.rows(f"{place}.{name}_proj.weight", rows, hidden, **order))
        if config.attention_bias:
            specs.append(shared.rows(f"{place}.{name}_proj.bias", rows, **order))
        if config.qk_norm and rotary:
            norm, share = f"{place}.{name}_norm.weight", shared.rows if config.whole_norms else shared.whole
            specs.append(share(norm, heads * dim if config.whole_norms else dim, offset=config.norm_offset))
    specs.append(ranks.columns(f"{place}.o_proj.weight", hidden, config.num_heads * dim))
    if config.output_bias:
        specs.append(ranks.whole(f"{place}.o_proj.bias", hidden))
    if config.sinks:
        specs.append(ranks.rows(f"{place}.sinks", config.num_heads))
    return specs


def _gates_behind(dim: int) -> RowOrder:
    """The order of heads of ``dim`` rows for a query and as many for its gate: all queries, then all gates."""

    def order(rows: int) -> torch.Tensor:
        return torch.arange(rows).view(-1, 2, dim).transpose(0, 1).reshape(rows)

    return order


class GroupedQueryAttention:
    """Four kernel calls a step; one more with an output gate, eight where norms are over all heads together. ``rope``:
    the model's own where None.

    Attributes:
        sinks: float32 [heads], the heads' sinks; None where there are none.
    """

    def __init__(self, parts: ModelParts, place: str, *, rope: RopeConfig | None = None) -> None:
        config, workspace = parts.config, parts.workspace
        heads, keys, dim = config.num_heads, config.num_kv_heads, config.head_dim
        rope = rope or config.rope
        self._eps = config.rms_norm_eps
        self._cos_sin = parts.rotary(rope, dim)
        # Where nothing is rotated, the table has one row, which turns by no angle, for every token.
        self._no_positions = workspace.integers("no_positions") if rope.kind == "none" else None
        self.sinks = parts.maybe(f"{place}.sinks")
        q_norm, k_norm = (parts.maybe(f"{place}.{name}_norm.weight") for name in ("q", "k"))
        self._project: Callable[[torch.Tensor], Sequence[torch.Tensor]]
        if config.whole_norms and q_norm is not None and k_norm is not None:
            self._project = _NormedProjections(parts, place, q_norm, k_norm).forward
            q_norm = k_norm = None
        else:
            project = parts.stacked([f"{place}.{name}_proj" for name in ("q", "k", "v")]).forward
            queries = 2 * heads if config.output_gate else heads
            qkv = workspace.stacked("qkv", ((queries, dim), (keys, dim), (keys, dim)))
            self._project = lambda x: project(x, qkv(x.shape[0]))
        self._q_norm, self._k_norm = q_norm, k_norm
        self._output = parts.linear(f"{place}.o_proj", "columns")
        self._prologue = parts.kernels.gqa_prologue(
            head_dim=dim,
            q_per_kv=heads // keys,
            qk_norm=q_norm is not None,
            partial_rotary=self._cos_sin.shape[1] < dim,
            kv_dtype=parts.kv_dtype,
        )
        self._gate: Kernel | None = parts.kernels.sigmoid_gate() if config.output_gate else None
        self._queries = heads
        self._heads = workspace.rows("heads", heads, dim)
        self._flat_heads = workspace.rows("heads", heads * dim)

    def bind_cache(self, caches: Sequence[LayerCache]) -> None:
        """Gives the layer its part of the arena: k and v of one group."""
        (cache,) = caches
        self._group, self._place = cache.group, cache.place
        self._k_cache, self._v_cache = cache.fields["k"], cache.fields["v"]

    def forward(self, batch: ForwardBatch, x: torch.Tensor, out: torch.Tensor) -> None:
        """Writes ``out`` float32 [T, H] of ``x`` float32 [T, H], and the tokens' keys and values to the cache."""
        tokens = x.shape[0]
        q, k, v = self._project(x)
        q, gates = q[:, : self._queries], q[:, self._queries :]
        positions = batch.positions if self._no_positions is None else self._no_positions(tokens)
        self._prologue(
            q, k, v, positions, self._cos_sin, self._q_norm, self._k_norm, self._eps,
            self._k_cache, self._v_cache, batch.slots[self._group],
        )  # fmt: skip
        batch.apart(self._attend, q, self._heads(tokens))
        heads = self._flat_heads(tokens)
        if self._gate is not None:
            self._gate(heads, gates.flatten(1), heads)
        self._output(heads, out)

    def _attend(self, batch: ForwardBatch, q: torch.Tensor, heads: torch.Tensor) -> None:
        batch.attention[self._group].attend(self._place, q, heads)


def _norm_over_ranks(communication: Communication) -> Kernel:
    """``fn(x, weight, eps, out)``: the RMS norm over the elements that all ranks have of a row. Where ranks have the
    same heads, all heads are there as often, and the mean is the same."""

    def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        squares = x.square().sum(dim=1, keepdim=True)
        communication.all_reduce(squares)
        scale = squares.div_(communication.world * x.shape[1]).add_(eps).rsqrt_()
        torch.mul(x, scale, out=out).mul_(weight)

    return norm


class _NormedProjections:
    """q, k and v, of which q and k are normed over all their heads together (MiniMax-M2): norms take rows that lie
    together, so each projection has memory of its own."""

    def __init__(self, parts: ModelParts, place: str, q_norm: torch.Tensor, k_norm: torch.Tensor) -> None:
        config, workspace = parts.config, parts.workspace
        self._eps = config.rms_norm_eps
        self._rms_norm = parts.kernels.rms_norm()
        if parts.communication.world > 1:
            self._rms_norm = _norm_over_ranks(parts.communication)
        self._each = []
        for name, heads, norm in (
            ("q", config.num_heads, q_norm),
            ("k", config.num_kv_heads, k_norm),
            ("v", config.num_kv_heads, None),
        ):
            flat = workspace.rows(name, heads * config.head_dim)
            by_heads = workspace.rows(name, heads, config.head_dim)
            self._each.append((parts.linear(f"{place}.{name}_proj", "rows"), norm, flat, by_heads))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """float32 [T, heads, D] of q, k and v."""
        tokens, found = x.shape[0], []
        for project, norm, flat, by_heads in self._each:
            out = flat(tokens)
            project(x, out)
            if norm is not None:
                self._rms_norm(out, norm, self._eps, out)
            found.append(by_heads(tokens))
        return tuple(found)
