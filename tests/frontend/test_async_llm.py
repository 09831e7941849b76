"""AsyncLLM over a scripted engine: what is submitted, what comes back, and how things end."""

import asyncio
from collections.abc import Iterator

import pytest
from scripted_engine import CONTEXT, EOS, VOCABULARY, Stack, logprob, say, scripted_config, tokens

from tokenspeed.frontend.collect import collect
from tokenspeed.frontend.errors import ContextLengthExceeded, EngineFailed, EngineUnavailable, RequestRefused
from tokenspeed.frontend.request import Delta, GenerationRequest
from tokenspeed.messages import EngineOutput, PromptLogprobs, RequestOutput, Submit


async def text_of(stack: Stack, request: GenerationRequest) -> str:
    return "".join([delta.text async for delta in stack.llm.generate(request)])


async def test_a_request_and_its_answer(stack: Stack) -> None:
    stack.engine.script = say("grüße 🙂", each=3)
    request = GenerationRequest(
        prompt="Hi", request_id="mine", max_tokens=40, priority=3, cache_salt="tenant", logit_bias={5: 1.5}
    )
    deltas: list[Delta] = [delta async for delta in stack.llm.generate(request)]
    assert "".join(delta.text for delta in deltas) == "grüße 🙂"
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["stop"]
    (submit,) = stack.engine.submits
    assert memoryview(submit.prompt).cast("i").tolist() == [256, 72, 105]
    assert (submit.request_id, submit.max_new_tokens, submit.declared) == ("mine", 40, True)
    assert (submit.priority, submit.namespace, submit.handle) == (3, b"tenant", 1)
    assert submit.sampling.stop_token_ids == (EOS,) and submit.sampling.logit_bias == {5: 1.5}
    assert stack.llm.open_choices == 0 and stack.engine.aborts == [] and stack.engine.finishes == []


async def test_usage_counts_everything_once(stack: Stack) -> None:
    stack.engine.script = say("abc")
    generation = await stack.llm.start([GenerationRequest(prompt="Hi", n=2), GenerationRequest(prompt="You", n=2)])
    results = await collect(generation)
    assert [result.index for result in results] == [0, 1, 2, 3]
    usage = generation.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3 + 4, 4 * 4, 2 * 3)


async def test_without_max_tokens_the_rest_of_the_context_is_asked_for(stack: Stack) -> None:
    await text_of(stack, GenerationRequest(prompt=[1, 2, 3]))
    assert (stack.engine.submits[0].max_new_tokens, stack.engine.submits[0].declared) == (CONTEXT - 3, False)


async def test_greedy_is_top_k_one(stack: Stack) -> None:
    for temperature in (0, 1e-30):
        await text_of(stack, GenerationRequest(prompt="x", temperature=temperature, top_k=50, top_p=0.5))
    await text_of(stack, GenerationRequest(prompt="x", temperature=0.5, top_k=50))
    parameters = [(s.sampling.temperature, s.sampling.top_k) for s in stack.engine.submits]
    assert parameters == [(1.0, 1), (1.0, 1), (0.5, 50)]


async def test_seeds(stack: Stack) -> None:
    await text_of(stack, GenerationRequest(prompt="x", n=3, seed=-1))
    for _ in range(2):
        await text_of(stack, GenerationRequest(prompt="x", n=2))
    given = stack.engine.submits[:3]
    assert [(s.sampling.seed, s.sampling.choice) for s in given] == [(2**64 - 1, at) for at in range(3)]
    drawn = [s.sampling.seed for s in stack.engine.submits[3:]]
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
    again = Stack(scripted_config())  # the same seed in the configuration draws the same seeds
    await again.new_engine()
    await text_of(again, GenerationRequest(prompt="x"))
    assert again.engine.submits[0].sampling.seed == drawn[0]
    await again.close()


async def test_ending_tokens(stack: Stack) -> None:
    stack.engine.script = say("ab", ends=False)
    await text_of(stack, GenerationRequest(prompt="x", max_tokens=2, ignore_eos=True, stop_token_ids=(9, 9, 8)))
    await text_of(stack, GenerationRequest(prompt="x", max_tokens=2, stop_token_ids=(EOS, 8)))
    assert [s.sampling.stop_token_ids for s in stack.engine.submits] == [(9, 8), (EOS, 8)]


