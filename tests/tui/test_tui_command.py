"""The command line as scripts use it: ``--once``, ``--json``, ``--record``, ``--replay``, exit statuses, messages."""

import json
import re
import socket

import pytest

from tokenspeed_tui import main
from tokenspeed_tui.client import STATE_PATH
from tokenspeed_tui.recording import read_recording

COLOUR = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;[0-9;]*)?m")


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    for name in ("NO_COLOR", "FORCE_COLOR", "TOKENSPEED_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def working_server(story, tiny_server):
    """A server whose engine is half a second further each time it is asked."""
    moments = iter(range(10_000))
    tiny_server.answers[STATE_PATH] = (200, lambda: story.state(story.snapshot(next(moments) / 2)))
    return tiny_server


def test_once_json_has_the_figures_and_the_state(story, working_server, capsys):
    assert main(["--url", working_server.url, "--once", "--json", "--interval", "0.05"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["url"] == working_server.url
    assert shown["probes"] == {"live": True, "ready": True, "progress": True}
    assert shown["rates"]["prefill_tokens_per_s"] == pytest.approx(300.0)
    assert shown["rates"]["decode_tokens_per_s"] == pytest.approx(60.0)
    assert {"source": "Submitted", "target": "Prefilling", "per_s": 2.0} in shown["rates"]["flows_per_s"]
    assert shown["headroom"]["tokens"] == 7936
    assert shown["headroom"]["largest"] == 2048
    assert shown["state"] == story.state(story.snapshot(0.5))
    assert shown["state"]["snapshot"]["states"]["Bootstrapping"] is None
    assert shown["error"] is None


def test_once_prints_the_screen(working_server, capsys):
    assert main(["--url", working_server.url, "--once", "--interval", "0.05"]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "prefill      300 tok/s" in printed
    assert all(len(line) <= 80 for line in printed.splitlines())


def test_colour_is_off_with_no_color_and_the_letters_stay(working_server, capsys, monkeypatch):
    arguments = ["--url", working_server.url, "--once", "--interval", "0.05"]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert main(arguments) == 0
    assert COLOUR.search(capsys.readouterr().out)
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert not COLOUR.search(printed)
    assert {"█", "▒", "·"} <= set(printed)


def test_once_of_an_engine_that_starts_does_not_wait(story, tiny_server, capsys):
    tiny_server.answers[STATE_PATH] = (200, story.state(None, phase="load", detail="shard 3 of 10"))
    tiny_server.answers["/ready"] = (503, {})
    assert main(["--url", tiny_server.url, "--once", "--interval", "3600"]) == 0
    printed = capsys.readouterr().out
    assert "load: shard 3 of 10" in printed
    assert "ready NO (503)" in printed


def test_once_without_a_server_names_the_url_and_the_remedy(capsys):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
    for extra in ([], ["--json"]):
        assert main(["--url", url, "--once", *extra]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert url in captured.err
        assert "`make run`" in captured.err
        assert captured.err.count("\n") == 1


def test_record_then_replay_shows_the_same(working_server, capsys, tmp_path):
    recording = tmp_path / "recording.jsonl"
    live = ["--url", working_server.url, "--once", "--json", "--interval", "0.05", "--record", str(recording)]
    assert main(live) == 0
    recorded = json.loads(capsys.readouterr().out)
    assert len(recording.read_text().splitlines()) == 2
    working_server.answers.clear()
    assert main(["--replay", str(recording), "--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == recorded
    assert main(["--replay", str(recording), "--once"]) == 0
    assert "REPLAY ENDED" in capsys.readouterr().out


def test_a_recording_also_holds_failures(capsys, tmp_path):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
    recording = tmp_path / "recording.jsonl"
    assert main(["--url", url, "--once", "--record", str(recording)]) == 1
    (observation,) = read_recording(recording)
    assert observation.state is None
    assert url in observation.error
    capsys.readouterr()
    assert main(["--replay", str(recording), "--once"]) == 0
    assert "no server answers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty: record one with --record"),
        (b'{"version": 1, "time": 1.0, "url": "u"}\nnonsense\n', "line 2 of the recording"),
        (b'{"version": 99, "time": 1.0, "url": "u"}\n', "is of version 99, this dashboard reads version 1"),
    ],
)
def test_a_recording_that_cannot_be_read_is_named(capsys, tmp_path, content, words):
    recording = tmp_path / "recording.jsonl"
    recording.write_bytes(content)
    assert main(["--replay", str(recording), "--once"]) == 2
    message = capsys.readouterr().err
    assert words in message
    assert str(recording) in message


def test_files_that_are_not_there_are_named(capsys, tmp_path):
    missing = tmp_path / "missing"
    assert main(["--replay", str(missing), "--once"]) == 2
    assert f"the recording {missing} cannot be read: No such file or directory" in capsys.readouterr().err
    assert main(["--record", str(missing / "file"), "--once"]) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err
    assert main(["--api-key-file", str(missing), "--once"]) == 2
    assert f"the API key file {missing} cannot be read" in capsys.readouterr().err


def test_a_full_disk_is_named(story, working_server, capsys):
    assert main(["--url", working_server.url, "--record", "/dev/full", "--once"]) == 2
    assert "the recording /dev/full cannot be written: No space left on device" in capsys.readouterr().err


def test_a_key_file_without_a_key_is_named(capsys, tmp_path):
    key = tmp_path / "key"
    key.write_text("# none\n")
    assert main(["--once", "--api-key-file", str(key)]) == 2
    assert f"the API key file {key} holds no key" in capsys.readouterr().err


def test_the_key_comes_from_a_file(story, tiny_server, capsys, tmp_path):
    key = tmp_path / "key"
    key.write_text("# of the server\n\nsecret\nanother\n")
    tiny_server.answers[STATE_PATH] = (200, story.state(None))
    assert main(["--url", tiny_server.url, "--once", "--api-key-file", str(key)]) == 0
    assert (STATE_PATH, "Bearer secret") in tiny_server.asked


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--json"], "--json belongs to --once"),
        (["--record", "a", "--replay", "b"], "exclude each other"),
        (["--interval", "0"], "outside 0.05 to 3600 s"),
        (["--interval", "soon"], "is no number of seconds"),
        (["--allow-admin"], "--allow-admin needs --admin-url: start the server with --admin-port N"),
        (["--allow-admin", "--admin-url", "http://x", "--once"], "--allow-admin belongs to the live screen"),
        (["--admin-url", "http://x"], "--admin-url changes nothing without --allow-admin"),
        (["--theme", "pink"], "invalid choice: 'pink'"),
    ],
)
def test_wrong_options_end_in_2(capsys, arguments, words):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_a_wrong_url_ends_in_2(capsys):
    assert main(["--once", "--url", "ftp://host"]) == 2
    assert "names no HTTP server" in capsys.readouterr().err


def test_the_live_screen_needs_a_terminal(working_server, capsys):
    assert main(["--url", working_server.url]) == 2
    assert "needs a terminal; use --once" in capsys.readouterr().err
