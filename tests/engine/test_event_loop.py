"""The event loop over the real scheduler and a device whose KV cache holds token ids."""

import random

import msgspec
import pytest
from control_plane import ControlPlane, submit
from token_device import expected_tokens

from tokenspeed.engine.loop import EngineFailure
from tokenspeed.messages import Finish


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(7 * position + 13 * salt) % 997 for position in range(length)]


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("chunk", [3, 16, 64])
def test_tokens_depend_on_nothing_but_the_prompt(overlap: int, chunk: int) -> None:
    plane = ControlPlane(overlap=overlap, chunk=chunk)
    prompts = {handle: prompt_of(5 * handle, handle) for handle in range(1, 7)}
    plane.channel.send_in(submits=[submit(handle, prompt, 10) for handle, prompt in prompts.items()])
    plane.until_quiet()
    for handle, prompt in prompts.items():
        assert plane.channel.tokens(handle) == expected_tokens(prompt, 10)
        assert plane.channel.ends(handle) == ["length"]
    plane.assert_pool_is_whole()


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_pool_that_forces_retraction_changes_no_token(overlap: int) -> None:
    plane = ControlPlane(overlap=overlap, num_blocks=14, max_num_seqs=6)
    prompts = {handle: prompt_of(9, handle) for handle in range(1, 7)}
    plane.channel.send_in(submits=[submit(h, p, 24, declared=False) for h, p in prompts.items()])
    plane.until_quiet()
    assert plane.scheduler.snapshot().retractions > 0
    for handle, prompt in prompts.items():
        assert plane.channel.tokens(handle) == expected_tokens(prompt, 24)
    plane.assert_pool_is_whole()


def test_a_shared_prefix_is_read_from_the_cache_and_reported() -> None:
    plane = ControlPlane()
    prompt = prompt_of(20)
    plane.channel.send_in(submits=[submit(1, prompt)])
    plane.until_quiet()
    plane.channel.send_in(submits=[submit(2, [*prompt, 5, 6])])
    plane.until_quiet()
    first = [o.cached_tokens for o in plane.channel.outputs if o.handle == 2 and o.token_ids]
    assert first == [20] + [-1] * 7
    assert plane.channel.tokens(2) == expected_tokens([*prompt, 5, 6], 8)


def test_a_namespace_keeps_equal_prompts_apart() -> None:
    plane = ControlPlane()
    plane.channel.send_in(submits=[submit(1, prompt_of(20), namespace=b"a")])
    plane.until_quiet()
    plane.channel.send_in(submits=[submit(2, prompt_of(20), namespace=b"b")])
    plane.until_quiet()
    assert [o.cached_tokens for o in plane.channel.outputs if o.handle == 2][0] == 0


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_stop_token_ends_the_request_and_nothing_follows_it(overlap: int) -> None:
    tokens = expected_tokens(prompt_of(6), 20)
    plane = ControlPlane(overlap=overlap)
    plane.channel.send_in(submits=[submit(1, prompt_of(6), 20, stop_token_ids=(tokens[4],))])
    plane.until_quiet()
    assert plane.channel.tokens(1) == tokens[:5]
    assert plane.channel.ends(1) == ["stop"]
    assert plane.channel.last(1).stop_token_id == tokens[4]
    plane.assert_pool_is_whole()


def test_one_message_a_round_whatever_the_number_of_requests() -> None:
    plane = ControlPlane(chunk=64)
    plane.channel.send_in(submits=[submit(handle, prompt_of(4, handle), 5) for handle in range(1, 9)])
    plane.until_quiet()
    assert plane.channel.messages == 5


def test_abort_and_finish_in_mid_stream_free_the_blocks() -> None:
    plane = ControlPlane()
    plane.channel.send_in(submits=[submit(handle, prompt_of(10, handle), 50) for handle in (1, 2, 3)])
    for _ in range(6):
        plane.loop.round()
    plane.channel.send_in(aborts=[1], finishes=[Finish(2, 3)])
    plane.until_quiet()
    assert plane.channel.ends(1) == plane.channel.ends(2) == []
    counters = plane.channel.snapshots[-1].counters
    assert (counters.finished, counters.aborted) == (2, 1)
    assert plane.channel.tokens(3) == expected_tokens(prompt_of(10, 3), 50)
    plane.assert_pool_is_whole()


@pytest.mark.parametrize("overlap", [0, 1])
def test_random_aborts_under_pressure_leave_the_pool_whole(overlap: int) -> None:
    chance = random.Random(overlap)
    plane = ControlPlane(overlap=overlap, num_blocks=30, max_num_seqs=8, chunk=8)
    prompts = {handle: prompt_of(chance.randrange(1, 30), chance.randrange(4)) for handle in range(1, 65)}
    gone = set()
    for handle, prompt in prompts.items():
        plane.channel.send_in(submits=[submit(handle, prompt, chance.randrange(1, 30), declared=bool(handle % 2))])
        for _ in range(chance.randrange(4)):
            plane.loop.round()
            plane.scheduler.check_invariants()
        if chance.random() < 0.4:
            victim = chance.randrange(1, handle + 1)
            gone.add(victim)
            plane.channel.send_in(aborts=[victim])
    plane.until_quiet()
    for handle, prompt in prompts.items():
        tokens = plane.channel.tokens(handle)
        assert tokens == expected_tokens(prompt, len(tokens))
        assert handle in gone or plane.channel.ends(handle) == ["length"]
    plane.assert_pool_is_whole()