async def test_a_stop_string_sends_finish_with_what_to_keep(stack: Stack) -> None:
    stack.engine.script = lambda submit: tokens(submit, list(b"one EN"), list(b"D two"), list(b"three"))
    generation = await stack.llm.start([GenerationRequest(prompt="x", stop=("END",), logprobs=-1)])
    (result,) = await collect(generation)
    assert (result.text, result.finish_reason, result.matched_stop) == ("one ", "stop", "END")
    await stack.engine.heard(lambda: stack.engine.finishes)
    assert [(f.handle, f.keep) for f in stack.engine.finishes] == [(stack.engine.submits[0].handle, 4)]
    assert generation.usage.completion_tokens == 4
    assert stack.engine.aborts == []


async def test_no_finish_where_the_engine_ended_the_choice_itself(stack: Stack) -> None:
    stack.engine.script = say("the END", each=20)
    assert await text_of(stack, GenerationRequest(prompt="x", stop=("END",))) == "the "
    stack.engine.script = say("y")
    await text_of(stack, GenerationRequest(prompt="x"))
    assert stack.engine.finishes == []


async def test_closing_the_iterator_aborts(stack: Stack) -> None:
    stack.engine.script = lambda submit: tokens(submit, *([65] for _ in range(100_000)))
    iterator = stack.llm.generate(GenerationRequest(prompt="x", n=2, max_tokens=400))
    assert (await anext(iterator)).text == "A"
    await iterator.aclose()  # type: ignore[attr-defined]
    await stack.engine.heard(lambda: len(stack.engine.aborts) == 2)
    assert stack.llm.open_choices == 0


async def test_cancelling_the_task_aborts(stack: Stack) -> None:
    stack.engine.pause()
    task = asyncio.create_task(text_of(stack, GenerationRequest(prompt="x")))
    await stack.engine.heard(lambda: stack.engine.submits)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await stack.engine.heard(lambda: stack.engine.aborts)
    assert stack.llm.open_choices == 0


async def test_best_of_returns_the_most_probable(stack: Stack) -> None:
    def script(submit: Submit) -> Iterator[RequestOutput]:
        letter = [70, 65, 90][submit.sampling.choice]  # the lower the id, the more probable in this script
        yield RequestOutput(
            handle=submit.handle, token_ids=[letter], logprobs=[logprob(letter, 0)], finish_reason="length"
        )

    stack.engine.script = script
    deltas = [delta async for delta in stack.llm.generate(GenerationRequest(prompt="x", n=2, best_of=3, max_tokens=1))]
    assert [(delta.index, delta.text, delta.logprobs) for delta in deltas] == [(0, "A", []), (1, "F", [])]
    assert [s.sampling.logprobs for s in stack.engine.submits] == [0, 0, 0]


async def test_prompt_logprobs_are_asked_for_once_and_come_first(stack: Stack) -> None:
    stack.engine.script = say("a")
    generation = await stack.llm.start([GenerationRequest(prompt=[5, 6, 7], n=2, prompt_logprobs=1)])
    assert (await generation.next_batch()) and generation.prompts[0].complete
    await collect(generation)
    assert sorted(generation.prompts[0].logprobs) == [1, 2]
    assert [s.sampling.prompt_logprobs for s in stack.engine.submits] == [1, -1]


