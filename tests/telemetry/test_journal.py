"""The journal's file: what is written comes back, and what is torn, damaged or foreign is told apart."""

import logging
import os
import stat
import zlib
from pathlib import Path

import pytest

from tokenspeed.telemetry.journal import (
    MAGIC,
    Advanced,
    Begin,
    JournalError,
    JournalReader,
    JournalWriter,
    Planned,
    Raised,
    Record,
    Submitted,
)

BEGIN = Begin("native", {"num_parents": 4, "groups": [{"group_id": "full"}]}, {"tokenspeed-appliance": "0.1.0"})
RECORDS: list[Record] = [
    Submitted(1, b"\1\0\0\0", 9, True, -1, b"tenant", -1),
    Advanced([("ForwardResult", [3, b"\7\0\0\0", None]), ("Finish", [1])]),
    Raised("submit", "RequestRefused", "too long"),
    Planned(b"d" * 32, 3, b"\1\0\0\0" * 4),
]


def write(path: Path, records: list[Record] = RECORDS) -> bytes:
    """Writes a journal and returns the file's bytes."""
    writer = JournalWriter(path, BEGIN)
    for record in records:
        writer.append(record)
    writer.close()
    return path.read_bytes()


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    write(tmp_path / "j")
    reader = JournalReader(tmp_path / "j")
    assert reader.begin == BEGIN
    assert list(reader) == RECORDS
    assert reader.torn == 0


def test_every_cut_reads_up_to_the_last_whole_record(tmp_path: Path) -> None:
    """Wherever a crash tears the file: the whole records before come back, the rest is counted."""
    data = write(tmp_path / "whole")
    head = len(write(tmp_path / "head", []))
    path = tmp_path / "cut"
    seen = set()
    for end in range(head, len(data)):
        path.write_bytes(data[:end])
        reader = JournalReader(path)
        records = list(reader)
        assert records == RECORDS[: len(records)]
        write(tmp_path / f"as-far-{len(records)}-{end}", records)
        assert reader.torn == end - (tmp_path / f"as-far-{len(records)}-{end}").stat().st_size
        seen.add(len(records))
    assert seen == set(range(len(RECORDS)))


def test_zeros_behind_the_last_record_are_torn_bytes(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(write(tmp_path / "whole") + bytes(100))
    reader = JournalReader(path)
    assert list(reader) == RECORDS
    assert reader.torn == 100


def test_damage_in_the_middle_is_named_with_its_place(tmp_path: Path) -> None:
    data = bytearray(write(tmp_path / "whole"))
    at = len(write(tmp_path / "head", RECORDS[:1]))
    data[at + 10] ^= 1
    (tmp_path / "j").write_bytes(data)
    reader = JournalReader(tmp_path / "j")
    with pytest.raises(JournalError, match=rf"j: is damaged at byte {at} \(the checksum does not match\)"):
        list(reader)


def frame(record: bytes) -> bytes:
    return len(record).to_bytes(4, "little") + zlib.crc32(record).to_bytes(4, "little") + record


FOREIGN: list[tuple[bytes, str]] = [
    (b"", "is no journal"),
    (b"GGUF" + bytes(40), "is no journal"),
    (MAGIC, "is no journal"),
    (MAGIC + b"\7\0\0\0", "has journal format 7, this version reads format 1"),
    (MAGIC + b"\1\0\0\0", "its first record is missing"),
    (MAGIC + b"\1\0\0\0" + frame(b"\x91\x09"), "holds an unknown record at byte 12"),
    (MAGIC + b"\1\0\0\0" + frame(b"\x94\x04\xa1a\xa1b\xa1c"), "its first record is missing"),
]


@pytest.mark.parametrize(("data", "told"), FOREIGN)
def test_a_foreign_file_is_refused_with_the_reason(tmp_path: Path, data: bytes, told: str) -> None:
    (tmp_path / "j").write_bytes(data)
    with pytest.raises(JournalError, match=told):
        JournalReader(tmp_path / "j")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="absent: cannot be read: No such file"):
        JournalReader(tmp_path / "absent")
    with pytest.raises(JournalError, match="the journal cannot be made: No such file"):
        JournalWriter(tmp_path / "absent" / "j", BEGIN)


def test_a_journal_is_its_owners_and_never_written_over(tmp_path: Path) -> None:
    first = write(tmp_path / "j")
    assert stat.S_IMODE((tmp_path / "j").stat().st_mode) == 0o600
    writer = JournalWriter(tmp_path / "j", BEGIN)
    assert writer.path == tmp_path / "j.1"
    writer.close()
    assert (tmp_path / "j").read_bytes() == first
    assert list(JournalReader(tmp_path / "j.1")) == []


def test_a_flush_reaches_the_file_and_a_buffer_waits(tmp_path: Path) -> None:
    prompt = Submitted(1, bytes(400), 9, True, 0, b"", -1)
    eager = JournalWriter(tmp_path / "eager", BEGIN)
    lazy = JournalWriter(tmp_path / "lazy", BEGIN, buffer_bytes=1000)
    counts = []
    for _ in range(4):
        for writer in (eager, lazy):
            writer.append(prompt)
            writer.flush()
        counts.append([len(list(JournalReader(writer.path))) for writer in (eager, lazy)])
    assert counts == [[1, 0], [2, 0], [3, 3], [4, 3]]
    lazy.close()
    eager.close()
    assert len(list(JournalReader(lazy.path))) == 4


def test_a_full_disk_ends_the_journal_and_not_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = JournalWriter(tmp_path / "j", BEGIN)

    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with caplog.at_level(logging.ERROR):
        for record in RECORDS:
            writer.append(record)
            writer.flush()
    writer.close()
    assert not writer.is_open
    assert [entry.getMessage() for entry in caplog.records] == [
        f"the journal {tmp_path / 'j'} ends here: No space left on device"
    ]
    assert list(JournalReader(tmp_path / "j")) == []
