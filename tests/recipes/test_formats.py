"""Formats of tool calls and reasoning: documented names are accepted names, and wrong ones are found before a load."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenspeed.frontend.family_text import family_text
from tokenspeed.frontend.parsing import registry
from tokenspeed.recipes import formats
from tokenspeed.recipes.catalogue import load_recipe, recipe_names
from tokenspeed.recipes.document import RecipeError
from tokenspeed.recipes.features import family_of
from tokenspeed.recipes.machine import Machine
from tokenspeed.recipes.overrides import flag_values
from tokenspeed.recipes.prepare import prepare
from tokenspeed.recipes.resolve import resolve

ROOT = Path(__file__).parents[2]
MakeMachine = Callable[..., Machine]


def test_names_are_the_parsers_and_the_documented_ones() -> None:
    """Known failure 41."""
    assert set(formats.TOOL_FORMATS) == set(registry.TOOL_FORMATS)
    assert set(formats.REASONING_FORMATS) == set(registry.REASONING_FORMATS)
    whole = {name for name, one in registry.TOOL_FORMATS.items() if isinstance(one, registry.WholeFormat)}
    assert set(formats.WHOLE_FORMATS) == whole
    table = (ROOT / "docs" / "recipes.md").read_text().split("<!-- formats:")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \| (yes)? *\| (yes)? *\|$", table, re.MULTILINE)
    assert {name for name, _, tools, _ in rows if tools} == set(formats.TOOL_FORMATS)
    assert {name for name, _, _, reasoning in rows if reasoning} == set(formats.REASONING_FORMATS)
    named = (ROOT / "docs" / "recipes.md").read_text()
    assert all(f"`{switch}`" in named for switch in formats.THINKING_SWITCHES)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("{tools: hermez}", 'formats.tools: there is no tool format "hermez"; did you mean "hermes"?'),
        ("{tools: qwen3_codr}", 'formats.tools: there is no tool format "qwen3_codr"; did you mean "qwen3_coder"?'),
        ("{reasoning: qwen}", 'formats.reasoning: there is no reasoning format "qwen"; did you mean "qwen3"?'),
        ("{thinking_switch: think}", 'formats.thinking_switch: there is no thinking switch "think"'),
        ("{tools: gpt_oss}", "formats: gpt_oss frames reasoning and calls at once: set tools (--tool-format) and"),
        ("{tools: hermes, reasoning: kimi_k3}", "formats: kimi_k3 frames reasoning and calls at once"),
    ],
)
def test_a_wrong_name_is_refused_with_the_nearest(recipes: Path, said: str, expected: str) -> None:
    path = recipes / "small.yaml"
    path.write_text(path.read_text() + f"formats: {said}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert re.match(rf"{re.escape(str(path))}:\d+:\d+: {re.escape(expected)}", caught.value.problems[0])


def test_flags_win_over_the_profile_and_that_over_the_recipe(recipes: Path, make_machine: MakeMachine) -> None:
    path = recipes / "small.yaml"
    path.write_text(path.read_text() + "formats: {tools: hermes, reasoning: qwen3, thinking_switch: thinking}\n")
    plain = resolve("small", make_machine(), profile="smoke")
    assert plain.keys.formats.model_dump() == {"tools": "hermes", "reasoning": "qwen3", "thinking_switch": "thinking"}
    assert plain.sources["formats.tools"].startswith("recipe (small.yaml:")
    path.write_text(path.read_text().replace("  smoke:\n", "  smoke:\n    formats: {reasoning: glm45}\n"))
    flagged = resolve("small", make_machine(), profile="smoke", overrides=flag_values({"tool_format": "glm47"}))
    assert (flagged.keys.formats.tools, flagged.sources["formats.tools"]) == ("glm47", "--tool-format")
    assert flagged.keys.formats.reasoning == "glm45"
    config = prepare(flagged, make_machine(), lambda *_: None)
    assert config.formats.model_dump() == flagged.keys.formats.model_dump()
    with pytest.raises(RecipeError, match=r'--tool-format: formats.tools: there is no tool format "glm4"'):
        resolve("small", make_machine(), profile="smoke", overrides=flag_values({"tool_format": "glm4"}))


@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipes_name_what_their_templates_write(name: str, make_machine: MakeMachine) -> None:
    """Each smoke profile speaks with our template of its family: its formats are those of that template; a model that
    gives embeddings has none."""
    written = {
        "": {("", ""), ("llama3_json", "")},
        "deepseek_v3": {("deepseek_v31", "deepseek_v31")},
        "deepseek_v32": {("deepseek_v32", "deepseek_v31")},
        "deepseek_v4": {("deepseek_v4", "deepseek_v4")},
        "glm": {("glm47", "glm45")},
        "harmony": {("gpt_oss", "gpt_oss")},
        "kimi": {("kimi_k2", "kimi_k2")},
        "minimax": {("minimax_m2", "minimax_m2")},
        "qwen3": {("hermes", "qwen3"), ("qwen3", "qwen3")},
        "qwen3_5": {("qwen3_coder", "qwen3")},
    }
    resolution = resolve(name, make_machine(), profile="smoke")
    assert resolution.loaded is not None
    recipe = resolution.loaded.recipe
    template = family_text(family_of(recipe, recipe.profiles["smoke"])).template
    said = resolution.keys.formats
    gives_text = resolution.keys.api.embeddings.pooling == "auto"
    assert (said.tools, said.reasoning) in (written[template] if gives_text else {("", "")})
    source = family_text(family_of(recipe, recipe.profiles["smoke"])).chat_template()
    # some checkpoints' templates know reasoning_effort where ours does not
    assert said.thinking_switch in source or said.thinking_switch == "reasoning_effort"
