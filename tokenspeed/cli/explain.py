"""``explain``: what one request waits for or holds, and every state it was in; of a server, or from a journal."""

import difflib
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from tokenspeed.cli.benchmark import read_key, url_of
from tokenspeed.cli.output import say
from tokenspeed.cli.records import ServerError
from tokenspeed.messages.snapshot import RequestDetail
from tokenspeed.telemetry.journal import JournalError

_STATE = "/v1/internal/state"
_REQUESTS = "/v1/internal/requests/"
_ANSWER_S = 10.0
_NEAR = 5
"""So many ids are named where the one that was asked for does not exist."""


def explain_request(
    request: str,
    *,
    url: str | None,
    port: int | None,
    key_file: str | None,
    journal: Path | None,
    at: int | None,
    as_json: bool,
) -> int:
    """Prints what is known of a request; returns the exit code. Raises ServerError or JournalError."""
    if journal is None:
        if at is not None:
            raise ServerError("--round belongs to --journal: a server tells of the present only")
        detail = live_detail(request, url or url_of(None, port), read_key(key_file))
    else:
        if url is not None or port is not None:
            raise ServerError("--journal reads a file: leave --url and --port out")
        detail = journal_detail(request, journal, at)
    if as_json:
        say(msgspec.json.format(msgspec.json.encode(detail), indent=2).decode())
    else:
        say(*detail_lines(detail, in_rounds=journal is not None))
    return 0


def live_detail(request: str, url: str, key: str) -> RequestDetail:
    """Asks a server. The end of an id that a screen cut off will do, where only one live request has it.

    Raises ServerError where no server answers, or none such; the message names those that are near.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=_ANSWER_S, trust_env=False) as client:
        answer = _get(client, _REQUESTS + quote(request, safe=""))
        if answer.status_code == 404:
            live = _live_ids(client)
            ending = [name for name in live if name.endswith(request.lstrip("…"))]
            if len(ending) != 1:
                raise ServerError(f"{url}: no request {request!r} {_near(request, live)}")
            answer = _get(client, _REQUESTS + quote(ending[0], safe=""))
        _check(answer)
    try:
        return msgspec.json.decode(answer.content, type=RequestDetail)
    except msgspec.MsgspecError as error:
        raise ServerError(f"{url}: the answer cannot be read ({error}); is the server of another version?") from error


def journal_detail(request: str, journal: Path, at: int | None) -> RequestDetail:
    """Plans the journal again, up to round ``at`` or to its end, and watches one request, by its handle.

    Raises JournalError where the file cannot be read or has no such request.
    """
    if find_spec("tokenspeed_scheduler") is None:
        raise JournalError("a journal is planned again by the package tokenspeed-appliance-scheduler: install it")
    from tokenspeed.launch.history import JournalHistory

    history = JournalHistory(journal)
    detail = history.detail(int(request), at) if request.isdecimal() else None
    if detail is None:
        handles = [str(handle) for handle in history.handles()]
        if at and request in handles:
            raise JournalError(f"{journal}: request {request} was not taken up to round {at}: ask for a later --round")
        by = f" up to round {at}" if at else ""
        raise JournalError(f"{journal}: no request {request!r} was taken{by} {_near(request, handles)}")
    return detail


def _get(client: httpx.Client, path: str) -> httpx.Response:
    try:
        return client.get(path)
    except httpx.HTTPError as error:
        raise ServerError(f"{client.base_url}: no server answers ({error}); tokenspeed status shows yours") from error


def _check(answer: httpx.Response) -> None:
    if answer.status_code in (401, 403):
        raise ServerError(f"{answer.url}: status {answer.status_code}: it wants a key, give --api-key-file")
    if answer.status_code != 200:
        raise ServerError(f"{answer.url}: status {answer.status_code}: {answer.text[:300]}")


def _live_ids(client: httpx.Client) -> list[str]:
    answer = _get(client, _STATE)
    _check(answer)
    try:
        snapshot: Any = answer.json().get("snapshot") or {}
        return [str(row["request_id"] or row["handle"]) for row in snapshot.get("requests", [])]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ServerError(f"{answer.url}: is it a TokenSpeed server? Its state cannot be read") from None


def _near(request: str, known: Sequence[str]) -> str:
    """What there is instead, in words."""
    if not known:
        return "(nor any other: none is alive)"
    near = difflib.get_close_matches(request, known, n=_NEAR, cutoff=0.3) or list(known[:_NEAR])
    more = f" and {len(known) - len(near)} more" if len(known) > len(near) else ""
    return f"(there are {', '.join(printable(name) for name in near)}{more})"


def detail_lines(detail: RequestDetail, *, in_rounds: bool) -> Iterator[str]:
    """The answer for a person. ``in_rounds``: it comes from a journal, which knows no time but rounds."""
    named = detail.request_id not in ("", str(detail.handle))
    name = f"{printable(detail.request_id)} (handle {detail.handle})" if named else f"request {detail.handle}"
    yield f"{name}: {_standing(detail, in_rounds)}"
    yield (
        f"  prompt {detail.prompt_tokens:,} tokens, {detail.cached_tokens:,} of them cached; output "
        f"{detail.generated_tokens:,} of at most {detail.output_limit:,}; priority {detail.priority}"
    )
    yield (
        f"  {_counted(detail.blocks, 'block')} on the device, {detail.host_blocks} on the host; "
        f"retracted {_counted(detail.retractions, 'time')}"
    )
    if detail.deadline is not None and detail.ended is None:
        yield f"  the server ends it in {max(0.0, detail.deadline - detail.time):.1f} s"
    if detail.explain:
        yield "why"
        yield from (f"  {printable(line)}" for line in detail.explain)
    yield "timeline"
    if detail.timeline_omitted:
        yield f"  {detail.timeline_omitted} earlier states are left out"
    begin = detail.arrived or (detail.timeline[0].time if detail.timeline else 0.0)
    for entry in detail.timeline:
        when = f"round {entry.round:>8,}" if in_rounds else f"{entry.time - begin:>+10.3f} s  round {entry.round:>8,}"
        yield f"  {when}  {printable(entry.state)}"


def _standing(detail: RequestDetail, in_rounds: bool) -> str:
    if detail.ended is None:
        since = _counted(detail.age_rounds, "round")
        return f"{detail.state} for {since}" if in_rounds else f"{detail.state} for {detail.age_s:.1f} s ({since})"
    how = detail.finish_reason or "ended"
    if detail.error:
        how += f": {printable(detail.error)}"
    if in_rounds:
        return f"ended in round {detail.ended:,.0f}: {how}"
    ago = max(0.0, detail.time - detail.ended)
    return f"ended {ago:.1f} s ago, at {time.strftime('%H:%M:%S', time.localtime(detail.ended))}: {how}"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """Text from elsewhere (a client chooses its request's id) without anything that a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
