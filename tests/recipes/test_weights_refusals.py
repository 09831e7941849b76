"""What the hub refuses, and what is wrong with the operator's settings: each with the line that mends it."""

import json
import socket
from pathlib import Path

import pytest
from stand_in_hub import Fault, StandInHub

from tokenspeed.recipes.document import RecipeError
from tokenspeed.recipes.schema import HuggingFaceWeights
from tokenspeed.recipes.weights import FetchError, fetch, source_of_path, survey
from tokenspeed.recipes.weights.hub import Hub, HubFailure, Token, find_token
from tokenspeed.recipes.weights.transfer import ATTEMPTS, wait_after

COMMIT = "c" * 40
SECRET = "hf_s3cret"
FILES = {"config.json": b"{}", "model.safetensors": bytes(1000)}
WEIGHTS = HuggingFaceWeights(kind="huggingface", repository="someone/model", revision=COMMIT)


def no_progress(what: str, done: int, total: int) -> None:
    """Tests have no terminal."""


def refused(weights: HuggingFaceWeights = WEIGHTS, token_file: Path | None = None) -> str:
    with pytest.raises(FetchError) as caught:
        fetch(weights, no_progress, token_file=token_file)
    assert SECRET not in str(caught.value)
    return str(caught.value)


def test_a_repository_that_is_not_there_or_private(hub: StandInHub) -> None:
    message = refused()
    assert message.startswith(
        f"someone/model could not be fetched from {hub.address}: HTTP 401 Unauthorized: it is private"
    )
    assert "no token was found" in message
    assert "--token-file FILE, HF_TOKEN_PATH=FILE or the secret /run/secrets/hf_token" in message


def test_a_token_that_opens_nothing(hub: StandInHub, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(f"{SECRET}\n")
    message = refused(token_file=token)
    assert f"there is no such repository, or it is private (the token of {token} was sent)" in message
    assert hub.log[-1].token == SECRET


def test_a_gated_repository_wants_its_terms_accepted(hub: StandInHub, tmp_path: Path) -> None:
    hub.add("someone/model", FILES, COMMIT, token=SECRET)
    message = refused()
    assert "HTTP 401 Unauthorized: it is gated, and no token was found" in message
    assert f"accept its terms at {hub.address}/someone/model" in message
    token = tmp_path / "token"
    token.write_text("hf_wrong")
    assert f"HTTP 403 Forbidden: it is gated, and the token of {token} was sent" in refused(token_file=token)
    token.write_text(SECRET)
    assert fetch(WEIGHTS, no_progress, token_file=token).kind == "folder"
    # The secret went to the hub and to no file.
    assert not any(SECRET.encode() in path.read_bytes() for path in (tmp_path / "hub").rglob("*") if path.is_file())


def test_a_revision_that_is_not_there(hub: StandInHub) -> None:
    hub.add("someone/model", FILES, COMMIT)
    message = refused(WEIGHTS.model_copy(update={"revision": "v2"}))
    assert (
        message == f"someone/model has no revision v2; {hub.address}/someone/model/commits/main shows which there are"
    )


def test_a_file_that_is_listed_and_not_there(hub: StandInHub) -> None:
    hub.add("someone/model", FILES, COMMIT)
    hub.fail("model.safetensors", Fault(status=404))
    assert "model.safetensors of someone/model could not be fetched" in refused()


@pytest.mark.parametrize(
    ("status", "mend"), [(429, "wait some minutes"), (500, "run the same again"), (503, "HF_ENDPOINT")]
)
def test_a_hub_that_stays_busy_is_given_up_after_some_tries(hub: StandInHub, status: int, mend: str) -> None:
    hub.add("someone/model", FILES, COMMIT)
    told: list[str] = []
    hub.fail("", *[Fault(status=status)] * ATTEMPTS)
    with pytest.raises(FetchError, match=rf"HTTP {status} .*") as caught:
        fetch(WEIGHTS, lambda what, *_: told.append(what))
    assert mend in str(caught.value)
    assert len(hub.downloads("")) == ATTEMPTS
    assert any(f"(HTTP {status} " in what for what in told)
    hub.fail("model.safetensors", *[Fault(status=status)] * ATTEMPTS)
    assert f"model.safetensors of someone/model could not be fetched from {hub.address}: HTTP {status}" in refused()
    hub.fail("", *[Fault(status=status)] * (ATTEMPTS - 1))
    assert fetch(WEIGHTS, no_progress).kind == "folder"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7.0),
        ({"RateLimit": '"api";r=0;t=55', "RateLimit-Policy": '"fixed window";"api";q=500;w=300'}, 55.0),
        ({"Retry-After": "86400"}, 300.0),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, 0.0),
        ({}, 0.0),
    ],
)
def test_the_hub_says_how_long_to_wait(hub: StandInHub, headers: dict[str, str], seconds: float) -> None:
    hub.fail("", Fault(status=429, headers=headers))
    with pytest.raises(HubFailure) as caught:
        Hub(Token()).list_files("someone/model", COMMIT)
    assert (caught.value.status, caught.value.transient, caught.value.wait_s) == (429, True, seconds)


