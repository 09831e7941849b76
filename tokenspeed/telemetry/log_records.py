"""One log record as data, and the three forms it is written in: for a person, for a machine, for the parent process."""

import re
from datetime import UTC, datetime

import msgspec

LONGEST_MESSAGE = 8 << 10
LONGEST_EXCEPTION = 32 << 10
"""Characters of a message and of a traceback; the middle of what is longer is left out."""

RECORD = b"\x1e"
"""Goes before an entry on the wire, as in RFC 7464: a line without it is something a library printed."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Entry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One record as JSON: what ``--log-format json`` writes, and what an engine's records are on their way.

    ``time`` is RFC 3339 in UTC; ``dropped`` counts the records that are missing before this one.
    """

    time: str
    level: str
    process: str
    logger: str
    message: str
    request_id: str = ""
    exception: str = ""
    dropped: int = 0


def rfc3339(seconds: float) -> str:
    """A moment in UTC with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def as_json(entry: Entry) -> bytes:
    return msgspec.json.encode(entry) + b"\n"


def as_wire(entry: Entry) -> bytes:
    """The form in which a Relay takes the records of a child process."""
    return RECORD + as_json(entry)


def as_text(entry: Entry) -> bytes:
    """For a person: one line, in local time; what a message or a traceback has more is indented."""
    moment = datetime.fromisoformat(entry.time).astimezone()
    ours = f" [{entry.request_id}]" if entry.request_id else ""
    more = f"\n{entry.exception}" if entry.exception else ""
    body = f"{entry.message}{ours}{more}".replace("\n", "\n  ")
    stamp = moment.strftime("%Y-%m-%d %H:%M:%S") + f".{moment.microsecond // 1000:03d}"
    return f"{stamp} {entry.process} {entry.level.upper()} {body}\n".encode()


def visible(text: str, longest: int) -> str:
    """Text that cannot play tricks on a terminal, break the encoding or fill a disk."""
    if len(text) > longest:
        left_out = len(text) - longest
        text = f"{text[: longest // 2]} ... ({left_out} characters left out) ... {text[-longest // 2 :]}"
    if not text.isascii():  # a lone surrogate cannot be written anywhere
        text = text.encode("utf-8", "backslashreplace").decode()
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
