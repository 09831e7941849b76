"""Several processes that share a model, over HTTP: the tokens of one, and what becomes of them when one is killed."""

import json
import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from control_plane import submit
from in_process_engine import Run, run_requests
from running_server import RunningServer, run_cli, until

from tokenspeed.messages import SamplingParameters
from tokenspeed.recipes.prepare import resolve_model

SIZES = ("--profile", "smoke", "--kv-cache-gb", "0.02", "--max-num-seqs", "4", "--threads", "1")
SETTINGS = {"kv_cache_gb": 0.02, "max_num_seqs": 4, "threads": 1}
TWO = ("--tensor-parallel-size", "2")
LENGTHS = (3, 40, 71)
NEW_TOKENS = 24
TOLERANCE = 2e-5


def prompt_of(length: int) -> list[int]:
    return [(7 * i * i + 3 * i + length) % 250 + 1 for i in range(length)]


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, and log-probabilities of the prompt's but for its first, and of these."""

    tokens: list[int]
    logprobs: list[float]


def answers_of_one(recipe: str) -> list[Answer]:
    """Of one rank, in this process."""
    greedy = SamplingParameters(top_k=1, logprobs=0, prompt_logprobs=0)
    asked = [submit(handle, prompt_of(length), NEW_TOKENS, sampling=greedy) for handle, length in enumerate(LENGTHS, 1)]
    run = run_requests(resolve_model(recipe, SETTINGS, profile="smoke"), asked)
    return [
        Answer(run.tokens[one.handle], [*prompt_logprobs(run, one.handle), *output_logprobs(run, one.handle)])
        for one in asked
    ]


def prompt_logprobs(run: Run, handle: int) -> list[float]:
    parts = [o.prompt_logprobs for o in run.channel.outputs if o.handle == handle and o.prompt_logprobs]
    return [token.logprob for part in parts for token in part.tokens]


def output_logprobs(run: Run, handle: int) -> list[float]:
    return [token.logprob for o in run.channel.outputs if o.handle == handle for token in o.logprobs]


def served(server: RunningServer, length: int) -> Answer:
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt_of(length), "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    answer = server.client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    meta = answer.json()["meta_info"]
    logprobs = [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]
    return Answer(answer.json()["output_ids"], [logprob for logprob, *_ in logprobs])


def check_answers(server: RunningServer, expected: list[Answer]) -> None:
    """The same in company; log-probabilities of prompts need every rank."""
    with ThreadPoolExecutor(len(LENGTHS)) as pool:
        answers = list(pool.map(lambda length: served(server, length), LENGTHS))
    for answer, one, length in zip(answers, expected, LENGTHS, strict=True):
        assert answer.tokens == one.tokens
        assert len(answer.logprobs) == length - 1 + NEW_TOKENS
        np.testing.assert_allclose(answer.logprobs, one.logprobs, atol=TOLERANCE)


def ranks_of(server: RunningServer) -> dict[int, int]:
    """Process ids by rank."""
    pids = server.engine_pids()
    arguments = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in pids}
    return {int(words[words.index(b"tokenspeed.launch.rank") + 1]): pid for pid, words in arguments.items()}


def test_two_processes_with_whole_experts_serve_the_tokens_of_one_and_die_together(tmp_path: Path) -> None:
    """DeepSeek-V3's architecture: latent attention, experts, a shared one."""
    expected = answers_of_one("kimi-k2.5")
    environment = {"TOKENSPEED_CACHE": str(tmp_path), "TOKENSPEED_GUARD_CONTROL_PLANE": "1"}
    with RunningServer("kimi-k2.5", *SIZES, *TWO, "--set", "parallel.ep=2", environment=environment) as server:
        check_answers(server, expected)
        sampling = {"regex": "[0-9]{3}-[0-9]{4}", "max_new_tokens": 40}
        constrained = server.client.post("/generate", json={"text": "Call", "sampling_params": sampling}).json()
        assert re.fullmatch(sampling["regex"], constrained["text"]), constrained

        ranks = ranks_of(server)
        assert sorted(ranks) == [0, 1]
        long = {"model": server.model, "prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True}
        seen: list[str] = []
        with server.client.stream("POST", "/v1/completions", json=long) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    seen.append(line.removeprefix("data: "))
                    if len(seen) == 5:
                        os.kill(ranks[1], signal.SIGKILL)
        assert "rank 1 of 2 of the engine was ended by SIGKILL" in json.loads(seen[-2])["error"]["message"]
        assert server.client.get("/ready").status_code == 503
        assert server.client.get("/live").status_code == 200
        until(lambda: server.client.get("/ready").status_code == 200, "both ranks are back")
        assert not {*ranks.values()} & {*ranks_of(server).values()}
        check_answers(server, expected)
        (bundle,) = (tmp_path / "crashes").iterdir()
        assert json.loads((bundle / "crash.json").read_text())["pid"] == ranks[1]
        assert "rank 1" in (bundle / "rank1.log").read_text()

        begun: list[str] = []

        def stream() -> None:
            with server.client.stream("POST", "/v1/completions", json=long | {"max_tokens": 60}) as open_stream:
                begun.extend(line for line in open_stream.iter_lines() if line.startswith("data: "))

        reader = threading.Thread(target=stream)
        reader.start()
        until(lambda: server.state()["snapshot"]["running"] == 1, "a stream runs")
        assert server.stop() == 0  # drained: the stream was finished
        reader.join(20)
        assert begun[-1] == "data: [DONE]"
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        pytest.param("smollm2-135m", TWO, id="llama"),
        pytest.param("inkling", TWO, id="qwen3_moe"),
        pytest.param("kimi-k2.5", TWO, id="deepseek_v3"),
        pytest.param("inkling", ("--tensor-parallel-size", "4", "--overlap-depth", "1"), id="qwen3_moe in four"),
        pytest.param("qwen3.8-27b", TWO, id="qwen3_5"),
    ],
)
def test_processes_serve_the_answers_of_one(recipe: str, flags: tuple[str, ...]) -> None:
    expected = answers_of_one(recipe)
    with RunningServer(recipe, *SIZES, *flags) as server:
        check_answers(server, expected)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--tensor-parallel-size", "3"), "8 attention heads are not a multiple of 3; tp may be 1, 2, 4, 8"),
        pytest.param(
            ("--tensor-parallel-size", "2", "--set", "parallel.ep=2"),
            "parallel.ep is 2: the model has no experts",
            marks=pytest.mark.long,
        ),
    ],
)
def test_what_cannot_be_divided_is_named_before_anything_starts(flags: tuple[str, ...], says: str) -> None:
    ended = run_cli("serve", "smollm2-135m", "--profile", "smoke", *flags)
    assert ended.returncode == 2
    assert says in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
