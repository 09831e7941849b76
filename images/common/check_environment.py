"""Checks what an image is about to ship, and pins its torch against whoever installs into the image later.

usage: check_environment.py VENDOR CONSTRAINTS OUTPUT   (run by the environment's own Python)

Torch must be of the version that CONSTRAINTS names and built for the vendor, and every distribution of the environment
must find what it requires. OUTPUT becomes a constraints file with the exact torch and its companions.
"""

import importlib.metadata
import importlib.util
import runpy
import sys
import sysconfig
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

PINNED = ("torch", "torch-npu", "triton", "triton-ascend", "pytorch-triton-rocm")
BUILDS = {"cpu": ("", ""), "nvidia": ("13.", ""), "amd": ("", "7."), "npu": ("", "")}
"""What torch was built for, by vendor: how the versions of CUDA and of HIP begin; empty where it must have none."""

WHERE_FROM = {
    "cpu": "pass --build-arg TORCH_INDEX=<address of PyTorch's CPU builds>",
    "nvidia": "the lock's torch was not the one installed: pass no PIP_EXTRA_INDEX_URL that has another build",
    "amd": "the base image's torch must stay: something installed another one into /opt/tokenspeed",
    "npu": "pass --build-arg TORCH_INDEX=<address of PyTorch's CPU builds>",
}


def torch_faults(vendor: str, constraints: str) -> list[str]:
    """What is wrong with the torch that this Python would import; it is not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return ["there is no torch"]
    facts = runpy.run_path(str(Path(spec.submodule_search_locations[0]) / "version.py"))
    faults = []
    for name, value, wanted in zip(("CUDA", "ROCm"), (facts["cuda"], facts["hip"]), BUILDS[vendor], strict=True):
        built_for = str(value or "")
        if not built_for.startswith(wanted) or bool(built_for) != bool(wanted):
            faults.append(
                f"torch {facts['__version__']} is built for {name} {built_for or 'none'}, "
                f"the {vendor} image wants {wanted + 'x' if wanted else 'none'}; {WHERE_FROM[vendor]}"
            )
    for line in constraints.splitlines():
        requirement = Requirement(line) if line and not line.startswith("#") else None
        if requirement and not requirement.specifier.contains(importlib.metadata.version(requirement.name)):
            faults.append(
                f"{requirement.name} is {importlib.metadata.version(requirement.name)}, not {requirement.specifier}"
            )
    return faults


def unmet_requirements(site: str) -> list[str]:
    """What the distributions in ``site`` require and do not find; those of the base image answer for themselves."""
    faults = []
    for distribution in importlib.metadata.distributions(path=[site]):
        for requirement in map(Requirement, distribution.requires or []):
            if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
                continue
            try:
                found = importlib.metadata.version(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                faults.append(f"{distribution.name} requires {requirement}, which is not installed")
                continue
            # A build of torch's own (2.13.0+cpu) satisfies 2.13.0; the tag was looked at above.
            if not requirement.specifier.contains(Version(found), prereleases=True):
                faults.append(f"{distribution.name} requires {requirement}, but {requirement.name} is {found}")
    return faults


def pins() -> str:
    """A constraints file that keeps torch and its companions as they are."""
    found = []
    for name in PINNED:
        try:
            found.append(f"{name}=={importlib.metadata.version(name)}\n")
        except importlib.metadata.PackageNotFoundError:
            continue
    return "".join(found)


def main(vendor: str, constraints: str, output: str) -> None:
    """Writes ``output``; raises SystemExit naming every fault."""
    site = sysconfig.get_path("purelib")
    faults = torch_faults(vendor, Path(constraints).read_text()) + unmet_requirements(site)
    if faults:
        raise SystemExit("\n".join(f"check_environment: {fault}" for fault in faults))
    Path(output).write_text(pins())
    print(f"check_environment: {pins().split()}, all requirements met")


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in BUILDS:
        raise SystemExit(f"usage: check_environment.py {'|'.join(BUILDS)} CONSTRAINTS OUTPUT")
    main(*sys.argv[1:])
