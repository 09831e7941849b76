"""Structural tags: free text in which, after a trigger, a tag with a constrained content follows."""

import json
import re
from collections.abc import Mapping
from typing import Any, TypeGuard

from tokenspeed.grammar.vocabulary import Vocabulary
from tokenspeed.messages import ConstraintError

FREE_TEXT = r"/(.|\n)*/"


def structural_tag_source(value: Any, vocabulary: Vocabulary, json_options: Mapping[str, Any]) -> str:
    """Returns the Lark grammar of ``{"triggers": [...], "structures": [{"begin", "schema", "end"}, ...]}``.

    The text is free until a trigger is complete; then the beginning of one of the structures that start with this
    trigger must follow, JSON that conforms to its ``schema`` (any JSON without one) and its ``end``; then the text is
    free again. Special tokens spelled in triggers, beginnings and ends stand for themselves. ``json_options`` are
    llguidance's for JSON. Raises ConstraintError naming what is wrong.
    """
    triggers, structures = _checked(value)
    special = {vocabulary.tokens[token].decode("utf-8", "replace"): token for token in sorted(vocabulary.special)}
    special.pop("", None)
    bodies: dict[str, list[str]] = {trigger: [] for trigger in triggers}
    for at, structure in enumerate(structures):
        trigger = next((one for one in triggers if structure["begin"].startswith(one)), None)
        if trigger is None:
            raise ConstraintError(f"structures[{at}].begin starts with none of the triggers")
        schema = structure.get("schema", {})
        if isinstance(schema, dict):
            schema = {"x-guidance": dict(json_options), **schema}
        begin, end = structure["begin"].removeprefix(trigger), structure.get("end", "")
        parts = (*_pieces(begin, special), f"%json {json.dumps(schema)}", *_pieces(end, special))
        bodies[trigger].append(" ".join(parts))
    used = {trigger: alternatives for trigger, alternatives in bodies.items() if alternatives}
    lines = ["%llguidance {}", f"start: ({' | '.join(f'tag_{at}' for at in range(len(used)))})* free", "free: FREE"]
    lines.append(f"FREE: {FREE_TEXT}")
    for at, (trigger, alternatives) in enumerate(used.items()):
        lines += _trigger_rule(at, trigger, special)
        lines.append(f"tag_{at}: trigger_{at} ({' | '.join(alternatives)})")
    return "\n".join(lines)


def _trigger_rule(at: int, trigger: str, special: Mapping[str, int]) -> list[str]:
    """Free text up to the trigger. Inside a lexeme no special token can stand, so one may only begin the trigger."""
    pieces = _pieces(trigger, special)
    if pieces[0].startswith("<["):
        return [f"trigger_{at}: free {' '.join(pieces)}"]
    if len(pieces) > 1:
        raise ConstraintError(f"the trigger {trigger!r} has a special token behind text; begin it with the token")
    return [f"trigger_{at}[lazy]: {FREE_TEXT} {pieces[0]}"]


def _pieces(text: str, special: Mapping[str, int]) -> list[str]:
    """The text as Lark: literals, and ``<[id]>`` for the special tokens in it."""
    if not special:
        return [json.dumps(text, ensure_ascii=False)] if text else []
    names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True))
    return [
        f"<[{special[piece]}]>" if piece in special else json.dumps(piece, ensure_ascii=False)
        for piece in re.split(f"({names})", text)
        if piece
    ]


def _checked(value: Any) -> tuple[list[str], list[dict[str, Any]]]:
    if not isinstance(value, dict):
        raise ConstraintError("the structural tag must be an object with triggers and structures")
    if "format" in value:
        raise ConstraintError("the structural tag has a format; supported are triggers and structures")
    unknown = sorted(set(value) - {"type", "triggers", "structures"})
    if unknown:
        raise ConstraintError(f"the structural tag has {unknown[0]!r}; it takes triggers and structures")
    triggers, structures = value.get("triggers"), value.get("structures")
    if not _are_texts(triggers):
        raise ConstraintError("triggers must be a list of strings, at least one and none of them empty")
    if not isinstance(structures, list) or not structures:
        raise ConstraintError("structures must be a list of objects, at least one")
    for at, structure in enumerate(structures):
        _check_structure(f"structures[{at}]", structure)
    return triggers, structures


def _check_structure(name: str, structure: Any) -> None:
    if not isinstance(structure, dict):
        raise ConstraintError(f"{name} must be an object with begin, schema and end")
    unknown = sorted(set(structure) - {"begin", "schema", "end"})
    if unknown:
        raise ConstraintError(f"{name} has {unknown[0]!r}; it takes begin, schema and end")
    if not isinstance(structure.get("begin"), str) or not isinstance(structure.get("end", ""), str):
        raise ConstraintError(f"{name}.begin and {name}.end must be strings")
    if not isinstance(structure.get("schema", {}), dict | bool):
        raise ConstraintError(f"{name}.schema must be a JSON schema")


def _are_texts(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) and one for one in value)
