"""Recipe, profile, flags and SET brought together: every value with its source."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tokenspeed.recipes.document import RecipeError
from tokenspeed.recipes.flags import FLAGS, Flag
from tokenspeed.recipes.machine import Machine
from tokenspeed.recipes.overrides import flag_values, set_values
from tokenspeed.recipes.plan_text import render_all_settings, render_settings
from tokenspeed.recipes.prepare import prepare, resolve_model
from tokenspeed.recipes.resolve import Resolution, UnsupportedError, model_source, resolve, settings
from tokenspeed.recipes.resolved import ResolvedConfig
from tokenspeed.recipes.schema import RunKeys

MakeMachine = Callable[..., Machine]


def no_progress(what: str, done: int, total: int) -> None:
    """Tests have no terminal."""


def resolved_smoke(machine: Machine, *assignments: str) -> ResolvedConfig:
    resolution = resolve("small", machine, profile="smoke", overrides=set_values(list(assignments)))
    return prepare(resolution, machine, no_progress)


def test_each_layer_is_laid_on_the_one_below_and_named(recipes: Path, make_machine: MakeMachine) -> None:
    flags = {"port": 9001, "max_num_seqs": None}
    overrides = set_values(["scheduler.overlap=1"])
    resolution = resolve("small", make_machine(), overrides=overrides)
    assert resolution.sources["scheduler.max_seqs"] == "recipe (small.yaml:10)"
    assert resolution.sources["scheduler.chunk"] == "profile cpu (small.yaml:15)"
    assert resolution.sources["scheduler.overlap"] == "SET scheduler.overlap"
    assert resolution.sources["scheduler.mixed"] == "default"
    assert (resolution.keys.scheduler.max_seqs, resolution.keys.scheduler.chunk) == (16, 128)
    with_flags = resolve("small", make_machine(), overrides=flag_values(flags))
    assert (with_flags.keys.api.port, with_flags.sources["api.port"]) == (9001, "--port")


def test_printed_equals_used(recipes: Path, make_machine: MakeMachine) -> None:
    machine = make_machine()
    resolution = resolve(
        "small", machine, profile="smoke", overrides=set_values(["threads=2 kernels.gemm.linear=reference"])
    )
    config = prepare(resolution, machine, no_progress)
    assert config.sources == {**resolution.sources, "kv.bytes": "the plan"}
    assert config.kernels == {"gemm.linear": "reference"}
    printed = {line.split()[0]: line.split()[1] for line in render_all_settings(resolution)}
    dumped = config.model_dump()
    for key in ("kv.granularity", "scheduler.max_seqs", "scheduler.chunk", "api.port", "threads", "enforce", "drain_s"):
        value = dumped
        for part in key.split("."):
            value = value[part]
        assert printed[key] == str(value)
    assert any(line.split() == ["threads", "2", "SET", "threads"] for line in render_settings(resolution))


def test_every_default_of_the_recipe_is_the_engines_default(make_machine: MakeMachine, recipes: Path) -> None:
    (recipes / "small.yaml").write_text(
        (recipes / "small.yaml").read_text().replace("  scheduler: {max_seqs: 16}", "  {}")
    )
    config = resolved_smoke(make_machine())
    # The size of the KV cache is the plan's.
    config = config.model_copy(update={"kv": config.kv.model_copy(update={"bytes": 0})})
    plain = ResolvedConfig(name="x", served_name="x", model=config.model)
    for section in ("kv", "scheduler", "api", "threads", "enforce", "seed", "drain_s", "kernels", "env"):
        assert getattr(config, section) == getattr(plain, section), section


def test_what_compiles_constraints(recipes: Path, make_machine: MakeMachine) -> None:
    machine = make_machine()
    off = resolve("small", machine, profile="smoke", overrides=set_values(["api.structured_output=none"]))
    assert prepare(off, machine, no_progress).api.structured_output == "none"
    other = resolve("small", machine, profile="smoke", overrides=set_values(["api.structured_output=xgrammar"]))
    with pytest.raises(UnsupportedError, match="set it to llguidance"):
        prepare(other, machine, no_progress)


def test_a_random_model_cannot_be_mistaken(recipes: Path, make_machine: MakeMachine) -> None:
    resolution = resolve("small", make_machine(), profile="smoke")
    assert resolution.served_name == "small-smoke"
    assert any("RANDOM WEIGHTS" in line for line in resolution.warnings)
    kimi = resolve("kimi-k2.5", make_machine())
    assert kimi.served_name == "kimi-k2.5-smoke"
    assert not any("family" in line for line in kimi.warnings)
    assert any("no profile for devices runs here" in line for line in kimi.warnings)
    stand_in = resolve("inkling", make_machine())
    assert any("family qwen3_moe, not inkling" in line for line in stand_in.warnings)


def test_a_configuration_crosses_to_the_engine_as_json(recipes: Path, make_machine: MakeMachine) -> None:
    config = resolved_smoke(make_machine(), "api.default_sampling.temperature=0.5", "env.OMP_PROC_BIND=false")
    assert config.api.default_sampling == {"temperature": 0.5}
    assert config.env == {"OMP_PROC_BIND": "false"}
    assert ResolvedConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("scheduler.max_seq=1", 'SET scheduler.max_seq: unknown key "max_seq" in scheduler; did you mean "max_seqs"?'),
        ("max_seqs=1", 'SET max_seqs: unknown key "max_seqs"'),
        ("when.vendor=cpu", 'SET when.vendor: unknown key "when"'),
        ("scheduler.chunk=fast", "SET scheduler.chunk: scheduler.chunk: input should be a valid integer"),
        ("scheduler.max_len=4096", "SET scheduler.max_len: scheduler.max_len is 4096, the model's context is 2048"),
        ("chunk", "SET 'chunk': write key=value"),
        ("kv.bytes=much", "SET kv.bytes: kv.bytes: 'much' is no size"),
        ("threads=[1", "SET threads"),
    ],
)
def test_a_wrong_assignment_is_named(recipes: Path, make_machine: MakeMachine, assignment: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        resolve("small", make_machine(), overrides=set_values([assignment]))
    assert str(caught.value).startswith(message)


def test_an_empty_assignment_goes_back_to_the_default(recipes: Path, make_machine: MakeMachine) -> None:
    resolution = resolve("small", make_machine(), overrides=set_values(["scheduler.chunk="]))
    assert (resolution.keys.scheduler.chunk, resolution.sources["scheduler.chunk"]) == (256, "default")


@pytest.mark.parametrize(
    ("assignment", "word"),
    [
        ("parallel.dp=2", "data parallelism"),
        ("parallel.pp=2", "pipeline parallelism"),
        ("parallel.nodes=2", "several nodes"),
        ("role=prefill", "a split role (role = prefill)"),
        ("speculative.method=ngram speculative.steps=2", "speculative decoding (speculative.method = ngram)"),
    ],
)
def test_what_the_engine_lacks_is_refused_by_name(
    recipes: Path, make_machine: MakeMachine, assignment: str, word: str
) -> None:
    resolution = resolve("small", make_machine(), profile="smoke", overrides=set_values([assignment]))
    assert resolution.status == "unsupported"
    with pytest.raises(UnsupportedError) as caught:
        prepare(resolution, make_machine(), no_progress)
    assert word in str(caught.value)


def test_real_profiles_of_kimi_are_refused_by_name(make_machine: MakeMachine) -> None:
    resolution = resolve("kimi-k2.5", make_machine(), profile="a3-w4a8")
    with pytest.raises(UnsupportedError) as caught:
        resolution.refuse_missing()
    for word in ("weight format w4a8", "parallel.dp = 4"):
        assert word in str(caught.value)


def test_a_family_that_the_engine_has_not_is_named(make_machine: MakeMachine) -> None:
    with pytest.raises(UnsupportedError, match="model family inkling"):
        resolve("inkling", make_machine(), profile="gb200-nvfp4").refuse_missing()


@pytest.mark.parametrize("name", ["smallish", "smal"])
def test_a_wrong_model_names_the_nearest(recipes: Path, make_machine: MakeMachine, name: str) -> None:
    with pytest.raises(RecipeError, match=f'"{name}" is no recipe and no file or folder; did you mean "small"'):
        resolve(name, make_machine())


def test_paths_that_are_no_model_are_told_apart(tmp_path: Path, make_machine: MakeMachine) -> None:
    text = tmp_path / "notes.gguf"
    text.write_text("hello")
    folder = tmp_path / "empty"
    folder.mkdir()
    two = tmp_path / "two"
    two.mkdir()
    for name in ("a.gguf", "b.gguf"):
        (two / name).write_bytes(b"GGUF")
    for target, message in (
        (tmp_path / "absent.gguf", "there is no such file or folder"),
        (text, "this is no GGUF file (it begins with b'hell')"),
        (folder, "expected config.json or one .gguf file in this folder, found neither"),
        (two, "found 2 .gguf files (a.gguf, b.gguf); name one"),
        (tmp_path / "absent.yaml", "there is no such recipe file"),
    ):
        with pytest.raises(RecipeError) as caught:
            resolve(str(target), make_machine())
        assert message in str(caught.value)


def test_a_folder_of_one_split_model_is_its_first_file(tmp_path: Path, make_machine: MakeMachine) -> None:
    for number in (1, 2):
        (tmp_path / f"m-0000{number}-of-00002.gguf").write_bytes(b"GGUF")
    source = model_source(resolve(str(tmp_path), make_machine()))
    assert source is not None
    assert (source.kind, source.path) == ("gguf", str(tmp_path / "m-00001-of-00002.gguf"))
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    (tmp_path / "n.gguf").write_bytes(b"GGUF")
    with pytest.raises(RecipeError, match=r"found 2 \.gguf files"):
        resolve(str(tmp_path), make_machine())


def test_a_path_has_no_profiles(tmp_path: Path, make_machine: MakeMachine) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(RecipeError, match="it has no profile 'cpu'"):
        resolve(str(path), make_machine(), profile="cpu")
    resolution = resolve(str(path), make_machine())
    assert (resolution.name, resolution.served_name, resolution.profile) == ("m", "m", "")
    source = model_source(resolution)
    assert source is not None
    assert (source.kind, source.path) == ("gguf", str(path))


def test_each_flag_stands_for_one_key_that_exists() -> None:
    known = settings(RunKeys())
    keys = [flag.key for flag in FLAGS]
    assert len(set(keys)) == len(keys)
    assert set(keys) <= set(known)
    assert len({flag.name for flag in FLAGS}) == len(FLAGS)


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_each_flag_reaches_its_key(flag: Flag, recipes: Path, make_machine: MakeMachine, tmp_path: Path) -> None:
    samples: dict[str, object] = {
        "kv.dtype": "float16",
        "kv.granularity": 32,
        "enforce": "determinism",
        "activations": "bfloat16",
        "scheduler.implementation": "reference",
        "scheduler.graphs": "dispatch",
        "log.level": "warning",
        "log.format": "json",
        "formats.tools": "glm47",
        "formats.reasoning": "glm45",
        "formats.thinking_switch": "enable_thinking",
        "api.embeddings.pooling": "mean",
        "api.embeddings.dimensions": "64, 128-256",
    }
    by_kind = {"text": str(tmp_path), "integer": 1, "number": 1.5, "switch": False, "gib": 0.5}
    stands_on = {"kv.storage_dir": {"host_cache_gb": 1.0}}
    stands_on["kv.storage_bytes"] = {"storage_dir": str(tmp_path), "host_cache_gb": 1.0}
    given = samples.get(flag.key, by_kind[flag.kind])
    flags = {**stands_on.get(flag.key, {}), flag.parameter: given}
    resolution = resolve("small", make_machine(), overrides=flag_values(flags))
    expected = 1 << 29 if flag.kind == "gib" else given
    assert settings(resolution.keys)[flag.key] == expected
    assert resolution.sources[flag.key] == flag.name


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        ("kv.storage_dir=/kv", r"SET kv\.storage_dir: kv\.storage_dir needs kv\.host_bytes.*set --host-cache-gb"),
        ("kv.storage_dir=/kv kv.host_bytes=0", "needs kv.host_bytes"),
        ("kv.storage_bytes=5GiB", r"SET kv\.storage_bytes: .* there is none; set --storage-dir"),
        (
            "kv.storage_dir=/kv kv.host_bytes=1GiB scheduler.prefix_cache=false",
            r"kv\.storage_dir needs scheduler\.prefix_cache",
        ),
    ],
)
def test_a_storage_without_what_it_stands_on_is_refused_by_name(
    recipes: Path, make_machine: MakeMachine, assignments: str, message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        resolve("small", make_machine(), overrides=set_values(assignments.split()))


def test_layers_may_each_say_a_part_of_the_tiers(recipes: Path, make_machine: MakeMachine) -> None:
    text = (recipes / "small.yaml").read_text()
    text = text.replace("  scheduler: {max_seqs: 16}", "  scheduler: {max_seqs: 16}\n  kv: {host_bytes: 64 MiB}")
    (recipes / "small.yaml").write_text(text)
    config = resolved_smoke(make_machine(), "kv.storage_dir=kv/store", "kv.storage_bytes=1GiB")
    assert config.kv.host_bytes == 64 << 20
    assert config.kv.storage_dir == str(Path.cwd() / "kv/store")
    assert config.kv.storage_bytes == 1 << 30


def test_offline_users_name_settings_like_flags(recipes: Path) -> None:
    config = resolve_model("small", {"max_num_seqs": 3, "kv_cache_gb": 0.01}, profile="smoke")
    assert (config.scheduler.max_seqs, config.kv.bytes) == (3, int(0.01 * (1 << 30)))
    with pytest.raises(RecipeError, match='unknown setting "max_seqs"; did you mean "max_num_seqs"'):
        resolve_model("small", {"max_seqs": 3})


def test_a_template_may_be_a_file_or_the_text_itself(recipes: Path, make_machine: MakeMachine, tmp_path: Path) -> None:
    machine = make_machine()

    def config(template: str) -> Resolution:
        return resolve("small", machine, profile="smoke", overrides=flag_values({"chat_template": template}))

    path = tmp_path / "template.jinja"
    path.write_text("{{ messages }}")
    assert prepare(config(str(path)), machine, no_progress).api.chat_template == str(path)
    assert prepare(config("{{ messages }}"), machine, no_progress).api.chat_template == "{{ messages }}"
    with pytest.raises(RecipeError, match=r"api.chat_template: .*absent.jinja is no file"):
        prepare(config(str(tmp_path / "absent.jinja")), machine, no_progress)
