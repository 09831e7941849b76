"""Talking to the hub, by huggingface_hub's client: where it is, who asks, what a repository holds, what went wrong.

huggingface_hub is imported when the hub is asked, never to look for weights that are here: the import takes longer than
a command may.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote, urlsplit

from pydantic import BaseModel, Field, ValidationError

from tokenspeed.recipes.weights.manifest import HubFile, Manifest
from tokenspeed.recipes.weights.places import FetchError, hub_home

SECRET_FILE = Path("/run/secrets/hf_token")
_DEFAULT_ENDPOINT = "https://huggingface.co"
_TRUE = {"1", "ON", "YES", "TRUE"}
_SLOW_DOWN, _NOT_FOUND = 429, 404
_TRANSIENT = {408, _SLOW_DOWN, 500, 502, 503, 504}
_LONGEST_WAIT_S = 300.0


class HubFailure(Exception):
    """A request that failed.

    Attributes:
        status: of the answer, 0 where none came.
        code: what the hub calls it ("GatedRepo", "RevisionNotFound"), "" where it says nothing.
        reason: one line for a person.
        transient: whether asking again may help.
        wait_s: how long the hub asks to wait before that, 0 where it says nothing.
    """

    def __init__(self, reason: str, *, status: int = 0, code: str = "", transient: bool, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.reason, self.status, self.code = reason, status, code
        self.transient, self.wait_s = transient, wait_s


@dataclass(frozen=True)
class Token:
    """A secret and where it came from; its value is in no repr. Empty: none was found."""

    value: str = field(default="", repr=False)
    origin: str = ""


def offline() -> bool:
    """Whether the operator forbids asking the hub."""
    return (os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or "").upper() in _TRUE


def endpoint() -> str:
    """The hub or its mirror, without a slash at the end; raises FetchError where it is no address."""
    address = os.environ.get("HF_ENDPOINT", _DEFAULT_ENDPOINT).rstrip("/")
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise FetchError(f"HF_ENDPOINT is {address!r}, which is no address; write https://host (or unset it)")
    return address


def find_token(file: Path | None = None) -> Token:
    """The operator's token: ``file``, else HF_TOKEN, the file HF_TOKEN_PATH, the container's secret, the login's file.

    Raises FetchError for a file that cannot be read or holds no token. No message shows the token.
    """
    if file is not None:
        if not file.is_file():
            raise FetchError(f"{file}: there is no such token file; see --token-file")
        return _read_token(file)
    from_environment = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
    if from_environment and from_environment.strip():
        return Token(_one_line(from_environment, "HF_TOKEN"), "HF_TOKEN")
    named = os.environ.get("HF_TOKEN_PATH")
    for path in [*([Path(named).expanduser()] if named else []), SECRET_FILE, hub_home() / "token"]:
        if path.is_file():
            return _read_token(path)
    return Token()


def _read_token(path: Path) -> Token:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise FetchError(f"{path}: the token file cannot be read ({reason}); chmod or chown it for this user") from None
    return Token(_one_line(text, str(path)), str(path))


def _one_line(text: str, origin: str) -> str:
    token = text.strip()
    if not token or not token.isascii() or any(character.isspace() for character in token):
        raise FetchError(f"{origin}: expected a token on one line and nothing else")
    return token


class Hub:
    """The hub at ``endpoint()``, asked with a token."""

    def __init__(self, token: Token) -> None:
        self.address = endpoint()
        self.token = token
        self.headers = {"User-Agent": "tokenspeed"}
        if token.value:
            self.headers["Authorization"] = f"Bearer {token.value}"

    @property
    def shown(self) -> str:
        """The address without a name and password in it."""
        parts = urlsplit(self.address)
        host = parts.hostname or ""
        port = f":{parts.port}" if parts.port else ""
        return f"{parts.scheme}://{host}{port}{parts.path}"

    def file_address(self, repository: str, commit: str, path: str) -> str:
        """Where a file is downloaded."""
        return f"{self.address}/{repository}/resolve/{commit}/{quote(path)}"

    def list_files(self, repository: str, revision: str) -> Manifest:
        """All files of a repository at the commit that ``revision`` is now. Raises HubFailure, or FetchError.

        One request. The library's own call would ask for more: what to write into its User-Agent.
        """
        from huggingface_hub import constants, get_session, hf_raise_for_status

        address = f"{self.address}/api/models/{repository}/revision/{quote(revision, safe='')}"
        with failures():
            answer = get_session().get(
                address, params={"blobs": "true"}, headers=self.headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
            )
            hf_raise_for_status(answer)
        try:
            listed = _Listing.model_validate_json(answer.content)
            return Manifest(
                repository=repository, commit=listed.sha, files=tuple(file.plain() for file in listed.siblings)
            )
        except ValidationError as error:
            first = error.errors()[0]
            raise FetchError(
                f"{self.shown} lists the files of {repository} without usable names, sizes and checksums "
                f"({'.'.join(str(part) for part in first['loc'])}: {first['msg']}), so nothing could be verified; "
                "name another mirror by HF_ENDPOINT"
            ) from None


class _LargeFile(BaseModel):
    sha256: str
    size: int


class _Sibling(BaseModel):
    rfilename: str
    size: int
    blob: str = Field(alias="blobId")
    lfs: _LargeFile | None = None

    def plain(self) -> HubFile:
        large = self.lfs
        return HubFile(
            path=self.rfilename,
            size=large.size if large else self.size,
            blob=self.blob,
            sha256=large.sha256 if large else "",
        )


class _Listing(BaseModel):
    """What the hub answers, as far as it matters here."""

    sha: str
    siblings: list[_Sibling]


@contextmanager
def failures() -> Iterator[None]:
    """Turns whatever a request inside raises into a HubFailure; errors of the file system pass."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    # The root error of the HTTP library that this version of the client is made with.
    http_error = cast(type[Exception], HfHubHTTPError.__bases__[0])
    try:
        yield
    except OfflineModeIsEnabled:
        raise HubFailure("HF_HUB_OFFLINE forbids it", transient=False) from None
    except HfHubHTTPError as error:
        raise _of_answer(error.response) from error
    except http_error as error:
        raise HubFailure(_reason(error), transient=not _is_certificate(error)) from error


