"""A whole engine of several ranks, in threads: the tokens of one rank, whatever its scheduler has to do meanwhile; and
what ends it."""

import itertools
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from control_plane import submit
from in_process_engine import Run, random_llama, run_requests
from memory_channel import MemoryChannel
from rank_engine import RankEngine, composed, share

from tokenspeed.device.cache_operations import CacheOperations, StepCopies
from tokenspeed.device.local_handle import LocalPendingStep
from tokenspeed.engine import following
from tokenspeed.engine.loop import EngineFailure, PeerLost
from tokenspeed.engine.rank_wire import FollowingLink, Start
from tokenspeed.layers.batch import ForwardBatch
from tokenspeed.layers.key_value_decoder import KeyValueDecoder
from tokenspeed.messages import Pooling, SamplingParameters, Submit
from tokenspeed.recipes.resolved import ResolvedConfig
from tokenspeed.telemetry.journal import Submitted
from tokenspeed_scheduler import CacheOperation, RequestRefused, Scheduler

GREEDY = SamplingParameters(top_k=1)
LONG_AGO = 400


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(11 * position + 17 * salt) % 255 for position in range(length)]


CROWD: list[Submit] = [
    submit(1, prompt_of(5), 90, declared=False, sampling=GREEDY),
    submit(2, prompt_of(33, 1), 40, declared=False, sampling=SamplingParameters(temperature=0.9, seed=11)),
    submit(3, prompt_of(20, 2), 60, declared=False, sampling=SamplingParameters(top_k=1, repetition_penalty=1.3)),
    submit(4, prompt_of(17, 3), 80, declared=False, sampling=SamplingParameters(top_k=1, prompt_logprobs=2)),
]


def run_ranks(config: ResolvedConfig, requests: Sequence[Submit], world: int, gaps: Sequence[int] = ()) -> Run:
    engines: list[RankEngine] = []
    run = run_requests(share(config, world), requests, gaps, compose=composed(engines))
    assert engines[0].failures == []
    return run


@pytest.mark.parametrize(
    ("overlap", "host_blocks", "world"),
    [(0, 60, 2), (1, 0, 2), pytest.param(1, 60, 4, marks=pytest.mark.long)],
)
def test_retraction_among_ranks_changes_no_token(overlap: int, host_blocks: int, world: int) -> None:
    expected = run_requests(random_llama(overlap=overlap, blocks=60, chunk=32), CROWD)
    tight = random_llama(overlap=overlap, blocks=11, chunk=32, host_blocks=host_blocks)
    if world == 4:  # each of the two KV heads is on two ranks, so a block is half of it on each
        tight = tight.model_copy(
            update={
                "kv": tight.kv.model_copy(update={"bytes": 2 * tight.kv.bytes, "host_bytes": 2 * tight.kv.host_bytes})
            }
        )
    found = run_ranks(tight, CROWD, world)
    assert found.tokens == expected.tokens
    assert found.counters.retractions > 0 and found.held == 0
    assert (found.counters.restores > 0, found.counters.recomputed_tokens > 0) == (host_blocks > 0, not host_blocks)
    logprobs = [o.prompt_logprobs for o in found.channel.outputs if o.handle == 4 and o.prompt_logprobs]
    assert sum(len(part.tokens) for part in logprobs) == 16


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_of_ranks_are_those_of_one(pooling: Pooling) -> None:
    asked = [
        submit(1, prompt_of(70), 1, pooling=pooling),
        submit(2, prompt_of(9, 1), 12, sampling=GREEDY),
        submit(3, prompt_of(30, 2), 1, pooling=pooling),
    ]
    config = random_llama(overlap=1, blocks=60, chunk=32)
    expected, found = run_requests(config, asked), run_ranks(config, asked, 2)
    assert found.tokens == expected.tokens

    def vectors(run: Run) -> list[np.ndarray]:
        return [np.frombuffer(one.embedding, np.float32) for one in run.channel.outputs if one.embedding]

    assert len(vectors(expected)) == 2
    np.testing.assert_allclose(np.stack(vectors(found)), np.stack(vectors(expected)), rtol=0, atol=1e-4)


