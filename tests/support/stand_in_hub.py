"""A hub of models on a loopback port, for tests: addresses, headers and checksums of the real one, faults on demand.

It keeps a log of what was asked, so that a test can tell which bytes travelled.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = 256
"""Files of this size or more are stored as large files: listed with their sha256, served from another address."""


def git_checksum(content: bytes) -> str:
    """The name git gives a content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@dataclass
class Fault:
    """What goes wrong with one answer.

    Attributes:
        status: answer with this, and with ``headers``.
        cut: end the connection after so many bytes of content.
        hold: stop after so many bytes until ``StandInHub.release``.
        corrupt: change the last byte.
        whole: ignore the range that was asked for.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    hold: int | None = None
    corrupt: bool = False
    whole: bool = False


@dataclass
class Asked:
    """One request: the file's path ("" for the list), the range's begin, the token, and how many bytes were sent."""

    path: str
    start: int
    token: str
    status: int = 0
    sent: int = 0


@dataclass
class Repository:
    """Files at a commit; ``revisions`` are the names it goes by, ``token`` opens it where it is gated."""

    commit: str
    files: dict[str, bytes]
    revisions: set[str] = field(default_factory=lambda: {"main"})
    token: str = ""


class StandInHub:
    """The server's state, which tests set and read. ``faults[path]`` are used up one an answer."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.faults: dict[str, list[Fault]] = {}
        self.log: list[Asked] = []
        self.address = ""
        self.holding = threading.Event()
        self._released = threading.Event()

    def add(self, name: str, files: dict[str, bytes], commit: str = "c" * 40, token: str = "") -> Repository:
        """Publishes a repository, in place of what had its name."""
        self.repositories[name] = Repository(commit, files, token=token)
        return self.repositories[name]

    def fail(self, path: str, *faults: Fault) -> None:
        """Lets the next answers about ``path`` fail ("" is the list of files)."""
        self.faults.setdefault(path, []).extend(faults)

    def fault(self, path: str) -> Fault:
        """The next fault of a path; a Fault without effect where there is none left."""
        waiting = self.faults.get(path)
        return waiting.pop(0) if waiting else Fault()

    def downloads(self, path: str) -> list[Asked]:
        """The downloads of a file so far, in order."""
        return [asked for asked in self.log if asked.path == path]

    def hold(self) -> None:
        """Called in the server's thread: says so, and waits to be released."""
        self.holding.set()
        self._released.wait()

    def release(self) -> None:
        """Lets every held answer go on."""
        self._released.set()


@contextmanager
def stand_in_hub() -> Iterator[StandInHub]:
    """Runs a hub until the end of the block."""
    hub = StandInHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.release()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: StandInHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        """Tests have no use for lines on standard error."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).lstrip("/")
        if path.startswith("api/models/"):
            name, _, revision = path.removeprefix("api/models/").partition("/revision/")
            self._list(name, revision or "main")
        elif path.startswith("content/"):
            name, _, file = path.removeprefix("content/").partition("/-/")
            self._send_file(self.hub.repositories[name], file)
        else:
            name, _, rest = path.partition("/resolve/")
            revision, _, file = rest.partition("/")
            self._resolve(name, revision, file)

    def _list(self, name: str, revision: str) -> None:
        asked = self._note("")
        fault = self.hub.fault("")
        repository = self.hub.repositories.get(name)
        if fault.status:
            self._refuse(asked, fault.status, **fault.headers)
        elif repository is None:
            # The hub does not tell strangers whether a repository exists.
            self._refuse(asked, 404 if asked.token else 401, **{"X-Error-Code": "RepoNotFound"})
        elif revision not in {repository.commit, *repository.revisions}:
            self._refuse(asked, 404, **{"X-Error-Code": "RevisionNotFound"})
        else:
            body = listing(name, repository)
            self._head(asked, 200, len(body), {"Content-Type": "application/json"})
            self.wfile.write(body)

    def _resolve(self, name: str, revision: str, path: str) -> None:
        repository = self.hub.repositories[name]
        content = repository.files.get(path)
        if repository.token and self._token() != repository.token:
            asked = self._note(path)
            self._refuse(asked, 403 if asked.token else 401, **{"X-Error-Code": "GatedRepo"})
        elif content is None or revision != repository.commit:
            self._refuse(self._note(path), 404, **{"X-Error-Code": "EntryNotFound"})
        elif len(content) >= LARGE:
            headers = {
                "Location": f"{self.hub.address}/content/{name}/-/{path}",
                "X-Repo-Commit": repository.commit,
                "X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"',
                "X-Linked-Size": str(len(content)),
            }
            self._head(None, 302, 0, headers)
        else:
            self._send_file(repository, path)

    def _send_file(self, repository: Repository, path: str) -> None:
        content = repository.files[path]
        asked = self._note(path)
        fault = self.hub.fault(path) if self.command == "GET" else Fault()
        if fault.status:
            self._refuse(asked, fault.status, **fault.headers)
            return
        if fault.corrupt:
            content = content[:-1] + bytes([content[-1] ^ 1])
        start = 0 if fault.whole else asked.start
        headers = {"X-Repo-Commit": repository.commit, "ETag": f'"{git_checksum(content)}"', "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        rest = content[start:]
        self._head(asked, 206 if start else 200, len(rest), headers)
        if self.command == "GET":
            self._send_body(asked, rest, fault)

    def _send_body(self, asked: Asked, rest: bytes, fault: Fault) -> None:
        stop = min(value for value in (fault.cut, fault.hold, len(rest)) if value is not None)
        try:
            self.wfile.write(rest[:stop])
            self.wfile.flush()
            asked.sent += stop
            if fault.hold is not None:
                self.hub.hold()
                self.wfile.write(rest[stop:])
                asked.sent += len(rest) - stop
        except OSError:
            self.close_connection = True  # the client is gone
        if fault.cut is not None:
            self.close_connection = True

    def _refuse(self, asked: Asked, status: int, **headers: str) -> None:
        self._head(asked, status, 0, headers)

    def _head(self, asked: Asked | None, status: int, length: int, headers: dict[str, str]) -> None:
        if asked is not None:
            asked.status = status
        self.send_response(status, HTTPStatus(status).phrase)
        self.send_header("Content-Length", str(length))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _note(self, path: str) -> Asked:
        start = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0]
        asked = Asked(path, int(start), self._token())
        if self.command == "GET":
            self.hub.log.append(asked)
        return asked


def listing(name: str, repository: Repository) -> bytes:
    """What the hub answers about a repository."""
    siblings = [_listed(path, content) for path, content in repository.files.items()]
    return json.dumps({"id": name, "modelId": name, "sha": repository.commit, "siblings": siblings}).encode()


def _listed(path: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": git_checksum(content)}
    if len(content) >= LARGE:
        entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry
