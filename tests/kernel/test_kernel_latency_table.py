"""Latency tables as files: round trip, and everything that makes one unusable, by name."""

import json
from dataclasses import replace

import pytest

from tokenspeed_kernel import kernel_identity
from tokenspeed_kernel.kernel_identity import kernel_digest
from tokenspeed_kernel.latency_table import (
    LatencyTable,
    Measurement,
    TableError,
    cache_path,
    current_environment,
    keep,
    load_own_tables,
    load_shipped_tables,
    load_table,
    read_table,
    write_table,
)
from tokenspeed_kernel.oracle import MeasurementKey, SelectionOracle
from tokenspeed_kernel.registry import Band

BUCKET = "decode sunk=False width=64"


def kernel(x, out):
    out.copy_(x)


@pytest.fixture
def filled(registry, toy_spec):
    registry.register(toy_spec("quick"), kernel, "acme-kernels 1.0")
    registry.register(toy_spec("slow", band=Band.PERFORMANT), kernel, "/a/path with spaces/acme")
    return registry


@pytest.fixture
def here(filled, make_platform):
    return current_environment(filled, make_platform())


@pytest.fixture
def measurement(filled):
    def make(name="quick", seconds=2e-6, **changes):
        digest = kernel_digest(filled.kernel(name))
        made = Measurement("toy.copy", name, "1", digest, "input=float32", BUCKET, seconds, 15)
        return replace(made, **changes)

    return make


@pytest.fixture
def table_file(tmp_path, here, measurement):
    path = tmp_path / "table.json"
    write_table(path, LatencyTable(here, (measurement(), measurement("slow", 5e-6))))
    return path


def test_the_environment_names_what_a_latency_depends_on(here):
    assert here.platform == "cpu-x86_64-avx512"
    assert here.cores == 2
    assert here.driver == "none"
    assert "acme-kernels 1.0" in here.packages
    assert not any("path with" in package for package in here.packages)
    assert any(package.startswith("tokenspeed-appliance-kernel ") for package in here.packages)


def test_a_table_comes_back_as_it_was_written(table_file, here, measurement):
    assert read_table(table_file) == LatencyTable(here, (measurement(), measurement("slow", 5e-6)))
    assert list(table_file.parent.iterdir()) == [table_file]


def test_a_good_table_gives_the_oracle_its_measurements(table_file, filled, here):
    oracle = SelectionOracle()
    assert load_table(table_file, oracle, filled, here) == []
    assert oracle.measurements == {
        MeasurementKey(here.platform, "quick", "1", "input=float32", BUCKET): 2e-6,
        MeasurementKey(here.platform, "slow", "1", "input=float32", BUCKET): 5e-6,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torch": "1.0"}, "torch was 1.0 and is "),
        ({"platform": "cpu-x86_64-avx2"}, "platform was cpu-x86_64-avx2 and is cpu-x86_64-avx512"),
        ({"device": "NVIDIA H200"}, "device was NVIDIA H200 and is none"),
        ({"cores": 64}, "cores was 64 and is 2"),
        ({"driver": "550.1"}, "driver was 550.1 and is none"),
        ({"packages": ()}, "packages was none and is acme-kernels 1.0, "),
        ({"packages": ("acme-kernels 0.9",)}, "packages was acme-kernels 0.9 and is acme-kernels 1.0, "),
    ],
)
def test_a_stale_or_foreign_table_is_refused_by_name(table_file, filled, here, changes, message):
    write_table(table_file, LatencyTable(replace(here, **changes), read_table(table_file).measurements))
    oracle = SelectionOracle()
    with pytest.raises(TableError) as caught:
        load_table(table_file, oracle, filled, here)
    assert str(caught.value).startswith(f"{table_file}: this latency table is stale or foreign: ")
    assert message in str(caught.value)
    assert f"tokenspeed-kernel tune --output {table_file}" in str(caught.value)
    assert oracle.measurements == {}


def _spoiled(change):
    def spoil(text):
        document = json.loads(text)
        change(document)
        return json.dumps(document)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda text: text[: len(text) // 2], "not a usable latency table"),
        (lambda text: "[]", "not a latency table of format 2"),
        (_spoiled(lambda d: d.update(format=0)), "not a latency table of format 2"),
        (_spoiled(lambda d: d.pop("environment")), "environment must have exactly the fields"),
        (_spoiled(lambda d: d["environment"].update(cores="2")), "cores of a environment cannot be '2'"),
        (_spoiled(lambda d: d.update(measurements={})), "measurements must be a list"),
        (_spoiled(lambda d: d["measurements"][0].pop("code")), "measurement must have exactly the fields"),
        (_spoiled(lambda d: d["measurements"][0].update(seconds="fast")), "seconds of a measurement cannot be 'fast'"),
        (_spoiled(lambda d: d["measurements"][0].update(seconds=-1.0)), "latency of quick is not a positive number"),
        (_spoiled(lambda d: d["measurements"][0].update(runs=True)), "runs of a measurement cannot be True"),
    ],
)
def test_a_damaged_table_is_refused_by_name(table_file, spoil, message):
    table_file.write_text(spoil(table_file.read_text()))
    with pytest.raises(TableError) as caught:
        read_table(table_file)
    assert str(caught.value).startswith(f"{table_file}: not a usable latency table: ")
    assert message in str(caught.value)
    assert "delete it, or measure again" in str(caught.value)


