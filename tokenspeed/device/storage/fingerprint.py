"""Which cache blocks may be shared: those of the same weights, type, layout and kernels, and no others."""

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path

from tokenspeed.device.cache_arena import ArenaLayout
from tokenspeed.recipes.resolved import ModelSource

FORMAT_VERSION = 1
"""Raised whenever the meaning of a block's bytes changes."""

SAMPLE_BYTES = 1 << 20
"""So much of the head and the tail of each weight file is read; with size and time of change it tells files apart."""


def fingerprint(
    source: ModelSource,
    layout: ArenaLayout,
    *,
    prefix_granularity: int,
    kernels: Mapping[str, str],
    ranks: tuple[int, int] = (0, 1),
) -> str:
    """Returns 32 hexadecimal digits. Differs for other weights, another type, other groups, other kernels, another rank
    among how many (``ranks``): each has its own part of a block.

    Kernels are in it because blocks computed by others differ in their last bits, and equal tokens are promised.
    """
    parts: list[object] = [
        FORMAT_VERSION,
        sys.byteorder,
        str(layout.dtype),
        prefix_granularity,
        sorted(kernels.items()),
    ]
    parts += [astuple(facts) for facts in layout.facts]
    parts += [(group.layers, [astuple(field) for field in group.fields]) for group in layout.groups]
    parts += [source.kind, source.random_config, source.seed]
    parts += [_file(path) for path in _files(source)]
    parts += [] if ranks == (0, 1) else [ranks]  # what one rank stored before there were several stays valid
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _files(source: ModelSource) -> list[Path]:
    """The files that say what the model computes."""
    if source.kind == "random":
        return []
    path = Path(source.path)
    if path.is_file():
        return [path]
    return sorted([*path.glob("*.safetensors"), *path.glob("config.json")])


def _file(path: Path) -> tuple[int, int, str]:
    facts = path.stat()
    with path.open("rb") as file:
        sample = file.read(SAMPLE_BYTES)
        file.seek(max(0, facts.st_size - SAMPLE_BYTES))
        sample += file.read()
    return facts.st_size, facts.st_mtime_ns, hashlib.blake2b(sample, digest_size=16).hexdigest()