def test_waits_grow_and_the_hubs_wish_wins() -> None:
    assert wait_after(HubFailure("busy", transient=True, wait_s=7.0), 1) == 7.0
    grows = [wait_after(HubFailure("busy", transient=True), failed) for failed in range(1, 8)]
    assert grows == sorted(grows)
    assert grows[-1] <= 30.0


def test_nobody_listens(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://user:{SECRET}@127.0.0.1:{port}")
    message = refused()
    assert f"could not be fetched from http://127.0.0.1:{port}: " in message
    assert "refused" in message
    assert "HF_ENDPOINT names a mirror" in message


@pytest.mark.parametrize(
    "siblings",
    [
        [{"rfilename": "config.json"}],
        [{"rfilename": "../../escape.json", "size": 2, "blobId": "0" * 40}],
        [{"rfilename": "config.json", "size": 2, "blobId": "../../escape"}],
    ],
)
def test_a_list_that_cannot_be_verified_is_refused(
    hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, siblings: list[dict[str, object]]
) -> None:
    hub.add("someone/model", FILES, COMMIT)
    body = json.dumps({"sha": COMMIT, "siblings": siblings}).encode()
    monkeypatch.setattr("stand_in_hub.listing", lambda *_: body)
    assert "nothing could be verified; name another mirror by HF_ENDPOINT" in refused()
    assert not (tmp_path / "hub").exists()


def test_an_endpoint_that_is_no_address(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "mirror.example")
    assert refused() == "HF_ENDPOINT is 'mirror.example', which is no address; write https://host (or unset it)"


def test_a_repository_without_weights_the_engine_reads(hub: StandInHub) -> None:
    hub.add("someone/model", {"config.json": b"{}", "pytorch_model.bin": bytes(1000)}, COMMIT)
    assert "someone/model holds neither *.safetensors nor *.gguf; its .bin files can run code" in refused()


def test_the_token_is_the_most_explicit_one(hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_token().value == ""
    (tmp_path / "hub").mkdir()
    for place, text in (("hub/token", "login"), ("secret", "mounted"), ("named", "path"), ("flag", "flag")):
        (tmp_path / place).write_text(text)
    assert find_token().value == "login"
    monkeypatch.setattr("tokenspeed.recipes.weights.hub.SECRET_FILE", tmp_path / "secret")
    assert find_token().value == "mounted"
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "named"))
    assert find_token().value == "path"
    monkeypatch.setenv("HF_TOKEN", SECRET)
    found = find_token()
    assert (found.value, found.origin) == (SECRET, "HF_TOKEN")
    assert SECRET not in repr(found)
    assert find_token(tmp_path / "flag").value == "flag"
    hub.add("someone/model", FILES, COMMIT)
    survey(WEIGHTS, no_progress)
    assert hub.log[-1].token == SECRET


@pytest.mark.parametrize("content", [b"", b"  \n", b"hf_s3cret\nhf_other", b"\xff\xfe"])
def test_a_token_file_that_holds_no_token(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(FetchError) as caught:
        find_token(path)
    assert str(path) in str(caught.value)
    assert SECRET not in str(caught.value)
    with pytest.raises(FetchError, match="there is no such token file; see --token-file"):
        find_token(tmp_path / "absent")


def test_a_folder_of_the_cache_says_which_one_is_meant(hub: StandInHub, tmp_path: Path) -> None:
    hub.add("someone/model", FILES, COMMIT)
    snapshot = Path(fetch(WEIGHTS, no_progress).path)
    for above in (tmp_path / "hub", tmp_path / "hub" / "hub", snapshot.parent.parent, snapshot.parent):
        with pytest.raises(RecipeError, match=rf"whose models lie deeper: give {snapshot}$"):
            source_of_path(str(above))
    assert source_of_path(str(snapshot)).kind == "folder"


def test_a_path_that_is_not_mounted_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = tmp_path / "model"
    monkeypatch.setattr("tokenspeed.recipes.weights.places._CONTAINER_MARKS", (tmp_path / "mark",))
    with pytest.raises(RecipeError, match=r"there is no such file or folder$"):
        source_of_path(str(absent))
    (tmp_path / "mark").touch()
    with pytest.raises(RecipeError, match=rf"in this container; mount it: --volume {absent}:{absent}:ro"):
        source_of_path(str(absent))
