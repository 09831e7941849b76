"""The container of a resolution, and the command lines of docker and podman that run it, as text.

Run with TOKENSPEED_UPDATE_SNAPSHOTS=1 to write the texts anew, and read the difference before it is committed.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tokenspeed.recipes.catalogue import load_hardware
from tokenspeed.recipes.container import ContainerSpec, container_spec
from tokenspeed.recipes.container_command import ContainerEngine, ContainerError, run_command, shell_lines
from tokenspeed.recipes.machine import Accelerator, Machine, described_machine
from tokenspeed.recipes.overrides import flag_values, set_values
from tokenspeed.recipes.resolve import Resolution, resolve

SNAPSHOTS = Path(__file__).parent / "snapshots"
ROOT = ContainerEngine(program="docker")
OPERATOR = ContainerEngine(program="docker", uid=1000)
ROOTLESS = ContainerEngine(program="podman", rootless=True, uid=1000)


def machine_with(found: Accelerator, **facts: object) -> Machine:
    """A machine at hand, not a described one."""
    return replace(Machine(cores=64, memory_bytes=1 << 40, free_bytes=1 << 40, isa=(), accelerators=(found,)), **facts)


NVIDIA = Accelerator(vendor="nvidia", arch="sm90", count=8, gb_per_device=140, description="NVIDIA H200")
AMD = Accelerator(vendor="amd", arch="gfx950", count=8, gb_per_device=288, description="AMD Instinct MI355X")
NPU = Accelerator(vendor="npu", arch="a3", count=16, gb_per_device=64, description="Ascend 910C")
MACHINES: dict[str, tuple[Machine, ContainerEngine, str]] = {
    "nvidia-cdi": (machine_with(NVIDIA, cdi_kinds=("nvidia.com/gpu",)), ROOT, "h200-int4"),
    "nvidia-docker-without-cdi": (machine_with(NVIDIA), OPERATOR, "h200-int4"),
    "amd-podman-rootless": (
        machine_with(AMD, device_files=("/dev/kfd", "/dev/dri"), device_groups=(992, 993)),
        ROOTLESS,
        "mi355x-mxfp4",
    ),
    "amd-docker": (
        machine_with(AMD, device_files=("/dev/kfd", "/dev/dri"), device_groups=(992, 993)),
        OPERATOR,
        "mi355x-mxfp4",
    ),
    "ascend": (described_machine(load_hardware("a3")), ROOT, "a3-w4a8"),
    "cpu": (replace(machine_with(NVIDIA), accelerators=()), OPERATOR, "smoke"),
}


def kimi(machine: Machine, profile: str, **flags: object) -> Resolution:
    return resolve("kimi-k2.5", machine, profile=profile, overrides=flag_values(flags))


@pytest.mark.parametrize("name", MACHINES)
def test_the_command_of_each_kind_of_machine(name: str, recipes: Path) -> None:
    machine, engine, profile = MACHINES[name]
    spec = container_spec(kimi(machine, profile), machine, portable=True)
    text = "\n".join(shell_lines(run_command(spec, engine, {"HTTPS_PROXY": "http://secret@proxy"}), spec.image)) + "\n"
    snapshot = SNAPSHOTS / f"container-{name}.txt"
    if os.environ.get("TOKENSPEED_UPDATE_SNAPSHOTS"):
        snapshot.write_text(text)
    assert text == snapshot.read_text(), "the command changed; TOKENSPEED_UPDATE_SNAPSHOTS=1 writes it anew"
    assert "secret" not in text


def cpu_spec(recipes: Path, *, flags: dict[str, object] | None = None, target: str = "small") -> ContainerSpec:
    machine = MACHINES["cpu"][0]
    profile = "cpu" if target == "small" else None
    return container_spec(resolve(target, machine, profile=profile, overrides=flag_values(flags or {})), machine)


def test_what_the_command_line_set_reaches_the_server(recipes: Path) -> None:
    flags = {"max_num_seqs": 3, "mixed_batches": False, "kv_cache_gb": 0.5, "drain_seconds": 7.0, "port": 8010}
    spec = cpu_spec(recipes, flags=flags)
    assert spec.arguments == (
        *("small", "--profile", "cpu"),
        *("--set", "kv.bytes=536870912"),
        *("--max-num-seqs", "3", "--no-mixed-batches"),
        *("--port", "8010", "--drain-seconds", "7.0"),
    )
    assert spec.grace_s == 17
    assert spec.name == "tokenspeed-8010"


def test_the_arguments_resolve_to_the_same_configuration(recipes: Path) -> None:
    """Round trip: the container's own command line gives the keys that were printed."""
    machine = MACHINES["cpu"][0]
    said = set_values(["kernels.gemm.linear=reference", "env.SOME_NAME=1", "scheduler.chunk=64"])
    given = resolve("small", machine, profile="cpu", overrides=said)
    arguments = list(container_spec(given, machine).arguments)
    assert arguments[:3] == ["small", "--profile", "cpu"]
    assignments = [value for option, value in zip(arguments[3::2], arguments[4::2], strict=True) if option == "--set"]
    flags = {
        option.removeprefix("--").replace("-", "_"): int(value)
        for option, value in zip(arguments[3::2], arguments[4::2], strict=True)
        if option != "--set"
    }
    again = resolve("small", machine, profile="cpu", overrides=set_values(assignments))
    assert flags == {"chunked_prefill_size": 64}
    assert again.keys.kernels == given.keys.kernels
    assert again.keys.env == given.keys.env


