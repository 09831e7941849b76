"""What the layers of one model are made of: its weights, kernels, and the memory they share."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tokenspeed.layers.communication import Communication
from tokenspeed.layers.kernel_choice import Kernel
from tokenspeed.layers.kernels import KernelBinder
from tokenspeed.layers.linear import Linear, StackedLinear
from tokenspeed.layers.rotary import rotary_table
from tokenspeed.layers.shard import Shard, ShardKind
from tokenspeed.layers.weights import LoadedWeights
from tokenspeed.layers.workspace import Workspace
from tokenspeed.recipes.model_config import LatentConfig, ModelConfig, RopeConfig
from tokenspeed_kernel.quantized import QuantizedTensor


@dataclass(frozen=True)
class ModelParts:
    """Handed to every layer's constructor; nothing is kept of it that a forward does not need.

    Attributes:
        kv_dtype: of the cached values.
        max_positions: the longest sequence.
        communication: with the ranks that share the model.
    """

    config: ModelConfig
    weights: LoadedWeights
    kernels: KernelBinder
    workspace: Workspace
    kv_dtype: torch.dtype
    max_positions: int
    communication: Communication
    _tables: dict[tuple[str, int, bool], torch.Tensor] = field(default_factory=dict)
    _copies: list[QuantizedTensor] = field(default_factory=list)

    def matrix(self, name: str) -> QuantizedTensor:
        """The matrix ``name``, taken; see LoadedWeights.take."""
        return self.weights.take(name)

    def vector(self, name: str) -> torch.Tensor:
        """The float weight ``name``; KeyError where the model has none."""
        return self.weights.vectors[name]

    def maybe(self, name: str) -> torch.Tensor | None:
        """The same; None where the model has none."""
        return self.weights.vectors.get(name)

    def linear(self, place: str, kind: ShardKind) -> Kernel:
        """``fn(x, out)`` of the weight, and the bias if there is one, at ``place``; where the ranks share its columns,
        what they give is summed."""
        product = self.partial(place, kind)
        if kind != "columns" or self.communication.world == 1:
            return product
        all_reduce = self.communication.all_reduce

        def summed(x: torch.Tensor, out: torch.Tensor) -> None:
            product(x, out)
            all_reduce(out)

        return summed

    def partial(self, place: str, kind: ShardKind) -> Kernel:
        """The same, of columns this rank's part alone: whoever asks adds others to it and sums them all at once. A bias
        counts once, on rank 0."""
        weight, bias = self.matrix(f"{place}.weight"), self.maybe(f"{place}.bias")
        if kind == "columns" and self.communication.rank > 0:
            bias = None
        return Linear(self.kernels, weight, bias, self._shard(kind)).forward

    def _shard(self, kind: ShardKind) -> Shard:
        return Shard(kind=kind, rank=self.communication.rank, world=self.communication.world)

    def stacked(self, places: Sequence[str]) -> StackedLinear:
        """The linears at ``places``, which have the same input, shared out by their rows."""
        weights = [self.matrix(f"{place}.weight") for place in places]
        biases = [self.maybe(f"{place}.bias") for place in places]
        return StackedLinear(self.kernels, weights, biases, self._shard("rows"))

    def rotary(self, rope: RopeConfig, head_dim: int, *, back: bool = False) -> torch.Tensor:
        """The table of ``rope`` for heads of ``head_dim``, made once; see rotary_table. ``back``: the one that takes
        the rotation back."""
        key = (repr(rope), head_dim, back)
        if key not in self._tables:
            table = rotary_table(
                rope, head_dim=head_dim, num_positions=self.max_positions, factors=self.weights.rotary_factors
            )
            if back:
                table[:, table.shape[1] // 2 :].neg_()
            self._tables[key] = table.to(self.weights.device)
        return self._tables[key]

    def growth(self, latent: LatentConfig) -> torch.Tensor:
        """float32 [positions]: what the queries of ``latent`` are multiplied by, made once."""
        key = ("growth", latent.growth_length, False)
        if key not in self._tables:
            turns = torch.floor(torch.arange(self.max_positions, dtype=torch.float32) / latent.growth_length)
            self._tables[key] = (1 + latent.growth * torch.log(1 + turns)).to(self.weights.device)
        return self._tables[key]

    def keep(self, weight: QuantizedTensor) -> QuantizedTensor:
        """``weight``, a copy that a layer made of a loaded one, counted."""
        self._copies.append(weight)
        return weight

    @property
    def table_bytes(self) -> int:
        """Bytes of all tables made, and copies of weights kept, so far."""
        return sum(table.nbytes for table in self._tables.values()) + sum(copy.nbytes for copy in self._copies)
