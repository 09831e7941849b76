"""Who may use the server: the keys of a file and of the environment, and the file again when it changes."""

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Callable, Mapping

from starlette.datastructures import Headers

from tokenspeed.telemetry.api_keys import ApiKey, ApiKeyError, keys_of_environment, read_key_file

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0
"""A key file is looked at again so long after the last look, by the next request."""

_Stamp = tuple[int, int, int] | None


class KeyRing:
    """The keys that are valid now.

    The file is read again when it is another one or has another time or size than before, so that a key is rotated by
    writing (better: renaming) a file, and no signal is needed. A file that can then not be used leaves the keys as they
    are: the log says so once for each such file, and a half-written file locks nobody out.
    """

    def __init__(
        self,
        path: str = "",
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ApiKeyError where a file or a variable is given and holds no key that can be used: a server that was
        told to ask for keys must not start without any."""
        self._path = path
        self._clock = clock
        self._of_environment = keys_of_environment(environment)
        self._stamp = _stamp(path)
        self._looked_at = clock()
        self._keys = self._joined()

    @property
    def required(self) -> bool:
        """Whether a key must be given."""
        return bool(self._keys)

    def find(self, headers: Headers) -> ApiKey | None:
        """Returns the key that comes as ``Authorization: Bearer KEY`` or ``x-api-key: KEY``, None for none."""
        self._look_again()
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        given = [_digest(bearer.strip())] if kind.lower() == "bearer" else []
        if (other := headers.get("x-api-key")) is not None:
            given.append(_digest(other.strip()))
        # every key is compared, so that the time does not tell which one was near
        matches = [key for digest in given for known, key in self._keys.items() if hmac.compare_digest(digest, known)]
        return matches[0] if matches else None

    def _look_again(self) -> None:
        now = self._clock()
        if not self._path or now - self._looked_at < LOOK_AGAIN_S:
            return
        self._looked_at = now
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = self._joined()
        except ApiKeyError as error:
            logger.error("%s; the keys stay as they were", error)
        else:
            logger.info("read the API keys again: %s", ", ".join(key.name for key in self._keys.values()))

    def _joined(self) -> dict[bytes, ApiKey]:
        keys = [*(read_key_file(self._path) if self._path else ()), *self._of_environment]
        if len({key.name for key in keys}) < len(keys):
            raise ApiKeyError(f"the API key file {self._path} and the environment use one name for two keys")
        return {_digest(key.key): key for key in keys}


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _stamp(path: str) -> _Stamp:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
