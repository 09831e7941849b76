"""HTTP/1.1 for a load generator: answers are read as they arrive, at a fraction of a general client's cost a chunk.

A client that takes a tenth of a millisecond a token is itself the limit at a few thousand tokens a second. Here the
event loop hands the bytes of a chunk straight to whoever notes the time; no task is woken in between.
"""

import asyncio
import os
import ssl
from collections.abc import Callable
from urllib.parse import urlsplit

_CONNECT_S = 10.0
_HEAD_LIMIT = 1 << 16


class WireError(RuntimeError):
    """A connection or a message that came to nothing; ``kind`` is short enough to count by."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind


class MessageReader:
    """Reads one answer out of the bytes of a connection, whatever way they are cut. No input or output of its own.

    Attributes:
        status: of the answer, 0 until its head is whole.
        headers: by name in lower case.
        complete: the whole body was seen.
        keeps_open: the connection serves another request afterwards.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        self.keeps_open = False
        self._buffer = bytearray()
        self._left: int | None = 0
        """Bytes still to come of the body or the chunk; None: until the connection ends."""
        self._chunked = False
        self._in_trailer = False

    def feed(self, data: bytes) -> bytes:
        """Returns the bytes of the body among ``data``; raises WireError where it is no HTTP."""
        self._buffer += data
        if not self.status and not self._read_head():
            return b""
        return self._read_chunks() if self._chunked else self._read_plain()

    def end(self) -> None:
        """The connection ended; raises WireError where the message had not."""
        if self.status and not self._chunked and self._left is None:
            self.complete = True
        if not self.complete:
            raise WireError("connection lost", "the server closed it in the middle of an answer")

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _HEAD_LIMIT:
                raise WireError("no HTTP", "the head of the answer does not end")
            return False
        first, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise WireError("no HTTP", f"the answer begins with {first[:40]!r}")
        if rest[0] == "1":  # 100 Continue and the like: the answer itself follows
            return self._read_head()
        self.status = int(rest[:3])
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        self._begin_body(version)
        return True

    def _begin_body(self, version: str) -> None:
        self.keeps_open = version != "HTTP/1.0" and self.headers.get("connection", "").lower() != "close"
        self._chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        if self._chunked:
            return
        length = self.headers.get("content-length")
        self._left = int(length) if length and length.isdigit() else None
        self.keeps_open = self.keeps_open and self._left is not None
        self.complete = self._left == 0

    def _read_plain(self) -> bytes:
        body = bytes(self._buffer if self._left is None else self._buffer[: self._left])
        self._buffer.clear()
        if self._left is not None:
            self._left -= len(body)
            self.complete = self._left == 0
        return body

    def _read_chunks(self) -> bytes:
        body = b""
        while not self.complete:
            if self._left:
                part = bytes(self._buffer[: self._left])
                del self._buffer[: len(part)]
                self._left -= len(part)
                body += part
                if self._left:
                    break
            line = self._line()
            if line is None:
                break
            if self._in_trailer:
                self.complete = not line
            elif line:  # an empty one ends the chunk before
                try:
                    self._left = int(line.partition(b";")[0], 16)
                except ValueError:
                    raise WireError("no HTTP", f"a chunk of size {line[:40]!r}") from None
                self._in_trailer = self._left == 0
        return body

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line


Sink = Callable[[MessageReader, bytes], None]
"""Takes the bytes of a body as they arrive, with the head they came under."""


class _Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.usable = True
        self.reader = MessageReader()
        self._sink: Sink | None = None
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    async def ask(self, message: bytes, sink: Sink) -> MessageReader:
        """Sends, and returns once the answer is whole; raises WireError."""
        assert self.transport is not None
        self.reader, self._sink = MessageReader(), sink
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(message)
        try:
            await self._done
        except BaseException:
            self.close()
            raise
        finally:
            self._done = None
        self.usable = self.usable and self.reader.keeps_open
        return self.reader

    def close(self) -> None:
        self.usable = False
        if self.transport is not None:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done() or self._sink is None:
            self.close()  # nobody asked
            return
        try:
            body = self.reader.feed(data)
            if body:
                self._sink(self.reader, body)
            if self.reader.complete:
                self._done.set_result(None)
        except Exception as error:
            self._done.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.usable = False
        if self._done is None or self._done.done():
            return
        try:
            self.reader.end()
            self._done.set_result(None)
        except WireError as error:
            self._done.set_exception(error)


class Wire:
    """Connections to one server, kept open between requests as clients do."""

    def __init__(self, url: str, api_key: str = "") -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise WireError("no URL", f"{url} is no http:// or https:// address")
        if parts.username is not None:
            raise WireError("no URL", "an address with a user in it; a key is given with --api-key-file")
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (80 if self._tls is None else 443)
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"{parts.scheme}://{host}:{self._port}{self._base}"
        key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._headers = f"host: {host}:{self._port}\r\naccept: */*\r\nuser-agent: tokenspeed-bench\r\n{key}"
        self._idle: list[_Connection] = []

    async def ask(self, method: str, path: str, body: bytes, sink: Sink) -> int:
        """Sends a request and returns the status of the whole answer, whose body went to ``sink``. Raises WireError.

        A connection that was kept open and that the server closed meanwhile is replaced once, by a new one.
        """
        head = f"{method} {self._base}{path} HTTP/1.1\r\n{self._headers}"
        if body:
            head += "content-type: application/json\r\n"
        message = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        while self._idle:
            connection = self._idle.pop()
            if not connection.usable:
                continue
            try:
                return await self._on(connection, message, sink)
            except WireError:
                if connection.reader.status:
                    raise
        return await self._on(await self._connect(), message, sink)

    async def fetch(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Status and body of an answer that is not streamed; raises WireError."""
        parts: list[bytes] = []
        status = await self.ask(method, path, body, lambda _, data: parts.append(data))
        return status, b"".join(parts)

    def close(self) -> None:
        """Ends the connections that are not in use."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _on(self, connection: _Connection, message: bytes, sink: Sink) -> int:
        reader = await connection.ask(message, sink)
        if connection.usable:
            self._idle.append(connection)
        else:
            connection.close()
        return reader.status

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        except TimeoutError:
            raise WireError("no connection", f"no answer within {_CONNECT_S:.0f} s") from None
        except ssl.SSLError as error:  # an OSError whose number means something else
            raise WireError("no connection", str(error)) from None
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error)
            raise WireError("no connection", reason) from None
        return connection