def test_measurements_of_kernels_that_changed_or_are_gone_are_left_out_by_name(
    tmp_path, filled, here, measurement, caplog
):
    path = tmp_path / "table.json"
    entries = (measurement(), measurement("slow", code="0" * 16), measurement(kernel="gone"))
    write_table(path, LatencyTable(here, entries))
    oracle = SelectionOracle()
    left_out = load_table(path, oracle, filled, here)
    assert left_out == ["gone: there is no such kernel", "slow: the kernel has changed since it was measured"]
    assert f"{path}: measurements left out: slow: the kernel has changed" in caplog.text
    assert {key.kernel for key in oracle.measurements} == {"quick"}


def test_the_cache_and_the_tables_of_the_environment_are_read(tmp_path, filled, here, measurement, monkeypatch):
    monkeypatch.setenv("TOKENSPEED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TOKENSPEED_KERNEL_TABLES", str(tmp_path / "given.json"))
    keep(cache_path(here), here, [measurement(seconds=1e-6), measurement("slow", 3e-6)])
    keep(tmp_path / "given.json", here, [measurement(seconds=7e-6)])
    oracle = SelectionOracle()
    load_own_tables(oracle, filled, here)
    assert {key.kernel: seconds for key, seconds in oracle.measurements.items()} == {"quick": 7e-6, "slow": 3e-6}
    other = replace(here, torch="9.9")
    assert cache_path(other) != cache_path(here)
    fresh = SelectionOracle()
    monkeypatch.delenv("TOKENSPEED_KERNEL_TABLES")
    load_own_tables(fresh, filled, other)
    assert fresh.measurements == {}


def test_a_table_that_is_named_and_not_there_is_an_error(tmp_path, filled, here, monkeypatch):
    monkeypatch.setenv("TOKENSPEED_CACHE", str(tmp_path))
    monkeypatch.setenv("TOKENSPEED_KERNEL_TABLES", str(tmp_path / "nowhere.json"))
    with pytest.raises(TableError, match=r"nowhere\.json: not a usable latency table"):
        load_own_tables(SelectionOracle(), filled, here)


def test_keeping_replaces_the_same_key_and_a_table_of_elsewhere(table_file, here, measurement, caplog):
    keep(table_file, here, [measurement(seconds=9e-6)])
    assert {m.kernel: m.seconds for m in read_table(table_file).measurements} == {"quick": 9e-6, "slow": 5e-6}
    keep(table_file, replace(here, torch="9.9"), [measurement(seconds=1e-6)])
    assert {m.kernel: m.seconds for m in read_table(table_file).measurements} == {"quick": 1e-6}
    assert "replaced by new measurements" in caplog.text


def test_a_shipped_table_counts_by_version_and_never_over_the_machines_own(
    tmp_path, filled, here, measurement, make_platform
):
    platform = make_platform()
    shipped = LatencyTable(replace(here, torch="1.0", cores=64), (measurement(code="0" * 16), measurement("slow")))
    write_table(tmp_path / f"{platform.key}.json", shipped)
    own = MeasurementKey(platform.key, "slow", "1", "input=float32", BUCKET)
    oracle = SelectionOracle(measurements={own: 1.0})
    assert load_shipped_tables(tmp_path, oracle, platform) == 2
    assert oracle.measurements[own] == 1.0
    assert oracle.measurements[replace(own, kernel="quick")] == 2e-6
    assert load_shipped_tables(tmp_path, oracle, make_platform("avx2")) == 0
    (tmp_path / f"{platform.key}.json").rename(tmp_path / "cpu-x86_64-avx2.json")
    with pytest.raises(TableError, match="holds the latencies of cpu-x86_64-avx512; give it that name"):
        load_shipped_tables(tmp_path, oracle, make_platform("avx2"))


def test_the_digest_changes_with_specification_and_code(filled, toy_spec, tmp_path, monkeypatch):
    first = kernel_digest(filled.kernel("quick"))
    assert first == kernel_digest(filled.kernel("quick"))
    assert first != kernel_digest(filled.kernel("slow"))
    changed = type(filled.kernel("quick"))(toy_spec("quick", version="2"), kernel, "test")
    assert kernel_digest(changed) != first
    code = tmp_path / "code.py"
    code.write_text("one")
    monkeypatch.setattr(kernel_identity, "_files_of", lambda package: [code])
    kernel_identity.package_digest.cache_clear()
    before = kernel_digest(filled.kernel("quick"))
    code.write_text("two")
    kernel_identity.package_digest.cache_clear()
    assert kernel_digest(filled.kernel("quick")) != before
    monkeypatch.undo()
    kernel_identity.package_digest.cache_clear()