def _of_answer(response: Any) -> HubFailure:
    status = int(response.status_code)
    asked = str(response.headers.get("Retry-After", "")).strip()
    if not asked and status == _SLOW_DOWN:
        limit = re.search(r"\bt=(\d+)", str(response.headers.get("RateLimit", "")))  # seconds until the next window
        asked = limit[1] if limit else ""
    return HubFailure(
        f"HTTP {status} {response.reason_phrase}".strip(),
        status=status,
        code=str(response.headers.get("X-Error-Code", "")),
        transient=status in _TRANSIENT,
        wait_s=min(float(asked), _LONGEST_WAIT_S) if asked.isdigit() else 0.0,
    )


def _reason(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _is_certificate(error: BaseException) -> bool:
    return "CERTIFICATE_VERIFY_FAILED" in str(error)


def explain(failure: HubFailure, hub: Hub, repository: str, revision: str, path: str = "") -> FetchError:
    """The FetchError for a request that failed for good: what, where, and the line that mends it."""
    what = f"{path} of {repository}" if path else repository
    page = f"{hub.shown}/{repository}"
    who = f"the token of {hub.token.origin} was sent" if hub.token.value else "no token was found"
    give = "give one by --token-file FILE, HF_TOKEN_PATH=FILE or the secret /run/secrets/hf_token"
    head = f"{what} could not be fetched from {hub.shown}: {failure.reason}"
    if failure.code == "RevisionNotFound":
        return FetchError(f"{repository} has no revision {revision}; {page}/commits/main shows which there are")
    if failure.status == _NOT_FOUND and path:
        return FetchError(
            f"{head}: the hub lists this file and does not have it; try again, or name a mirror: HF_ENDPOINT"
        )
    if failure.status == _NOT_FOUND:
        return FetchError(f"{head}: there is no such repository, or it is private ({who}); check its name at {page}")
    if failure.code == "GatedRepo":
        return FetchError(
            f"{head}: it is gated, and {who}\naccept its terms at {page} with the account of the token"
            + ("" if hub.token.value else f", then {give}")
        )
    if failure.status in (401, 403):
        mend = (
            "see that the token is valid and may read it" if hub.token.value else f"if it is private or gated, {give}"
        )
        return FetchError(f"{head}: it is private, gated or does not exist, and {who}\n{mend}; its page is {page}")
    if failure.status == _SLOW_DOWN:
        return FetchError(f"{head}: too many requests ({who}); wait some minutes and run the same again: it goes on")
    if failure.status:
        return FetchError(f"{head}\nrun the same again: it goes on where it broke off; HF_ENDPOINT names a mirror")
    if "CERTIFICATE_VERIFY_FAILED" in failure.reason:
        return FetchError(f"{head}\nSSL_CERT_FILE names the certificates to trust, a proxy's own among them")
    return FetchError(
        f"{head}\nis the hub reachable? HF_ENDPOINT names a mirror, HTTPS_PROXY a proxy; what has come is kept. "
        "Without network: fetch the files elsewhere and run: tokenspeed serve FOLDER"
    )
