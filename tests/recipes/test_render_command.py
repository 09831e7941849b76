"""``recipe render`` from end to end, and the files that are shipped."""

import importlib.util
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from deployments import pod_templates, read_objects

from tokenspeed.cli.main import main

ROOT = Path(__file__).parents[2]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The command line; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["tokenspeed", "recipe", "render", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def examples() -> ModuleType:
    """scripts/render_examples.py."""
    specification = importlib.util.spec_from_file_location("render_examples", ROOT / "scripts" / "render_examples.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


EXAMPLES = examples()


@pytest.mark.parametrize("name", EXAMPLES.EXAMPLES)
def test_shipped_files_are_what_the_recipes_say(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When this fails: python scripts/render_examples.py."""
    monkeypatch.setenv("TOKENSPEED_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("TOKENSPEED_RECIPES", raising=False)
    assert (ROOT / "images" / name).read_text() == EXAMPLES.rendered(EXAMPLES.EXAMPLES[name])


def test_every_shipped_file_has_its_command() -> None:
    shipped = {
        str(path.relative_to(ROOT / "images"))
        for form in ("compose", "kubernetes")
        for path in (ROOT / "images" / form).glob("*.yaml")
    }
    assert shipped == set(EXAMPLES.EXAMPLES)
    assert {f"compose/{vendor}.yaml" for vendor in ("cpu", "nvidia", "amd", "npu")} <= shipped


def test_compose_goes_to_a_file_and_names_its_command(
    recipes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.yaml"
    arguments = ["small", "--as", "compose", "--hardware", "cpu", "--max-num-seqs", "8", "-o", str(target)]
    assert run(monkeypatch, *arguments) == 0
    text = target.read_text()
    assert "# Written by: tokenspeed recipe render small --as compose --hardware cpu --max-num-seqs 8\n" in text
    service = yaml.safe_load(text)["services"]["tokenspeed"]
    assert service["command"] == ["small", "--profile", "cpu", "--max-num-seqs", "8"]
    # The image does not have this recipe.
    (mount,) = [found for found in service["volumes"] if found["type"] == "bind"]
    assert mount["source"] == str(recipes) and service["environment"]["TOKENSPEED_RECIPES"] == mount["target"]
    assert capsys.readouterr().out == f"wrote {target}; its first lines say how to start it\n"


def test_kubernetes_takes_an_own_recipe_along_with_what_it_extends(
    recipes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (recipes / "mine.yaml").write_text("extends: small\nname: mine\n")
    assert run(monkeypatch, "mine", "--as", "kubernetes", "--hardware", "cpu") == 0
    objects = read_objects(capsys.readouterr().out)
    data = objects["ConfigMap/mine-recipe"]["data"]
    assert data == {name: (recipes / name).read_text() for name in ("mine.yaml", "small.yaml")}


def test_what_is_unsupported_is_written_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["kimi-k2.5", "--as", "kubernetes", "--hardware", "h200", "--nodes", "2"]
    assert run(monkeypatch, *arguments) == 0
    told = capsys.readouterr()
    assert "is unsupported" in told.err and "several nodes (parallel.nodes = 2)" in told.err
    assert "UNSUPPORTED" in told.out.split("\n---\n")[0]
    leader, _ = pod_templates(read_objects(told.out))
    container = leader["spec"]["containers"][0]
    assert container["args"][-2:] == ["--set", "parallel.nodes=2"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}


def test_the_key_of_the_api_stays_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    key.write_text("sk-do-not-print-me\n")
    for form in ("container", "compose", "kubernetes"):
        arguments = ["smollm2-135m", "--as", form, "--hardware", "cpu", "--api-key-file", str(key)]
        assert run(monkeypatch, *arguments) == 0
        told = capsys.readouterr()
        assert "sk-do-not-print-me" not in told.out + told.err and "/run/secrets/api-key" in told.out


def test_a_command_line_can_be_given_to_a_shell(
    recipes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["small", "--as", "container", "--hardware", "cpu", "--set", "env.NOTE=a;b"]
    assert run(monkeypatch, *arguments) == 0
    words = shlex.split(capsys.readouterr().out.replace("\\\n", " "))
    assert words[1] == "run" and words[-2:] == ["--set", "env.NOTE=a;b"]
    assert {"--read-only", "--init"} <= set(words) and "tokenspeed-cpu" in words


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["kimi-k2.5", "--as", "compose", "--hardware", "h200", "--nodes", "2"], "take --as kubernetes"),
        (["kimi-k2.5", "--as", "container", "--hardware", "h200", "--nodes", "2"], "take --as kubernetes"),
        (["kimi-k2.5", "--as", "kubernetes", "--hardware", "h200", "--nodes", "3"], "shared equally by 3 nodes"),
        (["smollm2-135m", "--as", "container", "--monitoring"], "--as compose"),
        (["smollm2-135m", "--as", "compose", "--hardware", "cpu", "--port", "0"], "--port 8000"),
        (["smollm2-135m", "--as", "compose", "--hardware", "cqu"], 'did you mean "cpu"'),
        (["smollm2-135m", "--as", "compose", "--hardware", "cpu", "-o", "/nowhere/x.yaml"], "name another with -o"),
        (
            ["smollm2-135m", "--as", "compose", "--hardware", "cpu", "--set", "env.HF_TOKEN=hf_0123"],
            "give it as a file",
        ),
    ],
)
def test_mistakes_have_their_mend(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *arguments) == 2
    captured = capsys.readouterr()
    assert told in captured.err and not captured.out


def test_an_unknown_form_lists_those_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "smollm2-135m", "--as", "helm") == 2
    told = capsys.readouterr().err
    assert all(form in told for form in ("container", "compose", "kubernetes"))


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["a", "-o", "f"], ["a"]),
        (["-of", "a"], ["a"]),
        (["a", "--output", "f", "b"], ["a", "b"]),
        (["--output=f", "a"], ["a"]),
        (["a", "--nodes", "2"], ["a", "--nodes", "2"]),
    ],
)
def test_the_written_command_leaves_the_file_out(given: list[str], kept: list[str]) -> None:
    from tokenspeed.cli.render import without_output

    assert without_output(given) == kept
