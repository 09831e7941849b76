"""Blocks are shared between engines that would compute the same bytes, and between no others."""

import json
import os
import shutil
from pathlib import Path

import torch
from tiny_models import random_config

from tokenspeed.device.cache_arena import ArenaLayout
from tokenspeed.device.storage.fingerprint import SAMPLE_BYTES, fingerprint
from tokenspeed.layers.cache_spec import CacheFieldSpec, CacheGroupSpec
from tokenspeed.recipes.resolved import ModelSource

KERNELS = {"gemm.linear": "native_avx2"}


def layout(dtype: torch.dtype = torch.float32, **changes: object) -> ArenaLayout:
    values = {
        "group_id": "full",
        "kind": "full_history",
        "layers": (0, 1),
        "fields": (CacheFieldSpec(name="k", heads=2, dim=4),),
        "rows_per_page": 16,
        "entry_stride_tokens": 1,
    }
    return ArenaLayout.of([CacheGroupSpec(**{**values, **changes})], dtype)  # type: ignore[arg-type]


def of(source: ModelSource, arena: ArenaLayout | None = None, kernels: dict[str, str] = KERNELS) -> str:
    return fingerprint(source, arena or layout(), prefix_granularity=16, kernels=kernels)


def folder(path: Path) -> ModelSource:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"hidden_size": 64}))
    (path / "model.safetensors").write_bytes(bytes(3 * SAMPLE_BYTES))
    return ModelSource(kind="folder", path=str(path))


def test_everything_that_changes_the_bytes_changes_it(tmp_path: Path) -> None:
    source = ModelSource(kind="random", random_config=random_config())
    found = [
        of(source),
        of(source.model_copy(update={"seed": 1})),
        of(source.model_copy(update={"random_config": random_config(hidden_size=32)})),
        of(source, layout(torch.bfloat16)),
        of(source, layout(torch.float8_e4m3fn)),
        of(source, layout(rows_per_page=32)),
        of(source, layout(layers=(0, 2))),
        of(source, layout(kind="sliding_window", sliding_window_tokens=8)),
        of(source, kernels={"gemm.linear": "reference"}),
        of(folder(tmp_path / "model")),
    ]
    assert len(set(found)) == len(found)
    assert of(source) == found[0]
    assert all(len(one) == 32 and set(one) <= set("0123456789abcdef") for one in found)


def test_a_folder_is_known_by_its_files_and_not_by_its_place(tmp_path: Path) -> None:
    source = folder(tmp_path / "one")
    before = of(source)
    moved = Path(shutil.move(source.path, tmp_path / "two"))
    again = ModelSource(kind="folder", path=str(moved))
    assert of(again) == before
    weights = moved / "model.safetensors"
    times = weights.stat().st_mtime_ns
    for place in (0, 3 * SAMPLE_BYTES - 1):
        with weights.open("r+b") as file:
            file.seek(place)
            file.write(b"\1")
        os.utime(weights, ns=(times, times))
        assert of(again) != before
        before = of(again)
    os.utime(weights, ns=(times + 1, times + 1))
    assert of(again) != before


def test_a_single_file_is_known_by_its_content(tmp_path: Path) -> None:
    one, two = (tmp_path / "a.gguf", tmp_path / "b.gguf")
    one.write_bytes(b"weights")
    shutil.copy2(one, two)
    assert of(ModelSource(kind="gguf", path=str(one))) == of(ModelSource(kind="gguf", path=str(two)))
    two.write_bytes(b"others.")
    assert of(ModelSource(kind="gguf", path=str(one))) != of(ModelSource(kind="gguf", path=str(two)))
