"""Reads the images' Dockerfiles for the tests."""

import re

from scripts.image_facts import ROOT

IMAGES = ROOT / "images"


def instructions(vendor: str) -> list[tuple[str, str]]:
    """A Dockerfile's instructions: keyword and the rest, continued lines joined, comments left out."""
    text = re.sub(r"^\s*#.*\n", "", (IMAGES / vendor / "Dockerfile").read_text(), flags=re.MULTILINE)
    joined = re.sub(r"\\\n\s*", "", text)
    lines = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
    return [(keyword.upper(), rest) for keyword, rest in lines]


def final_stage(vendor: str) -> list[tuple[str, str]]:
    """The instructions of the last stage, FROM included."""
    found = instructions(vendor)
    last = max(place for place, (keyword, _) in enumerate(found) if keyword == "FROM")
    return found[last:]


def values(stage: list[tuple[str, str]], keyword: str) -> list[str]:
    """What stands behind a keyword, for each time it stands there."""
    return [rest for name, rest in stage if name == keyword]


def global_defaults(vendor: str) -> dict[str, str]:
    """The build arguments before the first FROM, expanded."""
    found: dict[str, str] = {}
    for keyword, rest in instructions(vendor):
        if keyword == "FROM":
            break
        name, _, value = rest.partition("=")
        found[name] = re.sub(r"\$\{(\w+)\}", lambda match: found[match[1]], value)
    return found


def values_of_arg(vendor: str) -> list[tuple[str, str]]:
    """The build arguments with a default, as written."""
    split = [rest.partition("=") for rest in values(instructions(vendor), "ARG")]
    return [(name, value) for name, equals, value in split if equals]