@pytest.mark.parametrize("falls_silent", [False, True])
def test_other_ranks_ask_for_a_step_once_another_is_queued_behind_it(
    falls_silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked for is finished before anything later is launched; the last one where rank 0 fell silent."""
    execute, done = following.FollowingLoop._execute, LocalPendingStep.done
    executed: list[object] = []
    behind: list[int] = []

    def noted_execute(self: following.FollowingLoop, starts: list[Start]) -> None:
        execute(self, starts)
        executed.append(self._in_flight[-1])

    def noted_done(self: LocalPendingStep) -> bool:
        behind.append(len(executed) - 1 - executed.index(self))
        return done(self)

    receive, calls = FollowingLink.receive, itertools.count()

    def noted_receive(self: FollowingLink, timeout_ms: int) -> object:
        return None if falls_silent and next(calls) % 2 else receive(self, timeout_ms)

    monkeypatch.setattr(following, "BUSY_WAIT_MS", 60_000)
    monkeypatch.setattr(FollowingLink, "receive", noted_receive)
    monkeypatch.setattr(following.FollowingLoop, "_execute", noted_execute)
    monkeypatch.setattr(LocalPendingStep, "done", noted_done)
    run_ranks(random_llama(overlap=1, blocks=60, chunk=32), CROWD[:2], 2)
    assert behind and (0 in behind) == falls_silent


def test_a_copy_that_failed_on_one_rank_is_a_block_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    save = CacheOperations.save

    def failing(self: CacheOperations, operations: Sequence[CacheOperation]) -> StepCopies:
        copies = save(self, operations)
        if self._communication.rank != 0:
            sizes = {operation.op_id: operation.group.size for operation in operations}
            copies.outcomes = [
                replace(outcome, succeeded=np.zeros(sizes[outcome.op_id], np.uint8)) for outcome in copies.outcomes
            ]
        return copies

    expected = run_requests(random_llama(overlap=0, blocks=60, chunk=32), CROWD)
    monkeypatch.setattr(CacheOperations, "save", failing)
    found = run_ranks(random_llama(overlap=0, blocks=11, chunk=32, host_blocks=60), CROWD, 2)
    assert found.tokens == expected.tokens
    assert found.counters.failed_copies > 0 and found.counters.restores == 0


def test_a_stored_prefix_is_there_where_every_rank_has_its_part(tmp_path: Path) -> None:
    def config(blocks: int = 40) -> ResolvedConfig:
        plain = random_llama(overlap=0, blocks=blocks, chunk=32, host_blocks=40)
        kv = plain.kv.model_copy(update={"storage_dir": str(tmp_path), "storage_bytes": 1 << 24})
        return plain.model_copy(update={"kv": kv})

    asked = [submit(1, prompt_of(70), 4, sampling=GREEDY)]
    first = run_ranks(config(), asked, 2)
    again = run_ranks(config(), asked, 2)
    assert (first.cached(1), again.cached(1)) == (0, 64)
    assert again.tokens == first.tokens
    ranks = [folder for folder in tmp_path.iterdir() if folder.is_dir()]
    assert len(ranks) == 2
    for rank in ranks:  # whichever of them it is
        for file in [path for path in rank.rglob("*") if path.is_file()]:
            file.unlink()
        lost = run_ranks(config(), asked, 2)  # and stores it anew
        assert (lost.cached(1), lost.tokens) == (0, first.tokens)


def ended(plant: Callable[[], None]) -> tuple[str, list[str]]:
    """What ends an engine of two ranks in which something was planted once it was ready: on rank 0, on the other."""
    channel = MemoryChannel()
    engine = RankEngine(share(random_llama(overlap=0, blocks=20, chunk=32), 2), channel)
    try:
        plant()
        channel.send_in(submits=[submit(1, prompt_of(5), 8, sampling=GREEDY)], drain=True)
        with pytest.raises(EngineFailure) as failure:
            engine.loop.run()
        engine.fail()
    finally:
        engine.shutdown()
    return str(failure.value), engine.failures


def test_a_rank_that_plans_otherwise_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    as_told = following.submit_again

    def shortened(scheduler: Scheduler, record: Submitted) -> None:
        as_told(scheduler, msgspec.structs.replace(record, prompt=record.prompt[:-4]))

    first, others = ended(lambda: monkeypatch.setattr(following, "submit_again", shortened))
    assert first.startswith("rank 0 lost another rank")
    (other,) = others
    digest = "[0-9a-f]{16}"
    plans = rf"plan \d+ has the digest {digest} there, plan \d+ {digest} here"
    assert re.fullmatch(f"rank 1 of 2 does not plan as rank 0 does: {plans}", other), other


def test_a_refusal_on_one_rank_alone_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(scheduler: Scheduler, record: Submitted) -> None:
        raise RequestRefused("planted")

    _, others = ended(lambda: monkeypatch.setattr(following, "submit_again", refusing))
    assert others == ["rank 1 of 2 does not plan as rank 0 does: a call raised RequestRefused here and nothing there"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_fails_on_one_rank_ends_the_engine(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = KeyValueDecoder.forward

    def failing(self: KeyValueDecoder, batch: ForwardBatch) -> object:
        if threading.current_thread() is threads[rank]:
            raise MemoryError("planted")
        return forward(self, batch)

    def plant() -> None:
        threads.extend(thread for thread in threading.enumerate() if thread.name == "forward")
        monkeypatch.setattr(KeyValueDecoder, "forward", failing)

    threads: list[threading.Thread] = []
    first, others = ended(plant)
    assert len(threads) == 2
    failed, lost = sorted((first, *others))
    assert re.fullmatch(r"a step failed on rank \d.*: MemoryError: planted", failed)
    assert re.fullmatch(r"rank \d.* lost another rank: .*", lost)


def test_ranks_that_were_not_made_alike_do_not_begin() -> None:
    config = share(random_llama(overlap=0, blocks=20, chunk=32), 2)
    settings = config.scheduler.model_copy(update={"headroom": 64})
    with pytest.raises(PeerLost, match="rank 0 lost another rank"):
        RankEngine(config, MemoryChannel(), other=config.model_copy(update={"scheduler": settings}))
