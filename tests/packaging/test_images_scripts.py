"""The scripts that run inside the builds: what is trimmed, what is checked, what the recipes' hash sees."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts import image_facts, image_standin
from scripts.image_facts import ROOT

IMAGES = ROOT / "images"


def test_the_rocm_image_loses_its_toolchain_and_other_gpus_kernels(tmp_path: Path) -> None:
    kept = [
        "usr/bin/gcc", "usr/bin/ld", "opt/rocm-7/lib/llvm/bin/ld.lld", "opt/rocm-7/lib/libamdhip64.so.7",
        "opt/rocm-7/lib/rocblas/library/Kernels_gfx950.co", "opt/rocm-7/lib/rocblas/library/Manifest.txt",
        "opt/venv/lib/python3.12/site-packages/torch/lib/hipblaslt/library/Kernels_gfx950.dat",
        "opt/venv/lib/python3.12/site-packages/other/gfx942.py",
    ]  # fmt: skip
    gone = [
        "usr/bin/g++", "usr/bin/c++", "usr/bin/x86_64-linux-gnu-g++-13", "usr/libexec/gcc/x86_64-linux-gnu/13/cc1plus",
        "usr/bin/make", "opt/rocm-7/lib/llvm/bin/clang-20", "opt/rocm-7/bin/hipcc", "opt/rocm-7/lib/librocblas.a",
        "opt/rocm-7/lib/rocblas/library/Kernels_gfx942.co",
        "opt/venv/lib/python3.12/site-packages/torch/lib/hipblaslt/library/Kernels_gfx90a.dat",
    ]  # fmt: skip
    for name in [*kept, *gone]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    trim(tmp_path, "gfx950")
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == set(kept)


def test_several_gpus_may_be_kept_and_none_is_a_mistake(tmp_path: Path) -> None:
    folder = tmp_path / "opt" / "rocm" / "lib" / "rocblas" / "library"
    folder.mkdir(parents=True)
    for name in ("gfx90a", "gfx942", "gfx950"):
        (folder / f"K_{name}.co").touch()
    trim(tmp_path, "gfx942 gfx950")
    assert sorted(path.name for path in folder.iterdir()) == ["K_gfx942.co", "K_gfx950.co"]
    with pytest.raises(subprocess.CalledProcessError) as caught:
        trim(tmp_path, "")
    assert "must name GPUs such as gfx950" in caught.value.stderr


def trim(root: Path, architectures: str) -> None:
    """Runs images/amd/trim.sh below a folder."""
    subprocess.run(
        ["sh", str(IMAGES / "amd" / "trim.sh"), architectures],
        env={"PATH": "/usr/bin:/bin", "ROOT": str(root)}, capture_output=True, text=True, check=True,
    )  # fmt: skip


def test_the_recipes_hash_sees_every_change_and_only_recipes(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    recipe = tmp_path / "recipes" / "one.yaml"
    recipe.write_text("name: one\n")
    first = image_facts.recipes_hash(tmp_path)
    (tmp_path / "recipes" / "notes.txt").write_text("")
    assert image_facts.recipes_hash(tmp_path) == first
    recipe.write_text("name: two\n")
    assert image_facts.recipes_hash(tmp_path) != first
    recipe.write_text("name: one\n")
    recipe.rename(tmp_path / "recipes" / "other.yaml")
    assert image_facts.recipes_hash(tmp_path) != first


@pytest.mark.parametrize(
    ("vendor", "stub", "fault"),
    [
        ("cpu", "npu", ""),
        ("nvidia", "nvidia", ""),
        ("amd", "amd", ""),
        ("cpu", "nvidia", r"built for CUDA 13\.0, the cpu image wants none; pass --build-arg TORCH_INDEX="),
        ("amd", "nvidia", r"built for CUDA 13\.0, the amd image wants none"),
        ("nvidia", "npu", r"built for CUDA none, the nvidia image wants 13\.x"),
        ("npu", "amd", r"built for ROCm 7\.2\.53211, the npu image wants none"),
    ],
)
def test_a_torch_of_another_vendor_ends_the_build(vendor: str, stub: str, fault: str, tmp_path: Path) -> None:
    site = tmp_path / "site"
    install_stub(site, tmp_path, "torch", "2.13.0", stub)
    done = check_environment(vendor, site, "torch==2.13.0\n", tmp_path)
    if fault:
        assert done.returncode == 1
        assert re.search(fault, done.stderr), done.stderr
        assert not (tmp_path / "pins.txt").exists()
    else:
        assert done.returncode == 0, done.stderr
        pinned = (tmp_path / "pins.txt").read_text().splitlines()
        assert [line for line in pinned if not line.startswith("triton==")] == ["torch==2.13.0"]  # ours may have Triton


def test_another_version_of_torch_ends_the_build(tmp_path: Path) -> None:
    install_stub(tmp_path / "site", tmp_path, "torch", "2.12.0", "npu")
    done = check_environment("cpu", tmp_path / "site", "# why\ntorch==2.13.0\n", tmp_path)
    assert done.returncode == 1
    assert "torch is 2.12.0, not ==2.13.0" in done.stderr


def test_what_is_required_and_missing_ends_the_build(tmp_path: Path) -> None:
    site = tmp_path / "site"
    install_stub(site, tmp_path, "torch", "2.13.0", "npu")
    metadata = next(site.glob("torch-*.dist-info")) / "METADATA"
    metadata.write_text(metadata.read_text() + 'Requires-Dist: absent>=1\nRequires-Dist: other; extra == "more"\n')
    done = check_environment("cpu", site, "", tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip() == "check_environment: torch requires absent>=1, which is not installed"


def install_stub(site: Path, work: Path, name: str, version: str, vendor: str) -> None:
    """Unpacks a stub wheel."""
    image_standin.stub_wheel(work, name, version, vendor)
    (wheel,) = work.glob(f"{name}-{version}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)


def check_environment(vendor: str, site: Path, constraints: str, work: Path) -> subprocess.CompletedProcess[str]:
    """Runs the build's check as if ``site`` were the environment of the image."""
    (work / "constraints.txt").write_text(constraints)
    program = (
        "import runpy, sys, sysconfig\n"
        f"sys.path.insert(0, {str(site)!r})\n"
        f"sysconfig.get_path = lambda name: {str(site)!r}\n"
        f"sys.argv = ['check', {vendor!r}, {str(work / 'constraints.txt')!r}, {str(work / 'pins.txt')!r}]\n"
        f"runpy.run_path({str(IMAGES / 'common' / 'check_environment.py')!r}, run_name='__main__')\n"
    )
    blind = ["-S", "-c", f"import sys; sys.path.append({packaging_folder()!r})\n{program}"]
    return subprocess.run([sys.executable, *blind], capture_output=True, text=True, check=False)


def packaging_folder() -> str:
    """A folder with the library that the check reads requirements with; pip brings a copy, as in the image's lock."""
    import packaging

    return str(Path(packaging.__file__).parent.parent)
