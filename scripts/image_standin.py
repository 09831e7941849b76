"""Stand-ins for what a machine without registries and without vendors' packages cannot have, to build the images on.

A stand-in base has the vendor's layout (where Python is, where torch comes from, which compilers must go) on plain
Debian. A stub wheel has the name and version of a package of gigabytes and no content. They live under localhost/
names, so that nothing takes them for the real ones.
"""

import base64
import hashlib
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

from scripts.image_facts import ROOT

SUITES = {"cpu": "bookworm", "nvidia": "trixie", "amd": "trixie", "npu": "trixie"}
"""Debian releases: the CPU image wants Python 3.11, the locks of the others fit 3.12 and newer."""

STUBBED = re.compile(r"(?:torch|torch-npu|triton|(?:nvidia|cuda)-.+)")
"""The packages that a stub takes the place of in the vendors' builds."""

TORCH_BUILDS = {"nvidia": ("", "13.0", ""), "amd": ("+rocm7.2.4", "", "7.2.53211"), "npu": ("+cpu", "", "")}
"""By vendor: the local part of torch's version, and the CUDA and HIP it says it was built for."""

_PYTHON = "python3,python3-pip,python3-venv"
_TOOLCHAIN = "build-essential cmake gcc g++ make"
_DOCKERFILES = {
    # A base of Ubuntu and a few CUDA files: no Python, no compiler.
    "nvidia": "FROM {debian}\nENV NVIDIA_VISIBLE_DEVICES=all\n",
    # Ubuntu, ROCm with its compilers and kernels, an environment with torch that comes first on the path.
    "amd": """FROM {debian}
RUN apt-get update && apt-get install --yes --no-install-recommends python3 python3-dev python3-venv {toolchain}
RUN mkdir -p /opt/rocm-7.2.4/bin /opt/rocm-7.2.4/lib/llvm/bin /opt/rocm-7.2.4/lib/rocblas/library \\
    && ln -s rocm-7.2.4 /opt/rocm \\
    && cd /opt/rocm/lib/llvm/bin && touch clang++ clang-20 amdclang++ ld.lld \\
    && ln -s ../lib/llvm/bin/amdclang++ /opt/rocm/bin/ \\
    && cd /opt/rocm/lib/rocblas/library && touch TensileLibrary_gfx942.co TensileLibrary_gfx950.co TensileManifest.txt
RUN --mount=type=bind,source=.,target=/mnt python3 -m venv /opt/venv \\
    && /opt/venv/bin/python -m pip install --no-cache-dir --no-index --no-deps /mnt/*.whl
ENV PATH=/opt/venv/bin:/opt/rocm/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
""",
    # Ubuntu, CANN, a Python of its own, a host toolchain.
    "npu": """FROM {debian}
RUN apt-get update && apt-get install --yes --no-install-recommends python3 python3-dev python3-venv {toolchain} \\
    && mkdir -p /usr/local/Ascend/cann-9.1.0/bin && touch /usr/local/Ascend/cann-9.1.0/bin/ccec
ENV ASCEND_HOME_PATH=/usr/local/Ascend/cann-9.1.0
ENTRYPOINT ["/bin/bash", "-c", "exec \\"$@\\"", "--"]
""",
}


class StandInError(RuntimeError):
    """A stand-in that cannot be made; the message says which tool is missing or what it answered."""


def stand_in_base(vendor: str, work: Path) -> str:
    """Returns the name of the vendor's stand-in base, made with mmdebstrap and podman where it is not there yet."""
    name = f"localhost/tokenspeed-stand-in:{vendor}"
    if _exists(name):
        return name
    if vendor == "cpu":
        _bootstrap(name, "bookworm", _PYTHON, work)
        return name
    debian = f"localhost/tokenspeed-stand-in:{SUITES[vendor]}"
    if not _exists(debian):
        _bootstrap(debian, SUITES[vendor], "", work)
    folder = work / f"stand-in-{vendor}"
    folder.mkdir(exist_ok=True)
    (folder / "Dockerfile").write_text(_DOCKERFILES[vendor].format(debian=debian, toolchain=_TOOLCHAIN))
    if vendor == "amd":
        stub_wheel(folder, "torch", torch_version(vendor), vendor)
        stub_wheel(folder, "triton", "3.6.0+rocm7.2.4", vendor)
    _run(["podman", "build", "--quiet", "--format=docker", "--network=host", "--tag", name, str(folder)])
    return name


