"""Random weights for smoke profiles and tests: the same for the same seed, whatever else is generated."""

import hashlib

import torch

from tokenspeed.layers.weights import WeightSpec
from tokenspeed.recipes.model_config import CheckpointError
from tokenspeed_kernel.quantized import QuantizedTensor

_FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class RandomSource:
    """Every tensor has a generator of its own, seeded by ``seed`` and its name.

    Matrices are normal with variance 1 / columns, so that activations keep their size; norms are 1, biases small.
    """

    where = "random weights"

    def __init__(self, *, seed: int, dtype: str) -> None:
        if dtype not in _FORMATS:
            raise CheckpointError(f"random weights: dtype is {dtype!r}, supported are {', '.join(_FORMATS)}")
        self._seed = seed
        self._format = dtype

    def names(self) -> None:
        return None

    def shape(self, name: str) -> tuple[int, ...]:
        raise KeyError(name)

    def matrix(self, spec: WeightSpec) -> QuantizedTensor:
        rows, columns = spec.shape
        values = torch.randn(rows, columns, generator=self._generator(spec.name)) * columns**-0.5
        data = values.to(_FORMATS[self._format])
        return QuantizedTensor(format=self._format, shape=(rows, columns), planes={"data": data}, source=self.where)

    def converted(self, _spec: WeightSpec) -> QuantizedTensor | None:
        return None

    def is_converted(self, _name: str) -> bool:
        return False

    def vector(self, spec: WeightSpec) -> torch.Tensor:
        if spec.below:
            return torch.randint(spec.below, spec.shape, generator=self._generator(spec.name), dtype=torch.int32)
        if "norm" in spec.name:
            return torch.full(spec.shape, 1 - spec.offset)
        return torch.randn(spec.shape, generator=self._generator(spec.name)) * 0.02

    def forget(self, name: str) -> None:
        del name  # nothing of it is kept

    def reuse(self) -> None:
        """Nothing: nothing is converted."""

    def rotary_factors(self) -> torch.Tensor | None:
        return None

    def _generator(self, name: str) -> torch.Generator:
        digest = hashlib.blake2b(f"{self._seed}:{name}".encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
