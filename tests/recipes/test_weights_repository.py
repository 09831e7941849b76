"""Repositories of a hub on a loopback port: fetched whole, resumed, damaged, offline, twice at once."""

import errno
import hashlib
import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from stand_in_hub import Fault, StandInHub

from tokenspeed.recipes.schema import HuggingFaceWeights
from tokenspeed.recipes.weights import FetchError, check, discard, fetch, locate, survey
from tokenspeed.recipes.weights.manifest import load_manifest
from tokenspeed.recipes.weights.workers import Stopped, Watch

MIB = 1 << 20
COMMIT = "c" * 40
SHARDS = [bytes([shard]) * (4 * MIB) + bytes(range(256)) for shard in (1, 2)]
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}" * 300,
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": FIRST, "b": SECOND}}).encode(),
    FIRST: SHARDS[0],
    SECOND: SHARDS[1],
}
OTHERS = {"README.md": b"#", "pytorch_model.bin": bytes(5000), "original/consolidated.safetensors": bytes(5000)}
PINNED = HuggingFaceWeights(kind="huggingface", repository="someone/model", revision=COMMIT)
MOVING = PINNED.model_copy(update={"revision": "main"})


def no_progress(what: str, done: int, total: int) -> None:
    """Tests have no terminal."""


@pytest.fixture(autouse=True)
def published(hub: StandInHub) -> None:
    """The model is on the hub."""
    hub.add("someone/model", {**FILES, **OTHERS}, COMMIT)


def folder_of(tmp_path: Path) -> Path:
    return tmp_path / "hub" / "hub" / "models--someone--model"


def partial_file(tmp_path: Path, content: bytes) -> Path:
    return folder_of(tmp_path) / "blobs" / f"{hashlib.sha256(content).hexdigest()}.incomplete"


def assert_whole(path: str) -> None:
    here = {file.name: file.read_bytes() for file in Path(path).iterdir()}
    assert here == FILES


def test_a_repository_comes_whole_with_what_the_engine_needs_and_no_more(hub: StandInHub, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    assert not locate(PINNED).present
    source = fetch(PINNED, lambda *progress: told.append(progress))
    assert source.kind == "folder"
    assert_whole(source.path)
    total = sum(len(content) for content in FILES.values())
    assert told[-1] == (f"download someone/model at revision {COMMIT}", total, total)
    done = [count for what, count, _ in told if what.startswith("download")]
    assert done == sorted(done)
    located = locate(PINNED)
    assert (located.path, located.present, located.bytes_on_disk) == (source.path, True, total)
    assert sorted({asked.path for asked in hub.log}) == sorted(["", *FILES])
    # The library, and whatever uses it, finds the same files.
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache("someone/model", FIRST, cache_dir=tmp_path / "hub" / "hub", revision=COMMIT)
    assert cached == str(Path(source.path) / FIRST)
    # A second start asks nobody.
    hub.log.clear()
    assert fetch(PINNED, no_progress) == source
    assert hub.log == []


def test_a_connection_that_ends_early_is_taken_up_where_it_ended(hub: StandInHub) -> None:
    hub.fail(FIRST, Fault(cut=3 * MIB + 5), Fault(cut=100), Fault(status=503), Fault(status=429))
    assert_whole(fetch(PINNED, no_progress).path)
    asked = hub.downloads(FIRST)
    assert [(one.start, one.status) for one in asked] == [
        (0, 200),
        (3 * MIB + 5, 206),
        (3 * MIB + 105, 503),
        (3 * MIB + 105, 429),
        (3 * MIB + 105, 206),
    ]
    assert sum(one.sent for one in asked) == len(SHARDS[0])


def test_what_an_earlier_process_left_is_not_fetched_again(hub: StandInHub, tmp_path: Path) -> None:
    partial = partial_file(tmp_path, SHARDS[0])
    partial.parent.mkdir(parents=True)
    partial.write_bytes(SHARDS[0][: 2 * MIB])
    told: list[tuple[str, int, int]] = []
    _, pending = survey(PINNED, no_progress)
    assert pending.bytes_to_fetch == pending.bytes_in_all - 2 * MIB
    assert_whole(fetch(PINNED, lambda *progress: told.append(progress)).path)
    assert [asked.start for asked in hub.downloads(FIRST)] == [2 * MIB]
    assert next(done for what, done, _ in told if what.startswith("download")) >= 2 * MIB
    assert not partial.exists()


def test_a_damaged_rest_of_an_earlier_try_comes_anew(hub: StandInHub, tmp_path: Path) -> None:
    partial = partial_file(tmp_path, SHARDS[0])
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"?" * MIB)
    told: list[tuple[str, int, int]] = []
    assert_whole(fetch(PINNED, lambda *progress: told.append(progress)).path)
    assert [asked.start for asked in hub.downloads(FIRST)] == [MIB, 0]
    assert told[-1][1] == told[-1][2]