def torch_version(vendor: str) -> str:
    """The version of the vendor's torch, as its constraints and its build say."""
    found = re.search(r"^torch==(\S+)$", (ROOT / "images" / vendor / "constraints.txt").read_text(), re.MULTILINE)
    assert found is not None
    return found[1] + ("" if vendor == "nvidia" else TORCH_BUILDS[vendor][0])


def stub_wheel(folder: Path, name: str, version: str, vendor: str) -> str:
    """Writes a wheel without content into ``folder`` and returns its SHA-256; torch's says what it was built for."""
    package = name.replace("-", "_")
    files = {f"{package}/__init__.py": ""}
    if name == "torch":
        local, cuda, hip = TORCH_BUILDS[vendor]
        shown = version.partition("+")[0] + (local or f"+cu{cuda.replace('.', '')}")
        files["torch/version.py"] = f"__version__ = {shown!r}\ncuda = {cuda or None!r}\nhip = {hip or None!r}\n"
    folder_name = f"{package}-{version}.dist-info"
    files[f"{folder_name}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files[f"{folder_name}/WHEEL"] = (
        "Wheel-Version: 1.0\nGenerator: stand-in\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    records = [f"{path},sha256={_record_hash(text)},{len(text)}\n" for path, text in files.items()]
    files[f"{folder_name}/RECORD"] = "".join([*records, f"{folder_name}/RECORD,,\n"])
    wheel = folder / f"{package}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(zipfile.ZipInfo(path), text)  # no date: the same stub has the same hash
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def stub_lock(lock: str, folder: Path, vendor: str) -> str:
    """The lock with stubs in the place of the packages of gigabytes, which are written into ``folder``."""

    def replaced(match: re.Match[str]) -> str:
        if STUBBED.fullmatch(match["name"]) is None:
            return match[0]
        # A version that no index has: it would be preferred to a stub of the same.
        version = f"{match['version']}+stub"
        digest = stub_wheel(folder, match["name"], version, vendor)
        return f"{match['name']}=={version} \\\n    --hash=sha256:{digest}\n"

    return re.sub(r"^(?P<name>[a-z0-9-]+)==(?P<version>\S+) \\\n(?: +--hash=.*\n)+", replaced, lock, flags=re.MULTILINE)


def copy_checkout(target: Path) -> None:
    """Copies what git knows or would take, so that a build context can be changed without touching the checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def _bootstrap(name: str, suite: str, include: str, work: Path) -> None:
    if shutil.which("mmdebstrap") is None:
        raise StandInError("no registry is reachable, and no mmdebstrap for a stand-in")
    print(f"image test: making a stand-in base, {name}", flush=True)
    packages = ",".join(["ca-certificates,netbase,tzdata", *([include] if include else [])])
    hook = (
        'rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED; '
        '[ ! -e "$1"/usr/bin/python3 ] || ln -s python3 "$1"/usr/bin/python'
    )
    archive = work / "base.tar"
    _run(
        [
            "mmdebstrap",
            "--quiet",
            "--variant=minbase",
            f"--include={packages}",
            f"--customize-hook={hook}",
            suite,
            str(archive),
        ]
    )
    _run(["podman", "import", "--quiet", str(archive), name])
    archive.unlink()


def _record_hash(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def _exists(image: str) -> bool:
    return subprocess.run(["podman", "image", "exists", image], check=False).returncode == 0


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise StandInError(f"{command[0]} failed:\n{(done.stdout + done.stderr)[-2000:]}")
