"""Deployments made by hand, and what reads the files that are written from them."""

import functools
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from tokenspeed.recipes.container import CACHE_FOLDER, CACHE_VOLUME, ContainerSpec, Secret
from tokenspeed.recipes.container_devices import Volume
from tokenspeed.recipes.render.deployment import Deployment
from tokenspeed.recipes.resolved import GIB

CONTAINER = ContainerSpec(
    name="model",
    image="registry.example/tokenspeed-nvidia@sha256:" + "0" * 64,
    vendor="nvidia",
    arguments=("model", "--profile", "big"),
    port=8000,
    cdi_devices=("nvidia.com/gpu=all",),
    volumes=(Volume(source=CACHE_VOLUME, target=CACHE_FOLDER),),
    shm_bytes=16 * GIB,
    memlock=True,
)

SECRETS = (Secret(name="api-key", file="/keys/api"), Secret(name="hf-token", file="/keys/token"))


def make_deployment(*, container: dict[str, Any] | None = None, **changes: Any) -> Deployment:
    """A deployment on eight NVIDIA devices of one node; ``container`` changes its container."""
    values: dict[str, Any] = {
        "container": replace(CONTAINER, **(container or {})),
        "recipe": "model-1.5",
        "profile": "big",
        "status": "untested",
        "command": ("tokenspeed", "recipe", "render", "model-1.5", "--as", "compose"),
        "devices": 8,
        "architectures": ("sm100",),
        "weight_bytes": 100 * 10**9,
        "memory_bytes": 80 * GIB,
    }
    return Deployment(**{**values, **changes})


def read_objects(text: str) -> dict[str, dict[str, Any]]:
    """The objects of a manifest as ``Kind/name``."""
    documents = [found for found in yaml.safe_load_all(text) if found]
    objects = {f"{found['kind']}/{found['metadata']['name']}": found for found in documents}
    assert len(objects) == len(documents), "two objects have the same name"
    return objects


def pod_templates(objects: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The template of every pod."""
    templates = []
    for found in objects.values():
        if found["kind"] == "StatefulSet":
            templates.append(found["spec"]["template"])
        elif found["kind"] == "LeaderWorkerSet":
            both = found["spec"]["leaderWorkerTemplate"]
            templates += [both["leaderTemplate"], both["workerTemplate"]]
    return templates


@functools.cache
def program(name: str) -> str | None:
    """A program of this environment or of the path; None where it is not installed."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.is_file() else shutil.which(name)
