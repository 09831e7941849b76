"""``tokenspeed explain``: one request, of a server or from a journal, and what is said where there is none."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from command_line import Command

from tokenspeed.launch.demo import Demo, demo_world
from tokenspeed.launch.scheduling import compose_scheduler
from tokenspeed.messages.snapshot import RequestDetail, TimelineEntry
from tokenspeed.recipes.resolved import SchedulerSettings

DETAIL = RequestDetail(
    handle=17,
    request_id="chatcmpl-0000002a",
    state="Retracted",
    age_rounds=31,
    age_s=1.25,
    priority=2,
    prompt_tokens=3_063,
    computed_tokens=3_100,
    generated_tokens=187,
    cached_tokens=1_536,
    blocks=0,
    host_blocks=51,
    retractions=1,
    output_limit=2_048,
    arrived=1_000.0,
    time=1_004.5,
    timeline=[
        TimelineEntry(state="Submitted", time=1_000.0, round=400),
        TimelineEntry(state="Prefilling", time=1_000.5, round=412),
        TimelineEntry(state="Retracted", time=1_003.25, round=473),
    ],
    explain=["needs 39 blocks of group full: 4 are free, 12 can be evicted", "\x1b[2Jit gave way"],
)


class PaperServer:
    """Answers GET with what ``answers`` has by path, with its status; 404 for others."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {}
        self.keys: list[str] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.keys.append(self.headers.get("Authorization", ""))
                status, body = server.answers.get(self.path, (404, {"error": {"message": "no such request"}}))
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments: object) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def tells(self, *details: RequestDetail) -> None:
        rows = [msgspec.to_builtins(detail) for detail in details]
        self.answers["/v1/internal/state"] = (200, {"snapshot": {"requests": rows}})
        for row in rows:
            self.answers[f"/v1/internal/requests/{row['request_id'].replace('/', '%2F')}"] = (200, row)


@pytest.fixture
def server() -> Iterator[PaperServer]:
    paper = PaperServer()
    thread = threading.Thread(target=paper.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield paper
    paper.http.shutdown()
    thread.join()
    paper.http.server_close()


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("demo") / "engine.journal"
    Demo(0, 0.0, compose_scheduler(SchedulerSettings(journal=str(path)), demo_world())).advance(18.0)
    return str(path)


def test_a_live_request_is_told_as_text(server: PaperServer, tokenspeed: Command) -> None:
    server.tells(DETAIL)
    told = tokenspeed("explain", "chatcmpl-0000002a", "--url", server.url)
    assert (told.code, told.err) == (0, "")
    assert told.out.splitlines() == [
        "chatcmpl-0000002a (handle 17): Retracted for 1.2 s (31 rounds)",
        "  prompt 3,063 tokens, 1,536 of them cached; output 187 of at most 2,048; priority 2",
        "  0 blocks on the device, 51 on the host; retracted 1 time",
        "why",
        "  needs 39 blocks of group full: 4 are free, 12 can be evicted",
        "  ?[2Jit gave way",
        "timeline",
        "      +0.000 s  round      400  Submitted",
        "      +0.500 s  round      412  Prefilling",
        "      +3.250 s  round      473  Retracted",
    ]


def test_json_is_what_the_server_said(server: PaperServer, tokenspeed: Command, tmp_path: Path) -> None:
    server.tells(DETAIL)
    (tmp_path / "key").write_text("ring-the-bell-0123456789\n")
    (tmp_path / "key").chmod(0o600)
    told = tokenspeed(
        "explain", "chatcmpl-0000002a", "--url", server.url, "--json", "--api-key-file", str(tmp_path / "key")
    )
    assert msgspec.json.decode(told.out, type=RequestDetail) == DETAIL
    assert server.keys == ["Bearer ring-the-bell-0123456789"]


def test_the_end_of_an_id_will_do_where_it_is_ones_alone(server: PaperServer, tokenspeed: Command) -> None:
    other = msgspec.structs.replace(DETAIL, handle=18, request_id="chatcmpl-0000003a")
    choice = msgspec.structs.replace(DETAIL, handle=19, request_id="chatcmpl-0000009b/1")
    server.tells(DETAIL, other, choice)
    assert tokenspeed("explain", "…002a", "--url", server.url).out.startswith("chatcmpl-0000002a ")
    assert tokenspeed("explain", "9b/1", "--url", server.url).out.startswith("chatcmpl-0000009b/1 ")
    told = tokenspeed("explain", "a", "--url", server.url)
    assert (told.code, told.out) == (2, "")


def test_a_wrong_id_is_one_line_with_near_ones(server: PaperServer, tokenspeed: Command) -> None:
    server.tells(
        *(msgspec.structs.replace(DETAIL, request_id=f"chatcmpl-0000{number}") for number in range(1000, 1012))
    )
    told = tokenspeed("explain", "chatcmpl-00001O03", "--url", server.url)
    assert (told.code, told.out) == (2, "")
    (line,) = told.err.splitlines()
    assert line.startswith(f"tokenspeed: {server.url}: no request 'chatcmpl-00001O03' (there are chatcmpl-00001003,")
    assert line.endswith(" and 7 more)")
    server.tells()
    assert "none is alive" in tokenspeed("explain", "x", "--url", server.url).err


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"/v1/internal/requests/x": (401, {})}, "status 401: it wants a key, give --api-key-file"),
        ({"/v1/internal/requests/x": (500, {"error": "broken"})}, "status 500"),
        ({"/v1/internal/requests/x": (200, [1])}, "is the server of another version?"),
        ({"/v1/internal/state": (200, ["other"])}, "is it a TokenSpeed server?"),
    ],
)
def test_what_else_can_be_wrong_is_said(
    server: PaperServer, tokenspeed: Command, answers: dict[str, tuple[int, Any]], words: str
) -> None:
    server.answers |= answers
    told = tokenspeed("explain", "x", "--url", server.url)
    assert (told.code, told.out) == (2, "")
    assert words in told.err
    assert told.err.count("\n") == 1


