"""Builds an image and shows that it keeps its promises, in containers.

usage: python -m scripts.image_test [cpu | nvidia | amd | npu]

The CPU image serves: as user 10001 and as a user that nobody knows, without HOME, with a read-only root, without
capabilities or network; it is healthy, and drains on SIGTERM. The vendors' images are built on stand-in bases with
stubs in the place of torch and its companions, and everything but serving is looked at. Needs root, podman, runc and,
where no registry is reachable, mmdebstrap; says SKIP where those cannot be had.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from scripts import image_checks, image_serving
from scripts.image_build import Base, build_command, choose_base, obtain
from scripts.image_facts import ROOT, VENDORS
from scripts.image_podman import ImageTestError, Skip, image_config, use_settings
from scripts.image_standin import StandInError, copy_checkout, stand_in_base, stub_lock, stub_wheel, torch_version


def say(text: str) -> None:
    """One line of progress."""
    print(f"image test: {text}", flush=True)


def require_tools() -> None:
    """Raises Skip where this machine cannot run containers."""
    if os.geteuid() != 0:
        raise Skip("needs root")
    for tool in ("podman", "runc"):
        if shutil.which(tool) is None:
            raise Skip(f"no {tool} (apt install podman runc mmdebstrap catatonit)")


def real_or_stand_in(vendor: str, work: Path) -> str:
    """The base to build on: the real one of the CPU image where it can be had, else a stand-in."""
    if vendor == "cpu":
        real = choose_base(vendor).reference
        if obtain("podman", real, seconds=60) == "":
            return real
    return stand_in_base(vendor, work)


def prepare_context(vendor: str, work: Path) -> tuple[Path, Path | None]:
    """The build context, and the folder of wheels to mount: the machine's own, or stubs that a changed lock names."""
    if vendor == "cpu":
        wheels = os.environ.get("PIP_FIND_LINKS", "")
        return ROOT, Path(wheels) if Path(wheels).is_dir() and wheels else None
    context, wheels_folder = work / "context", work / "wheels"
    wheels_folder.mkdir()
    copy_checkout(context)
    lock = context / "images" / vendor / "requirements.lock"
    lock.write_text(stub_lock(lock.read_text(), wheels_folder, vendor))
    if vendor == "npu":  # the one whose torch is installed apart
        stub_wheel(wheels_folder, "torch", torch_version(vendor), vendor)
    return context, wheels_folder


def build(vendor: str, base: str, tag: str, work: Path) -> None:
    """Builds the image; raises ImageTestError with the end of the log."""
    context, wheels = prepare_context(vendor, work)
    environment = dict(os.environ)
    extra = ["--network=host"]
    settings = ["[global]"]
    if wheels is not None:
        settings.append("find-links = /srv/wheels")
        extra.append(f"--volume={wheels}:/srv/wheels:ro")
    if os.environ.get("PIP_CERT"):
        environment.setdefault("CA_BUNDLE", os.environ["PIP_CERT"])
    (work / "pip.conf").write_text("\n".join(settings) + "\n")
    environment.setdefault("PIP_CONF", str(work / "pip.conf"))
    chosen = Base(image=base, soc=choose_base(vendor).soc)
    command = build_command("podman", vendor, chosen, tag, environment, extra)
    begin = time.monotonic()
    with (work / "build.log").open("w") as log:
        done = subprocess.run(command, cwd=context, stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        end = "\n".join((work / "build.log").read_text().splitlines()[-40:])
        raise ImageTestError(f"the build failed:\n{end}")
    say(f"built on {base} in {time.monotonic() - begin:.0f} s, {image_config(tag)['Size'] / 1e6:.0f} MB")


def check_size(vendor: str, base: str, tag: str) -> None:
    """Compares with images/budgets.toml; raises ImageTestError above it."""
    budget = tomllib.loads((ROOT / "images" / "budgets.toml").read_text())[vendor]
    whole = image_config(tag)["Size"] / 1e6
    own = image_checks.own_megabytes(tag)
    if "stand-in" not in base or vendor == "cpu":
        image_checks.within("the image", whole, budget["image_mb"])
    image_checks.within("what we add", own, budget["own_mb"])
    say(f"{own:.0f} MB of ours without torch (budget {budget['own_mb']})")


def write_sbom(vendor: str, tag: str, work: Path) -> None:
    """Lists what is in the image, where the library for that is here."""
    if importlib.util.find_spec("cyclonedx") is None:
        say('SKIP the list of contents: no cyclonedx-python-lib ("make setup-lint" brings it)')
        return
    output = work / "sbom.json"
    command = [sys.executable, "-m", "scripts.image_sbom", vendor, "--image", tag, "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ImageTestError(f"no list of contents: {done.stderr}")
    say(done.stdout.strip().partition(": ")[2].partition(": ")[2])


def test(vendor: str, work: Path) -> None:
    """The whole test of one vendor's image; raises Skip, StandInError or ImageTestError."""
    require_tools()
    use_settings(work)
    tag = f"localhost/tokenspeed-{vendor}:test"
    base = real_or_stand_in(vendor, work)
    image_checks.check_context(base, work)
    build(vendor, base, tag, work)
    image_checks.check_configuration(vendor, tag)
    image_checks.check_contents(vendor, tag)
    check_size(vendor, base, tag)
    write_sbom(vendor, tag, work)
    if vendor == "cpu":
        image_serving.check_serving(tag, work, say)


def main() -> int:
    """Returns the exit code: 0 where the image passed or the machine cannot tell, 1 where it failed."""
    parser = argparse.ArgumentParser(prog="image_test", description="Builds an image and looks at it in containers.")
    parser.add_argument("vendor", nargs="?", default="cpu", choices=VENDORS)
    vendor = parser.parse_args().vendor
    with tempfile.TemporaryDirectory(prefix="image-test-") as folder:
        # What a container's user reads must be reachable for it.
        Path(folder).chmod(0o755)
        try:
            test(vendor, Path(folder))
        except Skip as reason:
            print(f"SKIP image test ({vendor}): {reason}")
            return 0
        except (ImageTestError, StandInError) as error:
            print(f"image test ({vendor}): {error}", file=sys.stderr)
            return 1
    say(f"{vendor} passed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
