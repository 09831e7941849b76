"""How a model declares what it caches. tokenspeed/device/cache_arena.py folds it into what the scheduler takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

CacheKind = Literal["full_history", "sliding_window", "state"]
CacheType = Literal["kv", "kv_16", "float32"]


@dataclass(frozen=True, kw_only=True)
class CacheFieldSpec:
    """One cached quantity of a layer: ``heads`` vectors of ``dim`` elements for each row, e.g. "k" or "v"."""

    name: str
    heads: int
    dim: int

    def __post_init__(self) -> None:
        if self.heads < 1 or self.dim < 1:
            raise ValueError(f"cache field {self.name!r}: heads {self.heads} and dim {self.dim} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class CacheGroupSpec:
    """Layers that share a block table. Validated whole; every error names the group and the field.

    Attributes:
        group_id: the group's name.
        kind: "full_history" (every token stays), "sliding_window" (the last tokens stay), "state" (one snapshot).
        layers: indices of the model's layers that are cached here, in order.
        fields: what each of these layers caches, in order.
        rows_per_page: history kinds: rows (cache entries) in one page.
        entry_stride_tokens: history kinds: tokens that one row stands for; 1 unless the model compresses.
        sliding_window_tokens: sliding windows only: tokens that stay visible.
        checkpoint_granularity: state only: tokens between two snapshots.
        dtype: of what is cached here: "kv" is whatever the engine's cache has, "kv_16" the same but bfloat16 in place
            of 8 bits, "float32" does not follow it.
    """

    group_id: str
    kind: CacheKind
    layers: tuple[int, ...]
    fields: tuple[CacheFieldSpec, ...]
    dtype: CacheType = "kv"
    rows_per_page: int | None = None
    entry_stride_tokens: int | None = None
    sliding_window_tokens: int | None = None
    checkpoint_granularity: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("full_history", "sliding_window", "state"):
            raise ValueError(f"{self._who}: kind {self.kind!r} is unknown; it is full_history, sliding_window or state")
        if not self.layers or not self.fields:
            raise ValueError(f"{self._who}: layers and fields must not be empty")
        if len({cache_field.name for cache_field in self.fields}) != len(self.fields):
            raise ValueError(f"{self._who}: fields has a name twice")
        if self.kind == "state":
            self._refuse("rows_per_page", "entry_stride_tokens", "sliding_window_tokens")
            self._require("checkpoint_granularity")
        else:
            self._refuse("checkpoint_granularity")
            self._require("rows_per_page", "entry_stride_tokens")
        if self.kind == "sliding_window":
            self._require("sliding_window_tokens")
        elif self.kind == "full_history":
            self._refuse("sliding_window_tokens")

    @property
    def _who(self) -> str:
        return f"cache group {self.group_id!r}"

    def _require(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{self._who}: {name} is {value!r}; a {self.kind} group declares a positive number")

    def _refuse(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) is not None:
                raise ValueError(f"{self._who}: {name} is set; a {self.kind} group has none")

    @property
    def page_size(self) -> int:
        """Tokens of one page (history kinds); TypeError on a state group."""
        if self.rows_per_page is None or self.entry_stride_tokens is None:
            raise TypeError(f"{self._who}: a state group has no pages; it declares checkpoint_granularity")
        return self.rows_per_page * self.entry_stride_tokens

    @property
    def block_granularity(self) -> int:
        """Tokens of one block (history kinds); TypeError on a state group."""
        if self.kind == "state":
            raise TypeError(f"{self._who}: a state group has no block_granularity; it declares checkpoint_granularity")
        return self.page_size

    @property
    def rows_per_block(self) -> int:
        """Rows of one field in one block: the rows of a page, or the one snapshot of a state group."""
        return 1 if self.rows_per_page is None else self.rows_per_page

    @property
    def elements_per_block(self) -> int:
        """Elements of one block over all layers and fields."""
        per_row = sum(cache_field.heads * cache_field.dim for cache_field in self.fields)
        return len(self.layers) * per_row * self.rows_per_block


def groups_of_layers(groups: Sequence[CacheGroupSpec]) -> tuple[tuple[int, ...], ...]:
    """For each layer of the model, the indices of the groups that cache it, in order.

    Raises ValueError unless every layer, from 0 on, is in a group, and in none twice.
    """
    declared = ", ".join(f"{group.group_id!r}: {list(group.layers)}" for group in groups)
    for group in groups:
        if len(set(group.layers)) != len(group.layers):
            raise ValueError(f"cache group {group.group_id!r} has a layer twice; the groups hold {declared}")
    count = max(layer for group in groups for layer in group.layers) + 1
    found = tuple(tuple(index for index, group in enumerate(groups) if layer in group.layers) for layer in range(count))
    if not all(found):
        raise ValueError(f"cache groups must hold each layer from 0 on; they hold {declared}")
    return found
