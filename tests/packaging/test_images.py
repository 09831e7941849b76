"""What holds for every image's Dockerfile: base, user, start, stop, health, labels, no toolchain, what is copied."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from dockerfile import IMAGES, final_stage, global_defaults, instructions, values, values_of_arg

from scripts import image_build, image_facts
from scripts.image_facts import ROOT, VENDORS

CACHES = ("HOME", "XDG_CACHE_HOME", "TOKENSPEED_CACHE", "HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


@pytest.mark.parametrize("vendor", VENDORS)
def test_the_base_is_the_first_of_the_allow_list_and_has_a_tag(vendor: str) -> None:
    listed = image_build.bases(vendor)
    assert global_defaults(vendor)["BASE_IMAGE"] == listed[0].image
    for base in listed:
        name, _, tag = base.image.rpartition(":")
        assert "/" in name
        assert "." in name.split("/")[0], f"{base.image} must name its registry"
        assert tag
        assert tag != "latest"
        assert base.digest == "" or re.fullmatch(r"sha256:[0-9a-f]{64}", base.digest)


@pytest.mark.parametrize("vendor", VENDORS)
def test_every_stage_starts_from_the_listed_base_or_from_nothing(vendor: str) -> None:
    allowed = {"${BASE_IMAGE}", "${BUILDER_IMAGE}", "scratch"}
    froms = [rest.split()[0] for rest in values(instructions(vendor), "FROM")]
    assert len(froms) >= 2
    assert set(froms) <= allowed
    assert global_defaults(vendor)["BUILDER_IMAGE"] == global_defaults(vendor)["BASE_IMAGE"]


@pytest.mark.parametrize("soc", ["a3", "910b", "950"])
def test_the_chip_chooses_the_ascend_base(soc: str) -> None:
    template = dict(values_of_arg("npu"))["BASE_IMAGE"]
    assert image_build.choose_base("npu", soc).image == template.replace("${SOC}", soc)


@pytest.mark.parametrize("vendor", VENDORS)
def test_the_final_stage_runs_as_a_user_that_group_0_stands_in_for(vendor: str) -> None:
    stage = final_stage(vendor)
    assert values(stage, "USER") == ["10001:0"]
    everything = " ".join(rest for keyword, rest in instructions(vendor) if keyword == "RUN")
    assert "install -d -o 10001 -g 0 -m 2775 /cache" in everything
    assert values(stage, "VOLUME") == ["/cache"]
    environment = dict(re.findall(r"(\w+)=(\S+)", values(stage, "ENV")[0]))
    for name in CACHES:
        assert environment[name] == "/cache" or environment[name].startswith("/cache/"), name
    assert environment["TOKENSPEED_UMASK"] == "002"
    assert environment["PIP_CONSTRAINT"] == "/opt/tokenspeed/constraints.txt"


@pytest.mark.parametrize("vendor", VENDORS)
def test_the_final_stage_says_how_it_starts_stops_and_is_asked_for_its_health(vendor: str) -> None:
    stage = final_stage(vendor)
    assert json.loads(values(stage, "ENTRYPOINT")[0]) == ["tokenspeed", "serve", "--host", "0.0.0.0"]
    assert json.loads(values(stage, "CMD")[0])
    assert values(stage, "STOPSIGNAL") == ["SIGTERM"]
    assert values(stage, "EXPOSE") == ["8000"]
    (health,) = values(stage, "HEALTHCHECK")
    program = json.loads(health[health.index("[") :])
    assert program[0] == "python"
    assert "http://127.0.0.1:8000/live" in program[-1]
    compile(program[-1], "healthcheck", "exec")


@pytest.mark.parametrize("vendor", VENDORS)
def test_the_labels_are_complete(vendor: str) -> None:
    (text,) = values(final_stage(vendor), "LABEL")
    labels = dict(re.findall(r'([a-z.-]+)="([^"]*)"', text))
    ours = {"vendor", "architectures", "minimum-driver", "engine-version", "recipes"}
    assert {f"tokenspeed.{name}" for name in ours} <= set(labels)
    theirs = {"title", "description", "vendor", "licenses", "version", "revision", "created", "base.name"}
    assert {f"org.opencontainers.image.{name}" for name in theirs} <= set(labels)
    assert all(labels.values())
    assert labels["tokenspeed.vendor"] == vendor
    # An argument that the stage does not declare is empty there.
    declared = {rest.partition("=")[0] for rest in values(final_stage(vendor), "ARG")}
    assert set(re.findall(r"\$\{(\w+)\}", text)) <= declared


@pytest.mark.parametrize("vendor", VENDORS)
def test_the_final_stage_brings_no_toolchain(vendor: str) -> None:
    installed = " ".join(rest for rest in values(final_stage(vendor), "RUN") if "apt-install" in rest)
    assert "g++" not in installed
    assert "build-essential" not in installed
    assert ("gcc" in installed) == (vendor == "nvidia")  # AMD's base has one
    assert "g++" not in (IMAGES / vendor / "Dockerfile").read_text()


@pytest.mark.parametrize("vendor", VENDORS)
def test_the_builder_installs_from_locks_and_our_own_from_the_checkout(vendor: str) -> None:
    text = "\n".join(rest for keyword, rest in instructions(vendor) if keyword == "RUN")
    for lock in (f"images/{vendor}/requirements.lock", "images/common/build.lock"):
        assert re.search(rf"pip install --no-deps --require-hashes --requirement {lock}", text), lock
    assert f"images/common/wheels.sh {vendor}" in text
    assert f"check_environment.py {vendor} images/{vendor}/constraints.txt" in text
    installs = re.findall(r"pip install (.+?)(?=&&|$)", text, flags=re.MULTILINE)
    assert all("--no-deps" in line and ("--require-hashes" in line or "constraints.txt" in line) for line in installs)
    wheels = (IMAGES / "common" / "wheels.sh").read_text()
    pip = [line for line in wheels.splitlines() if "-m pip" in line]
    assert len(pip) == 2
    assert all("--no-index" in line and "--no-deps" in line for line in pip)


@pytest.mark.parametrize("vendor", VENDORS)
def test_copied_files_exist_and_reach_the_build(vendor: str) -> None:
    let_in = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for rest in values(instructions(vendor), "COPY"):
        words = [word for word in rest.split() if not word.startswith("--")]
        if "--from" in rest:
            continue
        for source in words[:-1]:
            assert (ROOT / source).exists(), source
            assert source == "." or any(
                Path(source).match(pattern) or Path(source) == Path(pattern) for pattern in let_in
            )


def test_the_build_context_is_a_list_of_what_goes_in() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    let_in = {line[1:] for line in lines if line.startswith("!")}
    folders = {folder.split("/")[0] for vendor in VENDORS for folder in image_facts.folders(vendor) if folder != "."}
    # What the base distribution is built from (its wheel's files, its readme and licences).
    base = {"pyproject.toml", "README.md", "LICENSE-APACHE", "LICENSE-MIT", "tokenspeed", "configs"}
    assert folders | base <= let_in
    assert not {".git", ".venv", "tests", "docs", "scripts", "build"} & let_in


def test_no_dockerfile_wants_what_old_builders_lack() -> None:
    for vendor in VENDORS:
        text = (IMAGES / vendor / "Dockerfile").read_text()
        assert "# syntax=" not in text
        assert "<<" not in text
        assert "--link" not in text


def test_hadolint_finds_nothing() -> None:
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = str(beside) if beside.is_file() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip('no hadolint: "make setup-lint" brings it')
    files = [str(IMAGES / vendor / "Dockerfile") for vendor in VENDORS]
    done = subprocess.run(
        [hadolint, "--no-color", "--config", str(IMAGES / "hadolint.yaml"), *files],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