def test_no_server_is_one_line(tokenspeed: Command) -> None:
    told = tokenspeed("explain", "x", "--url", "http://127.0.0.1:1")
    assert told.code == 2
    assert "no server answers" in told.err
    assert "no server of yours runs" in tokenspeed("explain", "x").err


def test_an_ended_one_says_how_and_when(server: PaperServer, tokenspeed: Command) -> None:
    ended = msgspec.structs.replace(
        DETAIL, state="Finished", ended=1_004.0, finish_reason="abort", error="the client left", explain=[], handle=3
    )
    server.tells(ended)
    out = tokenspeed("explain", ended.request_id, "--url", server.url).out
    assert re.match(
        r"chatcmpl-0000002a \(handle 3\): ended 0\.5 s ago, at \d\d:\d\d:\d\d: abort: the client left\n", out
    )
    assert "why" not in out


def test_a_journal_tells_the_same_by_handle(journal: str, tokenspeed: Command) -> None:
    told = tokenspeed("explain", "3", "--journal", journal)
    assert told.code == 0
    lines = told.out.splitlines()
    assert re.match(r"request 3: ended in round \d+: finished", lines[0])
    assert [line.split()[-1] for line in lines[lines.index("timeline") + 1 :]][-1] == "Finished"
    before = tokenspeed("explain", "3", "--journal", journal, "--round", "25", "--json")
    detail = msgspec.json.decode(before.out, type=RequestDetail)
    assert (detail.handle, detail.ended) == (3, None)
    assert detail.timeline[-1].round <= 25
    assert "for " in tokenspeed("explain", "3", "--journal", journal, "--round", "25").out.splitlines()[0]


def test_a_journal_without_it_says_so(journal: str, tokenspeed: Command, tmp_path: Path) -> None:
    assert (
        "was not taken up to round 1: ask for a later --round"
        in tokenspeed("explain", "40", "--journal", journal, "--round", "1").err
    )
    assert re.search(
        r"no request '4711' was taken \(there are .* more\)", tokenspeed("explain", "4711", "--journal", journal).err
    )
    assert "no request 'agent' was taken" in tokenspeed("explain", "agent", "--journal", journal).err
    (tmp_path / "no").write_text("nothing")
    assert "is no journal" in tokenspeed("explain", "1", "--journal", str(tmp_path / "no")).err


def test_options_of_the_other_kind_are_refused(journal: str, tokenspeed: Command) -> None:
    assert "--round belongs to --journal" in tokenspeed("explain", "1", "--round", "3").err
    assert "leave --url and --port out" in tokenspeed("explain", "1", "--journal", journal, "--port", "8000").err
