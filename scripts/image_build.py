"""Builds images from this checkout with docker or podman.

usage: python -m scripts.image_build [VENDOR | --all] [--soc SOC] [--tag NAME:TAG] [--base IMAGE] [--dry-run | --bake]
       [-- ARGUMENTS]

Builds on the first base of images/bases.toml that fits, by its digest where one stands there. --all builds what this
machine can: where a base image is neither present nor to be had, it says SKIP and why. What follows -- goes to the
build command. Needs Python 3.11 and nothing else. Networks of their own: the environment variables PIP_INDEX_URL,
PIP_EXTRA_INDEX_URL, TORCH_INDEX (build arguments) and CA_BUNDLE, PIP_CONF, APT_CONF (files, handed over as secrets).
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from scripts.image_facts import ROOT, VENDORS, recipes_hash, version

INDEX_VARIABLES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "TORCH_INDEX")
SECRET_VARIABLES = ("CA_BUNDLE", "PIP_CONF", "APT_CONF")
PULL_SECONDS = 3600


class ImageError(RuntimeError):
    """An image that cannot be built here; the message names what is missing and how to mend it."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """A base image that the allow-list names; ``soc`` is "" but for Ascend, ``digest`` "" where none is pinned."""

    image: str
    digest: str = ""
    soc: str = ""

    @property
    def reference(self) -> str:
        """What to build on."""
        return f"{self.image}@{self.digest}" if self.digest else self.image


def bases(vendor: str, root: Path = ROOT) -> list[Base]:
    """The allow-list's entries for a vendor, the default first."""
    listed = tomllib.loads((root / "images" / "bases.toml").read_text())[vendor]["bases"]
    return [Base(**entry) for entry in listed]


def choose_base(vendor: str, soc: str = "", root: Path = ROOT) -> Base:
    """The base to build on; raises ImageError for a chip that the vendor has no base for."""
    listed = bases(vendor, root)
    for base in listed:
        if soc in ("", base.soc):
            return base
    known = [base.soc for base in listed if base.soc]
    raise ImageError(f"no base image of {vendor} is for {soc!r}; known: {', '.join(known) or 'none, leave SOC empty'}")


def find_engine(environment: dict[str, str]) -> str:
    """docker where its daemon answers, else podman; ENGINE decides. Raises ImageError where there is neither."""
    chosen = environment.get("ENGINE", "")
    if chosen in ("docker", "podman"):
        return chosen
    # The docker command may be there without its daemon.
    if shutil.which("docker") and _succeeds(["docker", "info"]):
        return "docker"
    if shutil.which("podman"):
        return "podman"
    raise ImageError("neither a running docker nor podman was found: apt install podman")


def build_arguments(base: Base, environment: dict[str, str], root: Path = ROOT) -> dict[str, str]:
    """The build arguments: where the image comes from, and the network's indexes where the environment names them."""
    found = {
        "BASE_IMAGE": base.reference,
        "VERSION": version(root),
        "REVISION": _git(root, "rev-parse", "--short=12", "HEAD"),
        "CREATED": _git(root, "log", "-1", "--format=%cI"),
        "RECIPES": recipes_hash(root / "configs"),
    }
    if base.soc:
        found["SOC"] = base.soc
    return found | {name: environment[name] for name in INDEX_VARIABLES if environment.get(name)}


def build_command(
    engine: str, vendor: str, base: Base, tag: str, environment: dict[str, str], extra: list[str], root: Path = ROOT
) -> list[str]:
    """The command line that builds; raises ImageError where a secret's file is not there."""
    command = [engine, "build", "--tag", tag, "--file", f"images/{vendor}/Dockerfile"]
    if engine == "podman":
        command.insert(2, "--format=docker")  # HEALTHCHECK is not in the OCI format
    for name, value in build_arguments(base, environment, root).items():
        command += ["--build-arg", f"{name}={value}"]
    for name in SECRET_VARIABLES:
        file = environment.get(name, "")
        if file and not Path(file).is_file():
            raise ImageError(f"{name}={file}: there is no such file")
        if file:
            command += ["--secret", f"id={name.lower()},src={file}"]
    return [*command, *extra, "."]


def bake_file(environment: dict[str, str], root: Path = ROOT) -> dict[str, object]:
    """What docker-bake.hcl cannot know, as a second file for bake: every target's base and the image's origin."""
    targets = {}
    for vendor in VENDORS:
        for base in bases(vendor, root):
            name = f"{vendor}-{base.soc}" if base.soc else vendor
            targets[name] = {"args": build_arguments(base, environment, root)}
    return {"target": targets}


def obtain(engine: str, image: str, seconds: int = PULL_SECONDS) -> str:
    """Makes a base image present, pulling it where it is not; returns "" or why it cannot be had."""
    if _succeeds([engine, "image", "inspect", image]):
        return ""
    try:
        done = subprocess.run(
            [engine, "pull", "--quiet", image], capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return f"the registry did not deliver it in {seconds} s"
    lines = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else (lines[-1] if lines else f"{engine} pull failed")


def _succeeds(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _git(root: Path, *arguments: str) -> str:
    """Git's answer, "" where this is no checkout or git is not here."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def _build(engine: str, vendor: str, arguments: argparse.Namespace) -> int:
    base = choose_base(vendor, arguments.soc if vendor == "npu" else "")
    if arguments.base:
        base = Base(image=arguments.base, soc=base.soc)
    tag = arguments.tag or f"tokenspeed-{vendor}"
    command = build_command(engine, vendor, base, tag, dict(os.environ), arguments.extra)
    if arguments.dry_run:
        print(shlex.join(command))
        return 0
    missing = obtain(engine, base.reference)
    if missing:
        raise ImageError(
            f"SKIP {vendor}: its base {base.reference} is not here and cannot be pulled "
            f"({missing.removeprefix('Error: ')}); bring it with `{engine} load`, or name another: --base IMAGE"
        )
    print(f"image: building {tag} on {base.reference}", flush=True)
    environment = {**os.environ, "DOCKER_BUILDKIT": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0, 1 where a build failed, 2 where it could not begin."""
    parser = argparse.ArgumentParser(prog="image_build", description="Builds images with docker or podman.")
    parser.add_argument("vendor", nargs="?", default="cpu", choices=VENDORS)
    parser.add_argument(
        "--all", action="store_true", help="every vendor whose base image can be had; SKIP for the others"
    )
    parser.add_argument("--soc", default="", help="npu: a3, 910b or 950")
    parser.add_argument("--tag", default="", help="the image's name; default tokenspeed-VENDOR")
    parser.add_argument("--base", default="", help="another base image")
    parser.add_argument("--bake", action="store_true", help="print a second file for docker buildx bake")
    parser.add_argument("--dry-run", action="store_true", help="print the command")
    place = arguments.index("--") if "--" in arguments else len(arguments)
    parsed = parser.parse_args(arguments[:place], argparse.Namespace(extra=arguments[place + 1 :]))
    if parsed.bake:
        print(json.dumps(bake_file(dict(os.environ)), indent=2))
        return 0
    try:
        engine = find_engine(dict(os.environ))
        if not parsed.all:
            return _build(engine, parsed.vendor, parsed)
    except ImageError as error:
        print(f"image: {str(error).removeprefix('SKIP ')}", file=sys.stderr)
        return 2
    failed = 0
    for vendor in VENDORS:
        try:
            failed |= _build(engine, vendor, parsed)
        except ImageError as error:
            print(f"image: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
