"""API keys as files and the environment hold them. Here, because what blanks secrets must know them too."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

KEYS_VARIABLE = "TOKENSPEED_API_KEYS"
"""Holds entries as a key file does, separated by commas or new lines."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_BOUNDS = ("rpm", "concurrent")
_FORM = "write KEY, NAME: KEY or NAME KEY, and after it rpm=N, concurrent=N or admin where they are wanted"


class ApiKeyError(ValueError):
    """Keys that cannot be used; the message names the file and the line, never a key."""


@dataclass(frozen=True)
class ApiKey:
    """One key.

    Attributes:
        name: what logs and metrics call it.
        key: the secret.
        rpm: requests a minute; None is the server's bound, 0 no bound.
        concurrent: requests at a time; None and 0 as above.
        admin: whether it opens the administration's port.
    """

    name: str
    key: str
    rpm: int | None = None
    concurrent: int | None = None
    admin: bool = False


def parse_keys(text: str, source: str, unnamed: str = "key") -> list[ApiKey]:
    """Returns the keys of ``text``, an entry a line; lines that are empty or begin with # are skipped.

    An entry is ``KEY``, ``NAME: KEY`` or ``NAME KEY``, and after it ``rpm=N``, ``concurrent=N`` and ``admin`` where
    they are wanted. A key without a name is called ``unnamed`` and its place among the entries (key-1).
    Raises ApiKeyError naming ``source`` and the line.
    """
    keys: list[ApiKey] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        keys.append(_entry(words, f"{unnamed}-{len(keys) + 1}", f"{source}, line {number}"))
    for what, values in (("name", [key.name for key in keys]), ("key", [key.key for key in keys])):
        if len(set(values)) < len(values):
            raise ApiKeyError(f"{source}: two entries have the same {what}")
    return keys


def read_key_file(path: str | Path) -> list[ApiKey]:
    """Returns the keys of a file, at least one; raises ApiKeyError where it cannot be read or holds none."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ApiKeyError(f"the API key file {path} cannot be read: {error}") from error
    keys = parse_keys(text, f"the API key file {path}")
    if not keys:
        raise ApiKeyError(f"the API key file {path} holds no key; write one a line")
    return keys


def keys_of_environment(environment: Mapping[str, str]) -> list[ApiKey]:
    """Returns the keys that the environment holds; raises ApiKeyError where the variable is there and holds none."""
    given = environment.get(KEYS_VARIABLE)
    if given is None:
        return []
    keys = parse_keys(given.replace(",", "\n"), KEYS_VARIABLE, unnamed="env")
    if not keys:
        raise ApiKeyError(f"{KEYS_VARIABLE} is set and holds no key; unset it, or write NAME: KEY, NAME: KEY ...")
    return keys


def _entry(words: list[str], unnamed: str, where: str) -> ApiKey:
    named = len(words) > 1 and not _is_option(words[1])
    name = words.pop(0).removesuffix(":") if named else unnamed
    if not _NAME.fullmatch(name):
        raise ApiKeyError(f"{where}: a name is up to 64 letters, digits, dots, dashes and underscores; {_FORM}")
    key, bounds, admin = words[0], dict[str, int](), False
    for option in words[1:]:
        word, _, value = option.partition("=")
        if option == "admin":
            admin = True
        elif word in _BOUNDS and value.isascii() and value.isdigit():
            bounds[word] = int(value)
        else:
            raise ApiKeyError(f"{where}: what stands behind the key is not understood; {_FORM}")
    return ApiKey(name, key, bounds.get("rpm"), bounds.get("concurrent"), admin)


def _is_option(word: str) -> bool:
    return word == "admin" or (word.partition("=")[0] in _BOUNDS and "=" in word)