async def test_deltas_wait_for_the_prompts_logprobs(stack: Stack) -> None:
    stack.engine.pause()
    generation = await stack.llm.start([GenerationRequest(prompt=[5, 6, 7], n=2, prompt_logprobs=0)])
    first, second = generation.live

    def round_(*outputs: RequestOutput) -> None:
        stack.llm.on_output(EngineOutput(version=1, round=1, outputs=list(outputs)))

    def slice_(at: int) -> RequestOutput:
        return RequestOutput(handle=first, prompt_logprobs=PromptLogprobs(at, [logprob(at, 0)]))

    reading = asyncio.create_task(generation.next_batch())
    await asyncio.sleep(0)
    round_(slice_(1), RequestOutput(handle=second, token_ids=[66]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not reading.done(), "the second choice has a token, but the prompt's log-probabilities are not all here"
    round_(slice_(2), RequestOutput(handle=first, token_ids=[65]))
    assert [(delta.index, delta.text) for delta in await reading] == [(1, "B"), (0, "A")]
    generation.cancel()


async def test_a_lost_engine_ends_every_request_with_the_cause(stack: Stack) -> None:
    stack.engine.script = lambda submit: tokens(submit, [65])
    iterator = stack.llm.generate(GenerationRequest(prompt="x"))
    assert (await anext(iterator)).text == "A"
    stack.connection.engine_lost("killed by SIGKILL")
    with pytest.raises(EngineFailed, match="SIGKILL") as raised:
        await anext(iterator)
    assert raised.value.code == "engine_error"
    with pytest.raises(EngineUnavailable, match="SIGKILL"):
        await stack.llm.start([GenerationRequest(prompt="x")])
    await stack.new_engine()
    assert await text_of(stack, GenerationRequest(prompt="x")) == "hello"
    assert stack.llm.engine.last_error == "" and stack.llm.engine.lost == 1


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("context_length_exceeded", RequestRefused),
        ("capacity", RequestRefused),
        ("draining", EngineUnavailable),
        ("nan_logits", EngineFailed),
        ("", EngineFailed),
    ],
)
async def test_what_the_engine_says_of_one_request(stack: Stack, code: str, error: type[Exception]) -> None:
    def script(submit: Submit) -> Iterator[RequestOutput]:
        if submit.sampling.choice == 1:
            yield RequestOutput(handle=submit.handle, finish_reason="error", error="because", error_code=code)
        yield from tokens(submit, [65], [66])

    stack.engine.script = script
    with pytest.raises(error, match="because"):
        await text_of(stack, GenerationRequest(prompt="x", n=2))
    await stack.engine.heard(lambda: stack.engine.aborts)
    assert stack.engine.aborts == [stack.engine.submits[0].handle], "the other choice is aborted, the failed one is not"
    assert stack.llm.open_choices == 0


@pytest.mark.parametrize(
    ("request_", "field", "says"),
    [
        (GenerationRequest(prompt=""), "prompt", "empty"),
        (GenerationRequest(prompt=[]), "prompt", "empty"),
        (GenerationRequest(prompt=[VOCABULARY]), "prompt", f"0 to {VOCABULARY - 1}"),
        (GenerationRequest(prompt=[-1]), "prompt", "token -1"),
        (GenerationRequest(prompt="x", logit_bias={VOCABULARY: 1.0}), "logit_bias", f"token {VOCABULARY}"),
        (GenerationRequest(prompt="x", stop_token_ids=(5000,)), "stop_token_ids", "5000"),
        (GenerationRequest(prompt="x", temperature=-1), "temperature", "-1"),
        (GenerationRequest(prompt="x", top_p=0), "top_p", "above 0"),
        (GenerationRequest(prompt="x", top_k=-1), "top_k", "0 "),
        (GenerationRequest(prompt="x", min_p=1), "min_p", "below 1"),
        (GenerationRequest(prompt="x", repetition_penalty=0), "repetition_penalty", "above 0"),
        (GenerationRequest(prompt="x", max_tokens=0), "max_tokens", "at least 1"),
        (GenerationRequest(prompt="x", max_tokens=4, min_tokens=5), "min_tokens", "at most 4"),
        (GenerationRequest(prompt="x", n=0), "n", "1 to"),
        (GenerationRequest(prompt="x", n=3, best_of=2), "best_of", "n to"),
        (GenerationRequest(prompt="x", logprobs=21), "logprobs", "20"),
        (GenerationRequest(prompt="x", stop=("",)), "stop", "empty string"),
    ],
)
async def test_what_cannot_run_is_refused_by_field(
    stack: Stack, request_: GenerationRequest, field: str, says: str
) -> None:
    with pytest.raises(RequestRefused, match=says) as raised:
        await stack.llm.start([GenerationRequest(prompt="fine"), request_])
    assert raised.value.param == field
    assert stack.llm.open_choices == 0 and stack.engine.submits == []


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "fits"),
    [
        (CONTEXT - 1, 1, True),
        (CONTEXT - 1, None, True),
        (CONTEXT, None, False),
        (CONTEXT - 1, 2, False),
        (9 * CONTEXT, 1, False),
    ],
)
async def test_the_context_is_never_cut_in_silence(
    stack: Stack, prompt_tokens: int, max_tokens: int | None, fits: bool
) -> None:
    request = GenerationRequest(prompt=[65] * prompt_tokens, max_tokens=max_tokens)
    if fits:
        assert await text_of(stack, request) != ""
        return
    with pytest.raises(ContextLengthExceeded) as raised:
        await stack.llm.start([request])
    assert str(CONTEXT) in raised.value.message and str(prompt_tokens) in raised.value.message
    assert "-" not in raised.value.message and raised.value.code == "context_length_exceeded"