def test_a_rest_that_is_too_long_is_no_obstacle(hub: StandInHub, tmp_path: Path) -> None:
    partial = partial_file(tmp_path, SHARDS[0])
    partial.parent.mkdir(parents=True)
    partial.write_bytes(SHARDS[0] + b"more")
    assert_whole(fetch(PINNED, no_progress).path)
    assert hub.downloads(FIRST) == []  # what was there was right, up to its size


def test_a_server_that_ignores_ranges_sends_all_and_nothing_is_doubled(hub: StandInHub) -> None:
    told: list[tuple[str, int, int]] = []
    hub.fail(FIRST, Fault(cut=MIB), Fault(whole=True))
    assert_whole(fetch(PINNED, lambda *progress: told.append(progress)).path)
    assert [(asked.start, asked.status) for asked in hub.downloads(FIRST)] == [(0, 200), (MIB, 200)]
    assert told[-1][1] == told[-1][2]


def test_a_byte_altered_on_the_way_is_fetched_again_once_then_named(hub: StandInHub, tmp_path: Path) -> None:
    hub.fail(FIRST, Fault(corrupt=True))
    assert_whole(fetch(PINNED, no_progress).path)
    assert len(hub.downloads(FIRST)) == 2
    hub.add("someone/other", {**FILES}, "d" * 40)
    hub.fail("config.json", Fault(corrupt=True), Fault(corrupt=True))
    other = HuggingFaceWeights(kind="huggingface", repository="someone/other", revision="d" * 40)
    with pytest.raises(FetchError, match=r"^config.json: git's sha1 of what came is [0-9a-f]{40}, the hub lists"):
        fetch(other, no_progress)
    assert not locate(other).present


def test_damage_on_the_disk_is_named_and_only_that_file_comes_anew(hub: StandInHub) -> None:
    folder = Path(fetch(PINNED, no_progress).path)
    assert check(PINNED, no_progress).damaged == ()
    (folder / SECOND).write_bytes(SHARDS[1][:-1] + b"?")
    assert locate(PINNED).present  # sizes are what a start compares
    report = check(PINNED, no_progress)
    (damage,) = report.damaged
    assert damage.path == folder / SECOND
    assert f"the hub lists {hashlib.sha256(SHARDS[1]).hexdigest()}" in damage.why
    hub.log.clear()
    discard(report)
    assert not locate(PINNED).present
    assert_whole(fetch(PINNED, no_progress).path)
    assert [asked.path for asked in hub.log] == ["", SECOND]


def test_a_file_cut_short_on_the_disk_is_not_taken_for_present(hub: StandInHub) -> None:
    folder = Path(fetch(PINNED, no_progress).path)
    (folder / FIRST).write_bytes(SHARDS[0][:-1])
    assert not locate(PINNED).present
    assert_whole(fetch(PINNED, no_progress).path)


def test_files_of_another_program_are_checked_before_they_count(hub: StandInHub, tmp_path: Path) -> None:
    """The layout of huggingface_hub without a list of ours: present by size, checked by the next pull."""
    snapshot = folder_of(tmp_path) / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name, content in FILES.items():
        (snapshot / name).write_bytes(content)
    known = PINNED.model_copy(update={"bytes": 2 * len(SHARDS[0]) + 1000})
    assert locate(known).present
    assert not check(known, no_progress).known
    (snapshot / FIRST).write_bytes(SHARDS[0][:-1] + b"?")
    assert_whole(fetch(known, no_progress, newest=True).path)
    assert [asked.path for asked in hub.log] == ["", FIRST]
    assert check(known, no_progress).known
    manifest = load_manifest(folder_of(tmp_path), COMMIT)
    assert manifest is not None
    assert manifest.checked == set(FILES)


