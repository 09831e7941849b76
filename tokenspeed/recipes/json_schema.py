"""The JSON Schema of recipes, for editors: made from the schema that validates them, so it cannot drift from it."""

from typing import Any

from tokenspeed.recipes.schema import Recipe

SCHEMA_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_NULL = {"type": "null"}


def recipe_schema() -> dict[str, Any]:
    """The schema of a recipe's file: the recipe itself, or one that ``extends`` another and says only what differs.

    Every key that is not required may be null, which deletes what was inherited.
    """
    schema = Recipe.model_json_schema()
    definitions = {name: _nullable(part) for name, part in schema.pop("$defs").items()}
    whole = _nullable({key: value for key, value in schema.items() if key not in ("required", "title")})
    whole["properties"]["extends"] = {
        "type": "string",
        "description": "The name of a recipe to inherit from, one level deep: mappings merge, null deletes.",
    }
    return {
        "$schema": SCHEMA_DRAFT,
        "title": "A TokenSpeed recipe",
        **whole,
        "anyOf": [{"required": ["extends"]}, {"required": schema["required"]}],
        "$defs": definitions,
    }


def _nullable(part: dict[str, Any]) -> dict[str, Any]:
    required = part.get("required", ())
    properties = {
        name: schema if name in required else {"anyOf": [schema, _NULL]}
        for name, schema in part.get("properties", {}).items()
    }
    return {**part, "properties": properties} if properties else part
