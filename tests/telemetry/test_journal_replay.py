"""A recorded run replays to equal plans; where it does not, the first round that differs is told."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from control_plane import submit
from journal_play import record, rewrite, with_other_tokens, world
from memory_channel import MemoryChannel
from tiny_models import random_config, resolved

from tokenspeed.engine.journaled_scheduler import begin_record
from tokenspeed.launch.compose import compose_engine
from tokenspeed.launch.replay import replay, scheduler_config
from tokenspeed.launch.scheduling import compose_scheduler
from tokenspeed.recipes.resolved import ModelSource, SchedulerSettings
from tokenspeed.telemetry.journal import (
    Advanced,
    Begin,
    JournalError,
    JournalReader,
    Raised,
    Record,
    Submitted,
)
from tokenspeed_scheduler import Scheduler

IMPLEMENTATIONS = ("native", "reference")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_run_replays_to_equal_plans(tmp_path: Path, implementation: str) -> None:
    rounds = record(tmp_path / "j", implementation)
    result = replay(tmp_path / "j")
    assert result.divergence is None
    assert (result.rounds, result.requests, result.refused) == (rounds, 6, 1)
    assert result.begin.implementation == implementation
    assert (result.torn, result.beyond) == (0, "")


def test_without_a_journal_there_is_nothing_around_the_scheduler() -> None:
    assert type(compose_scheduler(SchedulerSettings(), world())) is Scheduler


def test_the_configuration_comes_back_field_by_field() -> None:
    config = world(num_parents=17, overlap_depth=0, mixed_batches=False, headroom_tokens=5, max_overtakes=3)
    begin = begin_record("native", config, {})
    assert begin_record("native", scheduler_config(begin), {}) == begin
    assert begin.config["num_parents"] == 17


def test_a_cut_journal_replays_as_far_as_it_goes(tmp_path: Path) -> None:
    rounds = record(tmp_path / "j")
    data = (tmp_path / "j").read_bytes()
    head = rewrite(tmp_path / "j", lambda records: []).stat().st_size
    reached = set()
    for end in range(head, len(data), 97):
        (tmp_path / "cut").write_bytes(data[:end])
        result = replay(tmp_path / "cut")
        assert result.divergence is None
        reached.add(result.rounds)
    assert len(reached) > 10
    assert max(reached) >= rounds - 1


def test_other_tokens_change_the_plan_that_computes_them_again(tmp_path: Path) -> None:
    record(tmp_path / "j")

    def change(records: list[Record]) -> list[Record]:
        return [with_other_tokens(entry) if isinstance(entry, Advanced) else entry for entry in records]

    found = replay(rewrite(tmp_path / "j", change)).divergence
    assert found is not None
    assert found.round > 3
    assert found.what.startswith("the plans differ (digests ")
    assert found.recorded == found.replayed, "the rows are the same, their input is not"


def test_a_longer_prompt_shows_in_the_rows_of_both_sides(tmp_path: Path) -> None:
    record(tmp_path / "j")

    def change(records: list[Record]) -> list[Record]:
        first = records[0]
        assert isinstance(first, Submitted)
        return [msgspec.structs.replace(first, prompt=first.prompt + b"\1\0\0\0"), *records[1:]]

    found = replay(rewrite(tmp_path / "j", change)).divergence
    assert found is not None
    assert found.round == 1
    assert "request 1: prefill of 7 at 0" in found.recorded
    assert "request 1: prefill of 8 at 0" in found.replayed


def test_an_error_that_does_not_come_back_is_a_divergence(tmp_path: Path) -> None:
    record(tmp_path / "j")
    kept = replay(rewrite(tmp_path / "j", lambda records: records))
    assert kept.divergence is None
    for call in ("submit", "advance"):
        without = [lambda entry, call=call: not (isinstance(entry, Raised) and entry.call == call)]
        path = rewrite(tmp_path / "j", lambda records, keep=without[0]: [e for e in records if keep(e)])
        found = replay(path).divergence
        assert found is not None
        assert found.what.startswith(call)
        assert found.what.endswith("ended otherwise")
        assert found.recorded == ["no error"]
        assert found.replayed[0].startswith({"submit": "RequestRefused", "advance": "ValueError"}[call])


def test_a_journal_that_ends_inside_a_call_tells_how_that_ends_here(tmp_path: Path) -> None:
    """A crash inside a call leaves its input as the last record: replaying goes on from there."""
    record(tmp_path / "j")

    def up_to_the_refused(records: list[Record]) -> list[Record]:
        return records[: next(i for i, entry in enumerate(records) if isinstance(entry, Raised))]

    result = replay(rewrite(tmp_path / "j", up_to_the_refused))
    assert result.divergence is None
    assert result.beyond.startswith("RequestRefused: ")

    def up_to_a_good_one(records: list[Record]) -> list[Record]:
        return records[:4]

    result = replay(rewrite(tmp_path / "j", up_to_a_good_one))
    assert (result.divergence, result.beyond, result.requests) == (None, "", 4)


def test_what_this_version_does_not_know_is_named(tmp_path: Path) -> None:
    record(tmp_path / "j")
    unknown = rewrite(tmp_path / "j", lambda records: [Advanced([("Teleport", [1])]), *records])
    with pytest.raises(JournalError, match=r"an event Teleport\(1,\), which this version does not know"):
        replay(unknown)
    begin = JournalReader(tmp_path / "j").begin
    newer = Begin(begin.implementation, {**begin.config, "warp": 9}, {"tokenspeed-appliance": "9.0"})
    with pytest.raises(
        JournalError, match=r"does not suit .*: SchedulerConfig has no warp; it was made with tokens.* 9\.0"
    ):
        scheduler_config(newer)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_engine_runs_with_either_scheduler_and_its_journal_replays_without_torch(
    tmp_path: Path, implementation: str
) -> None:
    config = resolved(ModelSource(kind="random", random_config=random_config()), kv_bytes=1 << 20)
    settings = config.scheduler.model_copy(
        update={"implementation": implementation, "journal": str(tmp_path / "engine")}
    )
    channel = MemoryChannel()
    engine = compose_engine(config.model_copy(update={"scheduler": settings}), channel, lambda *_: None)
    prompts = {handle: list(range(handle, 30 * handle)) for handle in (1, 2, 3)}
    try:
        for handle, prompt in prompts.items():
            channel.send_in(submits=[submit(handle, prompt)])
            engine.loop.round()
        channel.send_in(drain=True)
        engine.loop.run()
    finally:
        engine.handle.shutdown()
    assert [len(channel.tokens(handle)) for handle in prompts] == [8, 8, 8]
    program = (
        "import sys, pathlib\n"
        "from tokenspeed.launch.replay import replay\n"
        "result = replay(pathlib.Path(sys.argv[1]))\n"
        "print(result.divergence, result.requests, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "engine")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "3", "False"]
