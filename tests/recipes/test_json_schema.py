"""The JSON Schema for editors: the committed file is the generated one, and it agrees with the validator."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tokenspeed.recipes.catalogue import configs_directory
from tokenspeed.recipes.json_schema import recipe_schema

SHIPPED = sorted((configs_directory() / "recipes").glob("*.yaml"))


def errors(data: Any) -> list[str]:
    return [error.message for error in jsonschema.Draft202012Validator(recipe_schema()).iter_errors(data)]


def test_the_committed_schema_is_the_generated_one() -> None:
    committed = json.loads((configs_directory() / "recipe.schema.json").read_text())
    assert committed == recipe_schema(), "write it anew: tokenspeed recipe schema > configs/recipe.schema.json"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipes_are_right_by_it_and_name_it(path: Path) -> None:
    text = path.read_text()
    assert errors(yaml.safe_load(text)) == []
    assert text.startswith("# yaml-language-server: $schema=../recipe.schema.json\n")


def test_it_refuses_what_the_validator_refuses() -> None:
    data = yaml.safe_load(SHIPPED[0].read_text())
    assert errors({**data, "contxt": 1})
    assert errors({**data, "context": "long"})
    assert errors({key: value for key, value in data.items() if key != "licence"})


def test_sizes_may_have_units_and_nulls_delete() -> None:
    base = {"extends": "qwen3-8b", "name": "mine"}
    assert errors({**base, "profiles": {"cpu": {"when": {"vendor": "cpu"}, "kv": {"bytes": "4 GiB"}}}}) == []
    assert errors({**base, "profiles": {"cpu": {"when": {"vendor": "cpu"}, "kv": {"bytes": "four"}}}})
    assert errors({**base, "defaults": {"api": None}}) == []
