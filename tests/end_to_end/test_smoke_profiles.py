"""Every recipe's smoke profile starts and answers over HTTP: three a day with the tests of every change, all with the
long ones. TOKENSPEED_SMOKE_DAY=N takes another day's three.
"""

import os
from datetime import UTC, datetime

import pytest
from running_server import RunningServer

from tokenspeed.recipes.catalogue import find_recipe, load_recipe, recipe_names

A_DAY = 3


def of_day(names: list[str], day: int) -> set[str]:
    """Those whose turn it is; all had theirs after len(names) / A_DAY days."""
    return {names[(day * A_DAY + at) % len(names)] for at in range(A_DAY)}


DAY = int(os.environ.get("TOKENSPEED_SMOKE_DAY") or datetime.now(UTC).date().toordinal())
NAMES = sorted(recipe_names())
TODAY = of_day(NAMES, DAY)


def test_every_recipe_has_its_day() -> None:
    days = -(-len(NAMES) // A_DAY)
    assert len(TODAY) == A_DAY
    assert set().union(*(of_day(NAMES, day) for day in range(DAY, DAY + days))) == set(NAMES)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in TODAY else pytest.mark.long) for name in NAMES]
)
def test_a_smoke_profile_answers(name: str) -> None:
    print(f"day {DAY}: {', '.join(sorted(TODAY))}")
    with RunningServer(name, "--profile", "smoke", "--kv-cache-gb", "0.05") as server:
        assert server.model == f"{name}-smoke"
        body = {
            "model": server.model,
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a block?"}],
            "max_tokens": 24,
            "temperature": 0,
        }
        answers = [server.client.post("/v1/chat/completions", json=body).json() for _ in range(2)]
        first, second = (answer["choices"][0] for answer in answers)
        said = (first["message"]["content"] or "") + first["message"].get("reasoning_content", "")
        assert said and first["message"] == second["message"], answers
        assert answers[0]["usage"]["completion_tokens"] == 24, answers[0]
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
        offered = server.client.post("/v1/chat/completions", json=body | {"tools": tools})
        has_format = bool(load_recipe(find_recipe(name)).recipe.formats.tools)
        assert offered.status_code == (200 if has_format else 400), offered.text
        refused = server.client.post(
            "/v1/chat/completions",
            json=body | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        )
        assert refused.status_code == 400 and "pictures" in refused.text