def test_without_a_list_the_index_says_what_is_whole(tmp_path: Path) -> None:
    snapshot = folder_of(tmp_path) / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name, content in FILES.items():
        (snapshot / name).write_bytes(content)
    assert locate(PINNED).present
    overstated = PINNED.model_copy(update={"bytes": 10**9})
    assert locate(overstated).present
    index = snapshot / "model.safetensors.index.json"
    total = len(SHARDS[0]) + len(SHARDS[1])
    mapped = json.loads(index.read_text())
    index.write_text(json.dumps({**mapped, "metadata": {"total_size": total}}))
    assert locate(PINNED).present
    index.write_text(json.dumps({**mapped, "metadata": {"total_size": total + 1}}))
    assert not locate(PINNED).present
    index.write_text(json.dumps(mapped))
    (snapshot / SECOND).unlink()
    assert not locate(PINNED).present
    index.write_text("[]")
    assert not locate(PINNED).present
    index.unlink()
    for size, present in ((2 * len(SHARDS[0]), False), (len(SHARDS[0]), True)):
        assert locate(PINNED.model_copy(update={"bytes": size})).present is present


def test_one_content_under_two_names_travels_once(hub: StandInHub) -> None:
    content = b"{}" * 1000
    files = {**FILES, "tokenizer_config.json": content, "generation_config.json": content}
    hub.add("someone/model", files, COMMIT)
    folder = Path(fetch(PINNED, no_progress).path)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == files
    assert len(hub.downloads("tokenizer_config.json")) + len(hub.downloads("generation_config.json")) == 1
    assert check(PINNED, no_progress).damaged == ()


def test_to_look_for_weights_nothing_slow_is_imported_and_nobody_is_asked(hub: StandInHub) -> None:
    fetch(MOVING, no_progress)
    hub.log.clear()
    program = (
        "import sys\n"
        "from tokenspeed.recipes.schema import HuggingFaceWeights\n"
        "from tokenspeed.recipes.weights import fetch, locate\n"
        "weights = HuggingFaceWeights(kind='huggingface', repository='someone/model')\n"
        "assert locate(weights).present\n"
        "assert fetch(weights, print).kind == 'folder'\n"
        "assert not {'huggingface_hub', 'httpx', 'httpx2', 'requests', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert hub.log == []


def test_a_revision_that_moves_is_followed_when_asked(hub: StandInHub, tmp_path: Path) -> None:
    first = fetch(MOVING, no_progress)
    assert Path(first.path).name == COMMIT
    moved = hub.add("someone/model", {**FILES, "config.json": b'{"model_type": "qwen3"}'}, "e" * 40)
    hub.log.clear()
    assert fetch(MOVING, no_progress) == first  # a start serves what is here
    assert hub.log == []
    told: list[str] = []
    second = fetch(MOVING, lambda what, *_: told.append(what), newest=True)
    assert Path(second.path).name == moved.commit
    assert not any(what.startswith("check") for what in told)
    assert [asked.path for asked in hub.log] == ["", "config.json"]  # contents that did not change are not fetched
    assert locate(MOVING).path == second.path
    assert locate(PINNED).present


def test_where_all_is_here_nothing_is_written(hub: StandInHub, tmp_path: Path) -> None:
    """A cache that is mounted read-only serves, and a pull finds it whole."""
    fetch(MOVING, no_progress)

    def times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (tmp_path / "hub").rglob("*")}

    before = times()
    fetch(MOVING, no_progress, newest=True)
    check(MOVING, no_progress)
    assert times() == before


