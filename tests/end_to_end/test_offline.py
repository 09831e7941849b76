"""LLM without HTTP runs the same engine and gives the same tokens."""

from running_server import RunningServer

from tokenspeed import LLM, AsyncLLM
from tokenspeed.frontend.request import GenerationRequest


def test_offline_tokens_equal_the_servers(server: RunningServer) -> None:
    prompts = ["The quick brown fox", "In 1969,"]
    with LLM("smollm2-135m", max_num_seqs=4) as llm:
        offline = llm.generate(prompts, max_tokens=24, temperature=0)
        sampled = llm.generate(prompts[0], max_tokens=16, seed=3, n=2)
        chat = llm.chat([{"role": "user", "content": "Say hello."}], max_tokens=8, temperature=0)
    for prompt, choices in zip(prompts, offline, strict=True):
        body = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": 24, "temperature": 0}
        assert server.client.post("/v1/completions", json=body).json()["choices"][0]["text"] == choices[0].text
    body = {"model": "smollm2-135m", "prompt": prompts[0], "max_tokens": 16, "seed": 3, "n": 2}
    served = server.client.post("/v1/completions", json=body).json()["choices"]
    assert [choice["text"] for choice in served] == [choice.text for choice in sampled[0]]
    assert chat[0].text and chat[0].finish_reason in ("stop", "length")


async def test_under_an_event_loop_tokens_come_as_they_are_made(server: RunningServer) -> None:
    pieces: list[str] = []
    async with AsyncLLM.launch("smollm2-135m", max_num_seqs=4) as llm:
        async for delta in llm.generate(GenerationRequest(prompt="In 1969,", max_tokens=12, temperature=0)):
            pieces.append(delta.text)
    body = {"model": "smollm2-135m", "prompt": "In 1969,", "max_tokens": 12, "temperature": 0}
    assert len(pieces) > 3
    assert "".join(pieces) == server.client.post("/v1/completions", json=body).json()["choices"][0]["text"]
