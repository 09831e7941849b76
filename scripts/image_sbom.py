"""Writes what an image is made of, as a CycloneDX document: its Python distributions and its Debian packages.

usage: python -m scripts.image_sbom VENDOR [--image NAME:TAG] [--output FILE]

Both lists come out of the image itself, which is run once without network for that. The document is checked against the
schema before it is written. Needs docker or podman, and cyclonedx-python-lib (``make setup-lint`` brings it).
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from cyclonedx.factory.license import LicenseFactory
from cyclonedx.model import Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from scripts.image_build import ImageError, find_engine
from scripts.image_facts import ROOT, VENDORS

INVENTORY = """
import importlib.metadata, json, platform, subprocess, sys
debian = subprocess.run(
    ["dpkg-query", "--show", "--showformat=${Package}\\\\t${Version}\\\\t${Architecture}\\\\n"],
    capture_output=True, text=True, check=True,
).stdout
python = [
    {"name": each.metadata["Name"], "version": each.version, "requires": each.requires or [],
     "license": each.metadata.get("License-Expression") or ""}
    for each in importlib.metadata.distributions()
]
release = platform.freedesktop_os_release()
system = {"id": release.get("ID", "linux"), "codename": release.get("VERSION_CODENAME", "")}
json.dump({"python": python, "debian": debian, "system": system}, sys.stdout)
"""
"""Runs inside the image; needs nothing but its Python."""


def take_inventory(engine: str, image: str) -> dict[str, Any]:
    """Asks the image what it holds; raises ImageError where it cannot be run."""
    command = [engine, "run", "--rm", "--network=none", "--entrypoint", "python", image, "-c", INVENTORY]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
        raise ImageError(f"{image} cannot be looked into: {last[0]}; build it first: make image")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def make_bom(vendor: str, image: str, labels: dict[str, str], inventory: dict[str, Any]) -> Bom:
    """The document: the image is its subject, each distribution and package a component; the former have edges."""
    bom = Bom()
    subject = Component(
        name=f"tokenspeed-{vendor}",
        version=labels.get("org.opencontainers.image.version", ""),
        type=ComponentType.CONTAINER,
        bom_ref=image,
        properties=[Property(name=name, value=value) for name, value in sorted(labels.items())],
    )
    bom.metadata.component = subject
    components: dict[str, Component] = {}
    for each in inventory["python"]:
        # Of two on the path the first is the one imported.
        components.setdefault(canonicalize_name(each["name"]), _distribution(each))
    packages = [_package(line, inventory["system"]) for line in inventory["debian"].splitlines()]
    for component in [*components.values(), *packages]:
        bom.components.add(component)
    bom.register_dependency(subject, [*components.values(), *packages])
    for each in inventory["python"]:
        wanted = [components[name] for name in _required(each["requires"]) if name in components]
        bom.register_dependency(components[canonicalize_name(each["name"])], wanted)
    return bom


def _distribution(found: dict[str, Any]) -> Component:
    name, version = found["name"], found["version"]
    url = PackageURL("pypi", name=canonicalize_name(name), version=version)
    licences = [LicenseFactory().make_from_string(found["license"])] if found["license"] else []
    return Component(
        name=name, version=version, type=ComponentType.LIBRARY, purl=url, bom_ref=str(url), licenses=licences
    )


def _package(line: str, system: dict[str, str]) -> Component:
    name, version, architecture = line.split("\t")
    qualifiers = {"arch": architecture, "distro": system["codename"]}
    url = PackageURL("deb", system["id"], name, version, {key: value for key, value in qualifiers.items() if value})
    return Component(name=name, version=version, type=ComponentType.LIBRARY, purl=url, bom_ref=str(url))


def _required(lines: list[str]) -> list[str]:
    """Names that a distribution requires without extras."""
    names: list[str] = []
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is None or "extra" not in str(requirement.marker):
            names.append(canonicalize_name(requirement.name))
    return names


def write_bom(bom: Bom, path: Path) -> None:
    """Writes the document; raises ImageError where it would break the schema."""
    text = JsonV1Dot6(bom).output_as_string(indent=2)
    fault = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if fault is not None:
        raise ImageError(f"the document breaks the CycloneDX schema: {fault}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def main() -> int:
    """Returns the exit code: 0, or 2 where the image cannot be looked into."""
    parser = argparse.ArgumentParser(prog="image_sbom", description="Writes what an image is made of (CycloneDX).")
    parser.add_argument("vendor", nargs="?", default="cpu", choices=VENDORS)
    parser.add_argument("--image", default="", help="default tokenspeed-VENDOR")
    parser.add_argument("--output", type=Path, help="default dist/sbom-VENDOR.cdx.json")
    arguments = parser.parse_args()
    image = arguments.image or f"tokenspeed-{arguments.vendor}"
    output = arguments.output or ROOT / "dist" / f"sbom-{arguments.vendor}.cdx.json"
    try:
        engine = find_engine(dict(os.environ))
        inventory = take_inventory(engine, image)
        bom = make_bom(arguments.vendor, image, image_labels(engine, image), inventory)
        write_bom(bom, output)
    except ImageError as error:
        print(f"sbom: {error}", file=sys.stderr)
        return 2
    packages = len(inventory["debian"].splitlines())
    print(f"sbom: {output}: {len(bom.components) - packages} Python distributions, {packages} packages of the system")
    return 0


def image_labels(engine: str, image: str) -> dict[str, str]:
    """The image's labels."""
    command = [engine, "image", "inspect", "--format", "{{json .Config.Labels}}", image]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout) or {}


if __name__ == "__main__":
    raise SystemExit(main())
