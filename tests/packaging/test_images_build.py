"""How images are built: bases, budgets, the bake file, the command line, and what it hands over."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from dockerfile import IMAGES, instructions, values, values_of_arg

from scripts import image_build, image_facts
from scripts.image_facts import ROOT, VENDORS


def bake_blocks() -> dict[str, str]:
    """The bodies of the bake file's targets and groups."""
    text = (IMAGES / "docker-bake.hcl").read_text()
    return {
        f"{kind} {name}": body
        for kind, name, body in re.findall(
            r'^(target|group) "([\w-]+)" \{\n(.*?)^\}', text, flags=re.MULTILINE | re.DOTALL
        )
    }


def bake_list(body: str, key: str) -> list[str]:
    """A list of strings in a block."""
    found = re.search(rf"^  {key}\s*= (\[.*\])$", body, flags=re.MULTILINE)
    return json.loads(found[1]) if found else []


def test_the_bake_file_has_every_vendor_with_its_platforms() -> None:
    blocks = bake_blocks()
    listed: dict[str, Any] = tomllib.loads((IMAGES / "bases.toml").read_text())
    assert bake_list(blocks["group default"], "targets") == list(VENDORS)
    for vendor in VENDORS:
        body = blocks["target npu-common" if vendor == "npu" else f"target {vendor}"]
        assert bake_list(body, "platforms") == listed[vendor]["platforms"]
        assert f'dockerfile = "images/{vendor}/Dockerfile"' in body
    socs = [base.soc for base in image_build.bases("npu")]
    assert bake_list(blocks["group npu"], "targets") == [f"npu-{soc}" for soc in socs]
    for soc in socs:
        assert f'args     = {{ SOC = "{soc}" }}' in blocks[f"target npu-{soc}"]
        assert f"-{soc}" in bake_list(blocks[f"target npu-{soc}"], "tags")[0]


def test_bakes_second_file_pins_every_target_and_no_other() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.image_build", "--bake"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    targets = json.loads(done.stdout)["target"]
    assert {f"target {name}" for name in targets} == {
        name for name in bake_blocks() if name.startswith("target ") and "common" not in name
    }
    for name, target in targets.items():
        vendor, _, soc = name.partition("-")
        assert target["args"]["BASE_IMAGE"] == image_build.choose_base(vendor, soc).reference
        assert target["args"]["RECIPES"] == image_facts.recipes_hash(ROOT / "configs")


@pytest.mark.parametrize("vendor", VENDORS)
def test_every_image_has_a_budget(vendor: str) -> None:
    budget = tomllib.loads((IMAGES / "budgets.toml").read_text())[vendor]
    assert 0 < budget["own_mb"] < budget["image_mb"]


def test_a_pinned_digest_is_what_is_built_on(tmp_path: Path) -> None:
    digest = "sha256:" + "a" * 64
    text = (IMAGES / "bases.toml").read_text().replace('digest = ""', f'digest = "{digest}"')
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "bases.toml").write_text(text)
    assert image_build.choose_base("cpu", root=tmp_path).reference.endswith(f"slim@{digest}")


def build_command(environment: dict[str, str], engine: str = "podman") -> list[str]:
    """The command for the CPU image."""
    base = image_build.choose_base("cpu")
    return image_build.build_command(engine, "cpu", base, "tokenspeed-cpu", environment, [])


def test_the_command_hands_over_indexes_and_secrets(tmp_path: Path) -> None:
    bundle = tmp_path / "corporate.pem"
    bundle.write_text("")
    command = build_command(
        {"PIP_INDEX_URL": "https://mirror.example/simple", "CA_BUNDLE": str(bundle), "HOME": "/root"}
    )
    assert "PIP_INDEX_URL=https://mirror.example/simple" in command
    assert f"id=ca_bundle,src={bundle}" in command
    assert "--format=docker" in command
    assert not [word for word in command if word.startswith(("TORCH_INDEX", "HOME"))]
    assert "--format=docker" not in build_command({}, "docker")
    declared = {name for vendor in VENDORS for name, _ in values_of_arg(vendor)}
    declared |= {rest for vendor in VENDORS for rest in values(instructions(vendor), "ARG")}
    assert {word.partition("=")[0] for word in command if re.match(r"[A-Z_]+=", word)} <= declared


def test_a_secret_that_is_not_there_is_named() -> None:
    with pytest.raises(image_build.ImageError, match="PIP_CONF=/no/such: there is no such file"):
        build_command({"PIP_CONF": "/no/such"})


def test_every_secret_is_mounted_somewhere() -> None:
    for name in image_build.SECRET_VARIABLES:
        for vendor in VENDORS:
            text = (IMAGES / vendor / "Dockerfile").read_text()
            assert re.search(rf"--mount=type=secret,id={name.lower()}[ ,]", text), name


def test_an_unknown_chip_is_answered_with_the_known_ones() -> None:
    with pytest.raises(image_build.ImageError, match="'310p'; known: a3, 910b, 950"):
        image_build.choose_base("npu", "310p")