def test_room_is_asked_for_what_is_missing_only(
    hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    from tokenspeed.recipes.weights import places

    usage = shutil.disk_usage(tmp_path)
    wanted = sum(len(content) for content in FILES.values())
    monkeypatch.setattr(places.shutil, "disk_usage", lambda _: usage._replace(free=wanted - 1))
    with pytest.raises(
        FetchError, match=r"needs 8\.4 MB of disk, .*models--someone--model has 8\.4 MB free; set HF_HOME"
    ):
        fetch(PINNED, no_progress)
    assert [asked.path for asked in hub.log] == [""]
    partial = partial_file(tmp_path, SHARDS[0])
    partial.parent.mkdir(parents=True)
    partial.write_bytes(SHARDS[0][:1])
    assert_whole(fetch(PINNED, no_progress).path)


def test_a_disk_that_fills_up_keeps_what_has_come(
    hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("tokenspeed.recipes.weights.transfer._sync", full)
        with pytest.raises(FetchError, match=r"the disk is full .* make room and run the same again, or set HF_HOME"):
            fetch(PINNED, no_progress)
    kept = sum(path.stat().st_size for path in (folder_of(tmp_path) / "blobs").glob("*.incomplete"))
    assert kept > 0
    hub.log.clear()
    assert_whole(fetch(PINNED, no_progress).path)
    assert sum(asked.sent for asked in hub.log) == sum(len(content) for content in FILES.values()) - kept


def test_a_cache_that_cannot_be_written_is_named(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "/dev/null/hub")
    with pytest.raises(FetchError, match=r"^/dev/null/hub/\S+: cannot be written \(Not a directory\); set HF_HOME"):
        fetch(PINNED, no_progress)


def test_offline_serves_what_is_here_and_names_what_is_not(
    hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FetchError) as nothing:
        fetch(MOVING, no_progress)
    assert "HF_HUB_OFFLINE=1 forbids to ask the hub; nothing of it is here" in str(nothing.value)
    assert f"then copy {folder_of(tmp_path)} here" in str(nothing.value)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    path = Path(fetch(MOVING, no_progress).path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.log.clear()
    assert fetch(MOVING, no_progress).path == str(path)
    assert check(MOVING, no_progress).damaged == ()
    (path / SECOND).resolve().unlink()
    with pytest.raises(FetchError, match=rf"missing: {SECOND} \({len(SHARDS[1]):,} bytes\)"):
        fetch(MOVING, no_progress)
    assert hub.log == []


def test_two_at_once_download_once(hub: StandInHub) -> None:
    hub.fail(FIRST, Fault(hold=MIB))
    waits = threading.Event()
    found: list[str] = []

    def first() -> None:
        found.append(fetch(PINNED, no_progress).path)

    def second() -> None:
        found.append(fetch(PINNED, lambda what, *_: waits.set() if "another process" in what else None).path)

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert hub.holding.wait(30)
    threads[1].start()
    assert waits.wait(30)
    hub.release()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 2
    assert_whole(found[0])
    assert {path: len(hub.downloads(path)) for path in FILES} == dict.fromkeys(FILES, 1)


def test_who_waits_says_why_and_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch()
    waited: list[tuple[float, str]] = []
    monkeypatch.setattr(watch, "_stop", SimpleNamespace(wait=lambda s: waited.append((s, watch.note)), is_set=bool))
    watch.pause(7.0, "busy")
    assert waited == [(7.0, "busy; again in 7 s")]
    assert watch.note == ""
    stopped = Watch()
    stopped.stop()
    with pytest.raises(Stopped):
        stopped.pause(3600.0, "busy")


def test_a_file_too_large_for_one_answer_is_left_to_the_library(
    hub: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenspeed.recipes.weights.transfer.LARGEST_OVER_HTTP", MIB)
    told: list[tuple[str, int, int]] = []
    assert_whole(fetch(PINNED, lambda *progress: told.append(progress)).path)
    assert told[-1][1] == told[-1][2]
    assert check(PINNED, no_progress).damaged == ()


def test_a_file_system_without_links_holds_the_files_themselves(
    hub: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    twice = {"special_tokens_map.json": b"{}", "added_tokens.json": b"{}"}
    hub.add("someone/model", {**FILES, **twice}, COMMIT)
    source = fetch(PINNED, no_progress)
    assert {file.name: file.read_bytes() for file in Path(source.path).iterdir()} == {**FILES, **twice}
    hub.log.clear()
    assert fetch(PINNED, no_progress, newest=True) == source
    assert [asked.path for asked in hub.log] == [""]


def test_one_gguf_of_several_is_chosen_by_the_format(hub: StandInHub) -> None:
    content = b"GGUF" + bytes(1000)
    hub.add("someone/ggufs", {"m-Q4_0.gguf": content, "m-Q8_0.gguf": content + b"8", "config.json": b"{}"}, "a" * 40)
    weights = HuggingFaceWeights(kind="huggingface", repository="someone/ggufs", revision="a" * 40, format="gguf-q8_0")
    source = fetch(weights, no_progress)
    assert source.kind == "gguf"
    assert Path(source.path).name == "m-Q8_0.gguf"
    assert Path(source.path).read_bytes() == content + b"8"
    assert locate(weights).path == source.path
    # The list is there for the other one too: nothing of it is taken for present.
    other = weights.model_copy(update={"format": "gguf-q4_0"})
    assert not locate(other).present
    assert Path(fetch(other, no_progress).path).name == "m-Q4_0.gguf"
    with pytest.raises(FetchError, match=r"holds 2 GGUF files \(m-Q4_0.gguf, m-Q8_0.gguf\); say which"):
        fetch(weights.model_copy(update={"format": ""}), no_progress)
