"""What must never be read in a log or a bundle: keys, tokens, passwords. They are blanked wherever text leaves."""

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from tokenspeed.telemetry.api_keys import ApiKeyError, keys_of_environment, read_key_file

BLANK = "***"

_SECRET_WORDS = frozenset(
    {"TOKEN", "TOKENS", "KEY", "KEYS", "APIKEY", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "AUTH"}
)
_SECRET_ENDINGS = ("TOKEN", "APIKEY", "SECRET", "PASSWORD")
_SHORTEST = 6
"""Shorter values are no secrets: blanking every "1" would make a log unreadable."""

_SHAPES = r"hf_[A-Za-z0-9]{16,}|([Bb]earer +)[^\s\"']+|(://)[^/\s:@]+:[^/\s@]+(?=@)"
"""What looks like a secret wherever it came from: a hub token, a bearer's key, the password in a URL. What a group
holds stays."""


def is_secret_name(name: str) -> bool:
    """Whether a variable or key of this name holds a secret (HF_TOKEN does, TOKENSPEED_CACHE does not)."""
    words = re.split(r"[^A-Z]+", name.upper())
    return not _SECRET_WORDS.isdisjoint(words) or any(word.endswith(_SECRET_ENDINGS) for word in words)


def secret_values(environment: Mapping[str, str], files: Iterable[str | Path] = ()) -> set[str]:
    """Returns the secrets that are known: in variables by their name, and the lines of secret files.

    A file that cannot be read has nothing to hide from us; a variable that names a file is followed by the caller.
    """
    found = {value for name, value in environment.items() if is_secret_name(name) and not _is_file(value)}
    for path in files:
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            continue
        found |= {line.strip() for line in lines if not line.lstrip().startswith("#")}
    return {value for value in found if len(value) >= _SHORTEST}


def hub_token_files(environment: Mapping[str, str]) -> list[Path]:
    """Where the hub's client looks for its token."""
    home = environment.get("HF_HOME") or Path(environment.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    named = environment.get("HF_TOKEN_PATH")
    return [Path(path).expanduser() for path in (named, Path(home) / "token") if path]


def known_secrets(api_key_file: str = "") -> set[str]:
    """Returns every secret this process can come to know of: its environment, the hub's token, the API's keys."""
    found = secret_values(os.environ, hub_token_files(os.environ))
    with contextlib.suppress(ApiKeyError):
        found |= {key.key for key in keys_of_environment(os.environ) if len(key.key) >= _SHORTEST}
    if api_key_file:
        found |= secret_values({}, [api_key_file])  # whole lines too, where a line is no entry
        with contextlib.suppress(ApiKeyError):
            found |= {key.key for key in read_key_file(api_key_file) if len(key.key) >= _SHORTEST}
    return found


class Redactor:
    """Blanks secrets in text. Immutable; safe from every thread."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        # The longest first: one secret may be the beginning of another.
        known = sorted({secret for secret in secrets if len(secret) >= _SHORTEST}, key=len, reverse=True)
        self._pattern = re.compile("|".join([*map(re.escape, known), _SHAPES]))

    def __call__(self, text: str) -> str:
        return self._pattern.sub(lambda found: f"{found[1] or found[2] or ''}{BLANK}", text)

    def values(self, value: object) -> object:
        """Returns JSON-like data with its texts blanked, and every value under a secret's name whole."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, Mapping):
            return {
                str(key): BLANK if is_secret_name(str(key)) and item and isinstance(item, str) else self.values(item)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.values(item) for item in value]
        return value


def _is_file(value: str) -> bool:
    return value.startswith("/") and Path(value).exists()