def test_the_operators_recipe_is_handed_in(recipes: Path) -> None:
    spec = cpu_spec(recipes)
    volumes = {volume.source: volume for volume in spec.volumes}
    assert volumes[str(recipes)].target == str(recipes)
    assert volumes[str(recipes)].read_only
    assert spec.environment["TOKENSPEED_RECIPES"] == str(recipes)


def test_weights_of_this_machine_are_handed_in_where_the_container_looks(
    recipes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "models" / "tiny.gguf"
    model.parent.mkdir()
    model.write_bytes(b"GGUF")
    spec = cpu_spec(recipes, target=str(model))
    assert spec.arguments == (str(model),)
    (weights,) = [volume for volume in spec.volumes if volume.source == str(model)]
    assert (weights.target, weights.read_only) == (str(model), True)


def test_secrets_are_files_and_never_variables(recipes: Path, tmp_path: Path) -> None:
    key, token = tmp_path / "key", tmp_path / "token"
    key.write_text("sk-very-secret\n")
    token.write_text("hf-very-secret\n")
    machine = MACHINES["cpu"][0]
    resolution = resolve("small", machine, profile="cpu", overrides=flag_values({"api_key_file": str(key)}))
    spec = container_spec(resolution, machine, token_file=str(token))
    command = run_command(spec, OPERATOR, {"HF_TOKEN": "hf-very-secret"})
    assert f"{key}:/run/secrets/api-key:ro" in command
    assert f"{token}:/run/secrets/hf-token:ro" in command
    assert "HF_TOKEN_PATH=/run/secrets/hf-token" in command
    assert command[command.index("--api-key-file") + 1] == "/run/secrets/api-key"
    assert "very-secret" not in " ".join(command)


def test_podman_without_a_cdi_specification_is_told_how_to_write_one() -> None:
    machine = machine_with(NVIDIA)
    spec = container_spec(kimi(machine, "h200-int4"), machine)
    with pytest.raises(ContainerError, match="nvidia-ctk cdi generate"):
        run_command(spec, ContainerEngine(program="podman"), {})


@pytest.mark.parametrize(
    ("host", "published"), [("127.0.0.1", "127.0.0.1:8000:8000"), ("0.0.0.0", "8000:8000"), ("::1", "[::1]:8000:8000")]
)
def test_the_port_is_published_where_the_operator_listens(recipes: Path, host: str, published: str) -> None:
    command = run_command(cpu_spec(recipes, flags={"host": host}), OPERATOR, {})
    assert command[command.index("--publish") + 1] == published
    assert "--host" not in command
