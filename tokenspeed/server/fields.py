"""What becomes of each request field: supported, accepted without effect, or refused by name. Nothing else exists.

docs/api.md lists them for users; a test holds page and tables equal.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tokenspeed.server.errors import ApiError

WITHOUT_EFFECT = {
    "user": "who asks makes no difference here",
    "metadata": "nothing is stored that it could be attached to",
    "store": "nothing is ever stored",
    "safety_identifier": "who asks makes no difference here",
    "service_tier": "there is one tier; use priority to go first",
    "prompt_cache_key": "prefixes are found by their content; use cache_salt to keep them apart",
    "prompt_cache_retention": "prefixes stay cached while there is room",
    "prediction": "a hint for speed only",
}
"""Accepted because clients send them by habit and they cannot change an answer; each use is counted in a metric."""

_NULL = b"null"
_OLD_TOOLS = "it is the old name; send tools and tool_choice"
_CHAT_TOOLS = "tools go with /v1/chat/completions"
_CHAT_REASONING = "reasoning is told apart by /v1/chat/completions"
_TEXT_ONLY = "this server reads and writes text only"

REFUSED = {
    "tools": _CHAT_TOOLS,
    "tool_choice": _CHAT_TOOLS,
    "parallel_tool_calls": _CHAT_TOOLS,
    "functions": _OLD_TOOLS,
    "function_call": _OLD_TOOLS,
    "reasoning_effort": _CHAT_REASONING,
    "include_reasoning": _CHAT_REASONING,
    "separate_reasoning": _CHAT_REASONING,
    "thinking_token_budget": _CHAT_REASONING,
    "verbosity": "the model has no such setting; say it in the prompt",
    "modalities": _TEXT_ONLY,
    "audio": _TEXT_ONLY,
    "web_search_options": "this server does not search",
    "suffix": "this server goes on from a prompt and fills no gaps by itself; for a model that was trained to, write "
    "the text on both sides of the gap into the prompt, between the tokens that its card names for that",
    "chat_template": "the server's own template is used; start it with --chat-template to change that",
    "documents": "put the documents into a message",
    "allowed_token_ids": "use logit_bias to favour tokens",
    "use_beam_search": "choices are sampled; use best_of for the most probable one",
    "length_penalty": "means something only beside beam search",
    "prompt_embeds": _TEXT_ONLY,
    "lora_path": "adapters are not supported by this version",
}
"""Known fields that would change the answer, and which this server cannot honour."""

HARMLESS: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none",),
    "function_call": ("none",),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
}
"""Values of refused fields that ask for what happens anyway."""

LONG_FIELDS = frozenset({"prompt", "messages", "input", "system", "instructions", "text", "input_ids", "tokens"})
"""Fields that may fill a body."""

FIELD_BYTES = 1 << 20
"""Of any other field. Reading its entries stops everybody's streams, and is done before they can be counted."""

_HARMLESS_BYTES = 64
_NAME_CHARACTERS = 64
"""Longer values are not harmless, and longer names not misspelled: they are not read, and not compared with others."""


@dataclass(frozen=True)
class FieldRules:
    """What becomes of the fields of one door's requests that are not supported: the three tables above, by door."""

    without_effect: Mapping[str, str]
    refused: Mapping[str, str]
    harmless: Mapping[str, tuple[Any, ...]]


COMPLETION_RULES = FieldRules(WITHOUT_EFFECT, REFUSED, HARMLESS)


def check_fields(
    raw: Mapping[str, msgspec.Raw], supported: Iterable[str], rules: FieldRules = COMPLETION_RULES
) -> list[str]:
    """Returns the fields of a request body that are accepted without effect.

    A null is as good as an absent field. Raises ApiError (400) naming the first field that is refused, unknown or too
    long.
    """
    known = set(supported)
    ignored = []
    for name, value in raw.items():
        size = memoryview(value).nbytes
        if name in known:
            if size > FIELD_BYTES and name not in LONG_FIELDS:
                raise ApiError(
                    400, f"{name} has {size} bytes; at most {FIELD_BYTES} are read", code="invalid_value", param=name
                )
        elif size == len(_NULL) and bytes(value) == _NULL:
            continue
        elif name in rules.without_effect:
            ignored.append(name)
        elif name in rules.refused:
            if size > _HARMLESS_BYTES or msgspec.json.decode(value) not in rules.harmless.get(name, ()):
                raise ApiError(
                    400, f"{name} is not supported: {rules.refused[name]}", code="unsupported_field", param=name
                )
        else:
            near = _near(name, (*known, *rules.without_effect, *rules.refused))
            hint = f"; did you mean {near}?" if near else "; docs/api.md lists the fields"
            raise ApiError(400, f"{name} is not a field of this request{hint}", code="unknown_field", param=name)
    return ignored


def _near(name: str, names: Sequence[str]) -> str:
    """Returns the one of ``names`` that looks most like ``name``, "" where none does."""
    found = difflib.get_close_matches(name, names, n=1) if len(name) <= _NAME_CHARACTERS else []
    return found[0] if found else ""
