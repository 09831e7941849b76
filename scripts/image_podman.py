"""Podman, as the image test drives it: settings that work without systemd and bridges, and containers that go away."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Works without systemd, user namespaces or a network bridge; podman then complains that it has no timers for the health
# check, which the test runs by hand.
SETTINGS = """[containers]
netns="host"
default_ulimits=["nofile=4096:4096","nproc=8192:8192"]
log_driver="k8s-file"
[engine]
runtime="runc"
cgroup_manager="cgroupfs"
events_logger="file"
"""
HARDENED = (
    "--network=none", "--read-only", "--tmpfs=/tmp", "--cap-drop=all", "--security-opt=no-new-privileges", "--init",
)  # fmt: skip
"""How every container of the test runs: nothing of it needs a network, a capability or a writable root."""


class ImageTestError(RuntimeError):
    """Something the image does wrong; the message is what the operator reads."""


class Skip(RuntimeError):
    """What keeps the test from running on this machine."""


def use_settings(work: Path) -> None:
    """Makes every podman that this process starts use SETTINGS."""
    settings = work / "containers.conf"
    settings.write_text(SETTINGS)
    os.environ |= {"CONTAINERS_CONF": str(settings), "BUILDAH_ISOLATION": "chroot", "ENGINE": "podman"}


def podman(*arguments: str, stdin: str | None = None) -> str:
    """What podman prints; raises ImageTestError with what it complains about."""
    done = subprocess.run(["podman", *arguments], capture_output=True, text=True, input=stdin, check=False)
    if done.returncode != 0:
        complaint = (done.stderr or done.stdout).strip()[-2000:]
        raise ImageTestError(f"podman {' '.join(arguments[:2])} ended with {done.returncode}: {complaint}")
    return done.stdout


def image_config(image: str) -> dict[str, Any]:
    """The image's configuration: user, entry point, labels and so on; "Size" is in bytes."""
    (found,) = json.loads(podman("image", "inspect", image))
    config: dict[str, Any] = found["Config"] | {"Size": found["Size"], "Healthcheck": found.get("Healthcheck")}
    return config


def run_once(image: str, program: list[str], *, user: str = "10001:0") -> str:
    """Runs a program in a hardened container of the image and returns what it prints."""
    entry, *arguments = program
    return podman(
        "run", "--rm", "--no-healthcheck", *HARDENED, f"--user={user}", f"--entrypoint={entry}", image, *arguments
    )


class Server:
    """A container that serves."""

    def __init__(self, name: str) -> None:
        self.name = name

    def inside(self, program: str, *arguments: str) -> str:
        """Runs a Python program beside the server, in its network."""
        return podman("exec", "-i", self.name, "python", "-", *arguments, stdin=program)

    @property
    def state(self) -> dict[str, Any]:
        """What podman knows: Running, ExitCode."""
        found: dict[str, Any] = json.loads(podman("inspect", "--format", "{{json .State}}", self.name))
        return found

    @property
    def log(self) -> str:
        """All it has said."""
        done = subprocess.run(["podman", "logs", self.name], capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    def wait_ready(self, seconds: int = 120) -> float:
        """Returns the seconds until a model answered; raises ImageTestError with the log where it does not."""
        probe = "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/ready', timeout=2)"
        begin = time.monotonic()
        while time.monotonic() - begin < seconds and self.state["Running"]:
            try:
                self.inside(probe)
                return time.monotonic() - begin
            except ImageTestError:
                time.sleep(0.5)
        raise ImageTestError(f"the server did not become ready:\n{self.log[-3000:]}")


@contextmanager
def serving(image: str, arguments: list[str], *, options: list[str], unset_home: bool = False) -> Iterator[Server]:
    """A hardened container that serves ``arguments``; it is gone afterwards.

    ``unset_home`` starts the same entry point without HOME, as some platforms do; an environment variable of the image
    cannot be removed from outside.
    """
    name = f"tokenspeed-image-test-{os.getpid()}"
    entry: list[str] = []
    if unset_home:
        options = [*options, "--entrypoint=env"]
        entry = ["--unset=HOME", *image_config(image)["Entrypoint"]]
    podman("run", "--detach", f"--name={name}", *HARDENED, *options, image, *entry, *arguments)
    try:
        yield Server(name)
    finally:
        subprocess.run(["podman", "rm", "--force", "--volumes", name], capture_output=True, check=False)
