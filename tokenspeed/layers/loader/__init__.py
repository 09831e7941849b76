"""Reads weights: safetensors folders and GGUF files through read-only maps, or random ones from a seed."""

from tokenspeed.layers.loader.load import WHERE_READ, WeightMemory, load_weights, open_source, read_weight
from tokenspeed.layers.loader.source import WeightSource

__all__ = ["WHERE_READ", "WeightMemory", "WeightSource", "load_weights", "open_source", "read_weight"]
