"""The images' lock files: true to today's requirements, hashed, of one torch; and how they are made."""

import json
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from scripts import image_facts, lock_images
from scripts.image_facts import ROOT, VENDORS

IMAGES = ROOT / "images"


def pins(lock: Path) -> dict[str, str]:
    """A lock's versions, by normal name."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", lock.read_text(), flags=re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


@pytest.mark.parametrize("vendor", [*VENDORS, "build"])
def test_the_lock_satisfies_every_requirement_of_today(vendor: str) -> None:
    job = lock_images.jobs()[vendor]
    pinned = pins(job.lock)
    assert job.lock.read_text().startswith(job.header), 'another Python or platform: "make locks"'
    environment = {"python_version": job.python, "python_full_version": f"{job.python}.0", "extra": ""}
    for line in job.requirements:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(environment):
            version = pinned.get(canonicalize_name(requirement.name))
            assert version is not None, f'{line} is not in {job.lock}: "make locks"'
            assert requirement.specifier.contains(version, prereleases=True), f'{line} is {version}: "make locks"'


@pytest.mark.parametrize("vendor", [*VENDORS, "build"])
def test_the_lock_has_nothing_that_nobody_asks_for(vendor: str) -> None:
    job = lock_images.jobs()[vendor]
    asked = {canonicalize_name(Requirement(line).name) for line in job.requirements}
    blocks = re.findall(r"^([A-Za-z0-9._-]+)==.*\n((?: .*\n?)*)", job.lock.read_text(), flags=re.MULTILINE)
    roots = {canonicalize_name(name) for name, rest in blocks if "-r requirements.in" in rest}
    assert roots == asked, '"make locks"'


@pytest.mark.parametrize("vendor", [*VENDORS, "build"])
def test_every_pin_has_hashes_and_no_host_is_named(vendor: str) -> None:
    text = lock_images.jobs()[vendor].lock.read_text()
    blocks = re.findall(r"^[A-Za-z0-9._-]+==\S+( \\\n +--hash=sha256:[0-9a-f]{64})+", text, flags=re.MULTILINE)
    assert len(blocks) == len(pins(lock_images.jobs()[vendor].lock)) > 5
    assert "://" not in text
    assert "index-url" not in text
    assert "find-links" not in text
    assert not [name for name in pins(lock_images.jobs()[vendor].lock) if name.startswith("tokenspeed")]


@pytest.mark.parametrize("vendor", VENDORS)
def test_torch_comes_from_one_place(vendor: str) -> None:
    pinned = pins(IMAGES / vendor / "requirements.lock")
    constraint = Requirement(next(line for line in constraint_lines(vendor) if line.startswith("torch==")))
    if vendor == "nvidia":
        assert constraint.specifier.contains(pinned["torch"])
        assert Version(pinned["cuda-toolkit"]).major == 13
        assert "triton" in pinned
    else:
        # The base image's, or installed apart: no dependency may bring another, nor the libraries of another vendor.
        assert not {name for name in pinned if name in ("torch", "triton") or name.startswith(("nvidia-", "cuda-"))}
    if vendor == "npu":
        assert f"torch-npu=={pinned['torch-npu']}" in constraint_lines(vendor)
        assert pinned["torch-npu"].startswith(str(constraint.specifier).removeprefix("=="))


def constraint_lines(vendor: str) -> list[str]:
    """A vendor's constraints without comments."""
    lines = (IMAGES / vendor / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_the_cpu_image_has_the_torch_that_the_tests_run_with() -> None:
    makefile = (ROOT / "Makefile").read_text()
    spec = re.search(r"^TORCH_SPEC\s*\?=\s*(\S+)$", makefile, flags=re.MULTILINE)
    assert spec is not None
    assert constraint_lines("cpu") == [spec[1]]


def test_a_new_requirement_is_seen_and_a_vendor_without_kernels_still_locks(tmp_path: Path) -> None:
    for name in ("images/locks.toml", "images/bases.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    write_project(
        tmp_path, "pyproject.toml", "tokenspeed-appliance", ["numpy>=1,<3"], {"tui": ["tokenspeed-appliance-tui"]}
    )
    assert lock_images.vendor_requirements("amd", tmp_path) == ["numpy<3,>=1"]
    write_project(
        tmp_path,
        "kernel-backends/amd/pyproject.toml",
        "tokenspeed-appliance-kernel-amd",
        ["torch>=2", "new-one>=1,<2"],
        {},
    )
    assert lock_images.vendor_requirements("amd", tmp_path) == ["new-one<2,>=1", "numpy<3,>=1"]
    assert "new-one<2,>=1" not in lock_images.vendor_requirements("nvidia", tmp_path)
    assert image_facts.folders("amd", tmp_path) == ["kernel-backends/amd", "."]


def write_project(root: Path, path: str, name: str, dependencies: list[str], extras: dict[str, list[str]]) -> None:
    """A pyproject.toml with requirements."""
    lines = [
        "[project]",
        f'name = "{name}"',
        f"dependencies = {json.dumps(dependencies)}",
        "[project.optional-dependencies]",
    ]
    lines += [f"{extra} = {json.dumps(wanted)}" for extra, wanted in extras.items()]
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text("\n".join(lines) + "\n")


def test_platforms_that_disagree_are_told_apart(tmp_path: Path) -> None:
    uv = tmp_path / "uv"
    uv.write_text(
        '#!/bin/sh\ncase "$*" in *aarch64*) version=2 ;; *) version=1 ;; esac\n'
        'while [ "$1" != --output-file ]; do shift; done\nprintf "some==%s\\n" "$version" > "$2"\n'
    )
    uv.chmod(0o755)
    job = lock_images.LockJob(
        lock=tmp_path / "requirements.lock", python="3.12", platforms=("linux/amd64",), requirements=("some",)
    )
    assert lock_images.resolve(job, str(uv)) == f"{job.header}some==1\n"
    both = lock_images.LockJob(
        lock=job.lock, python="3.12", platforms=("linux/amd64", "linux/arm64"), requirements=("some",)
    )
    with pytest.raises(
        lock_images.LockError, match=r"linux/amd64 and linux/arm64 want different packages[\s\S]*some==2"
    ):
        lock_images.resolve(both, str(uv))
