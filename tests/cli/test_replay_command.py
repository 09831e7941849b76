"""``tokenspeed replay``: what it prints, and its exit code."""

import sys
from pathlib import Path

import pytest
from journal_play import record, rewrite

from tokenspeed.cli import main as command
from tokenspeed.telemetry.journal import Planned, Record


def tokenspeed(*arguments: str) -> int:
    """Runs a command line in this process and returns its exit code."""
    saved, sys.argv = sys.argv, ["tokenspeed", *arguments]
    try:
        with pytest.raises(SystemExit) as ended:
            command.main()
    finally:
        sys.argv = saved
    return int(ended.value.code or 0)


def test_an_equal_replay_says_so_and_exits_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rounds = record(tmp_path / "j")
    assert tokenspeed("replay", str(tmp_path / "j")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"journal   {tmp_path / 'j'}: native scheduler, made with tokenspeed-appliance ")
    assert lines[1].startswith(f"replayed  {rounds} rounds in ")
    assert "6 requests, 1 refused" in lines[1]
    assert lines[2:] == ["equal     every plan has the digest that was recorded"]


def test_a_divergence_shows_both_sides_and_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "j")

    def change(records: list[Record]) -> list[Record]:
        at = [i for i, entry in enumerate(records) if isinstance(entry, Planned)][4]
        plan = records[at]
        return [*records[:at], Planned(bytes(32), plan.forward_id, plan.rows), *records[at + 1 :]]

    path = rewrite(tmp_path / "j", change)
    assert tokenspeed("replay", str(path)) == 1
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("differs"))
    assert lines[start].startswith("differs   in round 5: the plans differ (digests 0000000000000000 and ")
    replayed = next(i for i, line in enumerate(lines) if line.startswith("  replayed: forward "))
    assert lines[start + 1].startswith("  recorded: forward ")
    assert lines[start + 2 : replayed] == lines[replayed + 1 : -1], "only the digest was changed"
    assert lines[-1].endswith("--dump 5")


def test_torn_bytes_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "j")
    data = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(data[:-3])
    assert tokenspeed("replay", str(tmp_path / "j")) == 0
    assert "bytes were not finished and are left out" in capsys.readouterr().out


def test_dump_prints_the_rounds_around_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rounds = record(tmp_path / "j")
    assert tokenspeed("replay", str(tmp_path / "j"), "--dump", "1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "round 1: submit request 1: 7 prompt tokens, 16 new (undeclared), priority 0"
    assert "round 1: submit raised RequestRefused" in "\n".join(lines)
    plans = [line.split()[1] for line in lines if ": plan " in line]
    assert plans == ["1:", "2:", "3:", "4:"]
    assert any(line.startswith("round 3: event ForwardResult(1, ") for line in lines)
    assert tokenspeed("replay", str(tmp_path / "j"), "--dump", str(rounds)) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"the journal ends in round {rounds + 1}"


def test_a_foreign_file_is_a_message_and_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "j").write_text("not one")
    for arguments in ([], ["--dump", "3"]):
        assert tokenspeed("replay", str(tmp_path / "j"), *arguments) == 2
        assert capsys.readouterr().err.strip() == (
            f"tokenspeed: {tmp_path / 'j'}: is no journal (it does not begin with TSJOURNL)"
        )


def test_a_journal_without_a_folder_is_refused_before_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "absent" / "j"
    assert tokenspeed("run", "smollm2-135m", "--profile", "smoke", "--port", "0", "--journal", str(where)) == 2
    assert f"scheduler.journal: {where} cannot be made" in capsys.readouterr().err


def test_watching_needs_a_terminal_and_a_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "j")
    assert tokenspeed("replay", str(tmp_path / "j"), "--watch") == 2
    assert "--watch needs a terminal; --dump N prints" in capsys.readouterr().err
    assert tokenspeed("replay", str(tmp_path / "j"), "--watch", "--dump", "3") == 2
    assert "give one of them" in capsys.readouterr().err
    (tmp_path / "no").write_text("nothing")
    assert tokenspeed("replay", str(tmp_path / "no"), "--watch") == 2
    assert "is no journal" in capsys.readouterr().err