def test_a_row_with_nan_logits_ends_with_an_error_and_publishes_nothing() -> None:
    plane = ControlPlane()
    plane.device.nan = lambda forward_id, handle: handle == 1
    plane.channel.send_in(submits=[submit(1, prompt_of(20)), submit(2, prompt_of(20, 1))])
    plane.until_quiet()
    assert plane.channel.last(1).error_code == "nan_logits"
    assert plane.channel.tokens(1) == []
    assert plane.channel.tokens(2) == expected_tokens(prompt_of(20, 1), 8)
    plane.device.nan = lambda forward_id, handle: False
    plane.channel.send_in(submits=[submit(3, prompt_of(20))])
    plane.until_quiet()
    assert plane.channel.tokens(3) == expected_tokens(prompt_of(20), 8)
    plane.assert_pool_is_whole()


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_forward_that_raises_ends_its_rows_and_nobody_else(overlap: int) -> None:
    plane = ControlPlane(overlap=overlap)
    plane.device.fail = lambda forward_id: forward_id == 3
    plane.channel.send_in(submits=[submit(1, prompt_of(8), 12)])
    for _ in range(2):
        plane.loop.round()
    plane.until_quiet()
    assert plane.channel.last(1).error_code == "step_failed"
    assert "planted" in plane.channel.last(1).error
    plane.channel.send_in(submits=[submit(2, prompt_of(8), 12)])
    plane.until_quiet()
    assert plane.channel.tokens(2) == expected_tokens(prompt_of(8), 12)
    plane.assert_pool_is_whole()


def test_three_failed_steps_in_a_row_end_the_engine() -> None:
    plane = ControlPlane(overlap=0)
    plane.device.fail = lambda forward_id: True
    plane.channel.send_in(submits=[submit(handle, prompt_of(16, handle)) for handle in (1, 2, 3, 4)])
    with pytest.raises(EngineFailure, match="3 steps in a row"):
        plane.until_quiet()


def test_a_request_that_can_never_fit_is_refused_with_both_figures() -> None:
    plane = ControlPlane(num_blocks=10, granularity=4, max_model_len=200)
    plane.channel.send_in(submits=[submit(1, prompt_of(60), 8), submit(2, prompt_of(6), 4)])
    plane.until_quiet()
    refused = plane.channel.last(1)
    assert refused.finish_reason == "error"
    assert refused.error_code == "context_length_exceeded"
    assert "68" in refused.error and "40" in refused.error
    assert plane.channel.ends(2) == ["length"]


def test_a_damaged_prompt_is_refused_and_hurts_nobody() -> None:
    plane = ControlPlane()
    damaged = msgspec.structs.replace(submit(1, prompt_of(8)), prompt=b"12345")
    plane.channel.send_in(submits=[damaged, submit(2, prompt_of(8), 12)])
    plane.until_quiet()
    assert plane.channel.last(1).error_code == "invalid_request"
    assert plane.channel.tokens(2) == expected_tokens(prompt_of(8), 12)


def test_drain_finishes_what_runs_and_refuses_what_comes() -> None:
    plane = ControlPlane()
    plane.channel.send_in(submits=[submit(1, prompt_of(8), 12)])
    plane.loop.round()
    plane.channel.send_in(drain=True)
    plane.loop.round()
    plane.channel.send_in(submits=[submit(2, prompt_of(8), 12)])
    plane.loop.run()
    assert plane.channel.tokens(1) == expected_tokens(prompt_of(8), 12)
    assert plane.channel.last(2).error_code == "draining"


def test_the_snapshot_counts_what_lives() -> None:
    plane = ControlPlane()
    plane.channel.send_in(submits=[submit(1, prompt_of(40), 12), submit(2, prompt_of(8), 12)], watch_s=60)
    for _ in range(3):
        plane.loop.round()
    plane.loop.publish_snapshot()
    snapshot = plane.channel.snapshots[-1]
    assert {row.request_id for row in snapshot.requests} == {"request-1", "request-2"}
    assert sum(count or 0 for name, count in snapshot.states.items() if name != "Finished") == 2
    assert snapshot.states["Bootstrapping"] is None
    assert snapshot.groups[0].held + snapshot.groups[0].cached + snapshot.groups[0].free == snapshot.groups[0].total
    assert snapshot.has_work


def test_the_first_output_tells_how_long_a_request_waited_for_its_first_step() -> None:
    now = 50.0
    plane = ControlPlane(max_num_seqs=1, clock=lambda: now)
    plane.channel.send_in(submits=[submit(1, prompt_of(5), 4), submit(2, prompt_of(6), 4)])
    while not plane.channel.ends(2):
        plane.loop.round()
        now += 1.0
    waited = {
        handle: [output.queue_s for output in plane.channel.outputs if output.handle == handle] for handle in (1, 2)
    }
    assert waited[1] == [0.0, -1.0, -1.0, -1.0]
    assert waited[2][0] >= 4.0 and waited[2][1:] == [-1.0] * 3