async def test_chat(stack: Stack) -> None:
    ids = await stack.llm.chat_prompt([{"role": "user", "content": "é"}])
    assert ids == [256, 258, *b"user\n", 0xC3, 0xA9, 259, 10, 258, *b"assistant\n"]


async def test_draining_lets_the_open_ones_finish(stack: Stack) -> None:
    stack.engine.pause()
    task = asyncio.create_task(text_of(stack, GenerationRequest(prompt="x")))
    await stack.engine.heard(lambda: stack.engine.submits)
    draining = asyncio.create_task(stack.llm.drain(grace_s=30))
    await asyncio.sleep(0)
    with pytest.raises(EngineUnavailable, match="shutting down"):
        await stack.llm.start([GenerationRequest(prompt="y")])
    stack.engine.resume()
    assert await draining == 0 and await task == "hello"
    await stack.engine.heard(lambda: stack.engine.drained)


async def test_draining_cuts_what_does_not_finish(stack: Stack) -> None:
    stack.engine.pause()
    task = asyncio.create_task(text_of(stack, GenerationRequest(prompt="x", n=2)))
    await stack.engine.heard(lambda: stack.engine.submits)
    assert await stack.llm.drain(grace_s=0) == 2
    with pytest.raises(EngineFailed, match="shut down"):
        await task
    await stack.engine.heard(lambda: stack.engine.drained and len(stack.engine.aborts) == 2)


async def test_not_ready_names_the_phase() -> None:
    stack = Stack()
    with pytest.raises(EngineUnavailable, match="phase: starting"):
        await stack.llm.start([GenerationRequest(prompt="x")])
    engine = await stack.new_engine(ready=False)
    await engine.send_status("load", done=2, total=9)
    while stack.llm.engine.phase != "load":
        await stack.llm.engine.changed()
    with pytest.raises(EngineUnavailable, match="phase: load"):
        await stack.llm.start([GenerationRequest(prompt="x")])
    await engine.send_status("failed", error="no memory for the weights")
    while stack.llm.engine.phase != "failed":
        await stack.llm.engine.changed()
    with pytest.raises(EngineUnavailable, match="no memory for the weights"):
        await stack.llm.start([GenerationRequest(prompt="x")])
    await stack.close()


async def test_a_model_without_a_template_says_so_at_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Known failure 33, first half."""
    monkeypatch.setattr("tokenspeed.frontend.family_text.CHAT_TEMPLATE", "")
    stack = Stack()
    assert "--chat-template" in caplog.text and not stack.llm.has_chat_template
    with pytest.raises(RequestRefused, match="--chat-template"):
        await stack.llm.chat_prompt([{"role": "user", "content": "x"}])
    await stack.close()


async def test_the_setting_replaces_the_models_template() -> None:
    stack = Stack(scripted_config(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"))
    assert await stack.llm.chat_prompt([{"role": "user", "content": "x"}]) == [ord("x")]
    await stack.close()
