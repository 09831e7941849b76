"""What must hold for every image, looked at from outside and in containers of it."""

import json
from pathlib import Path

from scripts.image_facts import ROOT, recipes_hash, version
from scripts.image_podman import ImageTestError, image_config, podman, run_once

TOOLCHAIN = ("g++", "c++", "cc1plus", "clang++", "hipcc", "nvcc", "make", "cmake")
C_COMPILER = ("gcc", "cc")
NEEDS_C_COMPILER = ("nvidia", "amd")
"""Where Triton compiles a launcher in C for each kernel."""

CACHES = ("HOME", "XDG_CACHE_HOME", "TOKENSPEED_CACHE", "HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
UNKNOWN_USER = "23456:0"
"""A user that no image has an entry for, as platforms hand out; only its group is ours."""

_INSIDE = """
import importlib.metadata, json, os, shutil, subprocess, sys
sizes = 0
foreign = [f"/site-packages/{name}/" for name in ("torch", "nvidia", "triton", "torch_npu", "cuda")]
for folder, _, files in os.walk("/opt/tokenspeed"):
    if any(name in folder + "/" for name in foreign):
        continue
    sizes += sum(os.lstat(os.path.join(folder, name)).st_size for name in files)
probe = os.path.join(os.environ["TOKENSPEED_CACHE"], "probe")
os.makedirs(os.path.dirname(probe), exist_ok=True)
open(probe, "w").close()
writable = []
for place in ("/", "/opt/tokenspeed", "/etc", "/usr"):
    try:
        open(os.path.join(place, "probe"), "w").close()
        writable.append(place)
    except OSError:
        pass
import tokenspeed_scheduler
recipes = subprocess.run(["tokenspeed", "recipe", "list"], capture_output=True, text=True)
json.dump({
    "uid": os.getuid(),
    "own_bytes": sizes,
    "programs": [name for name in PROGRAMS if shutil.which(name)],
    "writable": writable,
    "distributions": {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()},
    "pinned": open("/opt/tokenspeed/constraints.txt").read().split(),
    "recipes": [recipes.returncode, recipes.stdout + recipes.stderr],
    "sources": [path for path in ("/source", "/wheels", "/opt/build", "/root/.cache") if os.path.exists(path)],
    "foreign_kernels": [name for _, _, names in os.walk("/opt/rocm/lib/rocblas") for name in names if "gfx942" in name],
}, sys.stdout)
"""


def look_inside(image: str, user: str = UNKNOWN_USER) -> dict[str, object]:
    """What a hardened container of the image finds around itself."""
    program = f"PROGRAMS = {[*TOOLCHAIN, *C_COMPILER]!r}\n{_INSIDE}"
    found: dict[str, object] = json.loads(run_once(image, ["python", "-c", program], user=user))
    return found


def check_context(base: str, work: Path) -> None:
    """What the build is sent: sources, and nothing that a checkout gathers beside them."""
    folder = work / "context-probe"
    folder.mkdir()
    (folder / "Dockerfile").write_text(f"FROM {base}\nCOPY . /context\n")
    tag = "localhost/tokenspeed-context:test"
    podman("build", "--quiet", "--format=docker", "--tag", tag, "--file", str(folder / "Dockerfile"), str(ROOT))
    listed = podman("run", "--rm", "--network=none", tag, "find", "/context", "-type", "f").splitlines()
    podman("image", "rm", "--force", tag)
    names = {line.removeprefix("/context/") for line in listed}
    unwanted = [
        name
        for name in sorted(names)
        if name.startswith((".git", ".venv", "tests/", "build/", "docs/"))
        or "/build/" in name
        or name.endswith((".so", ".pyc"))
    ]
    if unwanted:
        raise ImageTestError(
            f"the build context has what it should not: {', '.join(unwanted[:5])} ({len(unwanted)} files)"
        )
    missing = {
        "pyproject.toml",
        "tokenspeed/__init__.py",
        "scheduler/CMakeLists.txt",
        "images/common/build.lock",
    } - names
    if missing:
        raise ImageTestError(f"the build context lacks {', '.join(sorted(missing))}: .dockerignore must name it")


def check_configuration(vendor: str, image: str) -> None:
    """User, entry point, health check, labels; raises ImageTestError for the first that is not as promised."""
    config = image_config(image)
    labels = config["Labels"]
    wanted = {
        "user": (config["User"], "10001:0"),
        "entry point": (config["Entrypoint"], ["tokenspeed", "serve", "--host", "0.0.0.0"]),
        "stop signal": (config["StopSignal"], "SIGTERM"),
        "volume": (list(config["Volumes"]), ["/cache"]),
        "vendor": (labels["tokenspeed.vendor"], vendor),
        "engine version": (labels["tokenspeed.engine-version"], version()),
        "hash of the recipes": (labels["tokenspeed.recipes"], recipes_hash(ROOT / "configs")),
    }
    for name, (found, expected) in wanted.items():
        if found != expected:
            raise ImageTestError(f"{name} is {found!r}, not {expected!r}")
    if not config["Healthcheck"]:
        raise ImageTestError("there is no health check")
    environment = dict(line.split("=", 1) for line in config["Env"])
    astray = [name for name in CACHES if not environment.get(name, "").startswith("/cache")]
    if astray:
        raise ImageTestError(f"{', '.join(astray)} must lie below /cache")


def check_contents(vendor: str, image: str) -> None:
    """What is in it, as the user that nobody knows sees it; raises ImageTestError for the first broken promise."""
    found = look_inside(image)
    programs = set(found["programs"]) if isinstance(found["programs"], list) else set()
    allowed = set(C_COMPILER) if vendor in NEEDS_C_COMPILER else set()
    pinned = found["pinned"]
    faults = {
        f"is not user {UNKNOWN_USER}": found["uid"] != 23456,
        f"has a toolchain: {', '.join(sorted(programs - allowed))}": programs - allowed,
        "lacks the C compiler that Triton needs": allowed - programs,
        f"can write to {found['writable']}": found["writable"],
        f"kept {found['sources']} of the build": found["sources"],
        f"lists no recipes: {found['recipes']}": not isinstance(found["recipes"], list) or found["recipes"][0] != 0,
        f"does not pin torch: {pinned}": not isinstance(pinned, list)
        or not any(x.startswith("torch==") for x in pinned),
        f"kept kernels for other GPUs: {found['foreign_kernels']}": found["foreign_kernels"],
    }
    for fault, holds in faults.items():
        if holds:
            raise ImageTestError(f"the image {fault}")
    packaged = Path("/opt/tokenspeed")
    inside = run_once(
        image, ["python", "-c", _RECIPES_HASH.replace("FACTS", repr((ROOT / "scripts/image_facts.py").read_text()))]
    )
    if inside.strip() != recipes_hash(ROOT / "configs"):
        raise ImageTestError(f"the recipes below {packaged} are not those that the label names")


_RECIPES_HASH = """
import importlib.util, pathlib
facts = {"__name__": "facts"}
exec(FACTS, facts)
package = pathlib.Path(importlib.util.find_spec("tokenspeed").origin).parent
print(facts["recipes_hash"](package / "_configs"))
"""


def own_megabytes(image: str) -> float:
    """What lies in the image's environment but torch and its companions, in 10^6 bytes."""
    found = look_inside(image)["own_bytes"]
    assert isinstance(found, int)
    return found / 1e6


def within(what: str, megabytes: float, budget: float) -> None:
    """Raises ImageTestError where something outgrew its budget."""
    if megabytes > budget:
        raise ImageTestError(f"{what} takes {megabytes:.0f} MB, more than the {budget} MB of images/budgets.toml")
