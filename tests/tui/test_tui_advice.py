"""The advisor: each rule speaks in its situation, names the knob with its present value, and is silent otherwise."""

from typing import Any

import msgspec
import pytest

from tokenspeed.telemetry.metrics import CUTS
from tokenspeed.telemetry.snapshot import EventSnapshot, StepSnapshot
from tokenspeed_tui.observation import Probe
from tokenspeed_tui.picture import Picture, advance
from tokenspeed_tui.render.advice import RULES, Advice, advise
from tokenspeed_tui.render.events import advice_lines, advice_panel

KEYS = {
    "kv.bytes": 754_974_720,
    "kv.host_bytes": 0,
    "kv.granularity": 64,
    "kv.storage_dir": "/mnt/kv",
    "scheduler.max_seqs": 7,
    "scheduler.headroom": 4096,
    "scheduler.chunk": 256,
    "scheduler.overlap": 0,
    "scheduler.prefix_cache": True,
    "api.stream_buffer_bytes": 1_048_576,
    "api.slow_reader_s": 30,
    "activations": "auto",
}


class Situation:
    """A server in some state; what a test does not say is a calm engine at work."""

    def __init__(self, story) -> None:
        self.story = story
        self.keys: dict[str, Any] = dict(KEYS)
        self.state: dict[str, Any] = {}
        self.snapshot: dict[str, Any] = {}
        self.counters: dict[str, Any] = {}
        self.counters_before: dict[str, Any] = {}
        self.head: dict[str, Any] = {}
        self.memory: dict[str, Any] = {}
        self.observation: dict[str, Any] = {}

    def found(self) -> dict[str, str]:
        """What the rules say, by rule."""
        story = self.story
        picture = Picture(url=story.url)
        for moment, totals in ((0.0, self.counters_before), (1.0, self.counters)):
            base = story.snapshot(moment)
            head = msgspec.structs.replace(base.requests[0], **self.head)
            fields = {"requests": [head, *base.requests[1:]], **self.snapshot}
            counters = msgspec.structs.replace(base.counters, **totals)
            snapshot = msgspec.structs.replace(base, counters=counters, **fields)
            keys = [{"key": key, "value": value, "source": "x"} for key, value in self.keys.items()]
            observation = story.observation(
                moment,
                state=story.state(snapshot, **self.state),
                configuration=story.configuration(keys=keys, **self.memory),
                **self.observation,
            )
            picture = advance(picture, observation)
        return {item.rule: item.text for item in advise(picture, story.epoch + 1.2)}


@pytest.fixture
def situation(story) -> Situation:
    return Situation(story)


def waiting(situation: Situation, reason: str, **more) -> None:
    situation.head = {"reason": reason, "age_s": 12.0, **more}


def event(situation: Situation, kind: str, text: str, age: float = 5.0) -> None:
    told = EventSnapshot(sequence=9, time=situation.story.epoch - age, kind=kind, request_id="", text=text)
    situation.snapshot["events"] = [told]


def stuck(situation: Situation) -> None:
    waiting(situation, "waits for cache operation 17")
    situation.snapshot["last_progress"] = situation.story.epoch - 40.0


def paused(situation: Situation) -> None:
    situation.snapshot["paused"] = True


def too_small(situation: Situation) -> None:
    waiting(situation, "capacity: short by 19 blocks", prompt_tokens=16_000, output_limit=1_000)


def capacity(situation: Situation) -> None:
    waiting(situation, "capacity: short by 19 blocks", prompt_tokens=15_000, output_limit=100)


def reserved(situation: Situation) -> None:
    waiting(situation, "capacity: short by 19 blocks", prompt_tokens=100, output_limit=100)


def retractions(situation: Situation) -> None:
    situation.counters = {"retractions": 7, "recomputed_tokens": 500}


def rows(situation: Situation) -> None:
    waiting(situation, "no row: all 7 are taken (max_num_seqs)")


def budget(situation: Situation) -> None:
    waiting(situation, "budget: the round's 256 tokens were spent (max_scheduled_tokens)")


def bubble(situation: Situation) -> None:
    situation.state = {"vendor": "nvidia"}
    situation.snapshot["step"] = StepSnapshot(plan_ms=0.2, device_ms=6.0, commit_ms=0.4, bubble_ms=4.0)


def never_hits(situation: Situation) -> None:
    situation.counters = {"prefix_query_tokens": 1_000_000, "prefix_hit_tokens": 360_000, "evictions": 0}
    situation.counters_before = situation.counters = situation.counters | {"prefix_hit_tokens": 64}


def evicted_prefixes(situation: Situation) -> None:
    never_hits(situation)
    situation.counters_before = situation.counters = situation.counters | {"evictions": 900}


def no_prefix_cache(situation: Situation) -> None:
    situation.keys["scheduler.prefix_cache"] = False


def stuck_storage(situation: Situation) -> None:
    situation.head = {"state": "Prefetching", "age_s": 12.0, "reason": "waits for cache operation 4"}
    situation.snapshot["pending_operations"] = 3


def late_storage(situation: Situation) -> None:
    situation.counters = {"storage_timeouts": 2}


def slow_reader(situation: Situation) -> None:
    event(situation, "slow_reader", CUTS["buffer"])


def quota(situation: Situation) -> None:
    event(situation, "refused", "the key batch may ask 600 times a minute (api.requests_per_minute, or rpm=N)")


def nan(situation: Situation) -> None:
    situation.counters = situation.counters_before = {"nan_rows": 3}


def failed(situation: Situation) -> None:
    situation.counters = situation.counters_before = {"failed_steps": 2}


def restarts(situation: Situation) -> None:
    situation.state = {"lost": 2}


def late_work(situation: Situation) -> None:
    situation.counters = situation.counters_before = {"late_kernel_work": 4}


def memory(situation: Situation) -> None:
    situation.memory = {"memory": {"predicted": {"sum": 1 << 30}, "observed": {"sum": 3 << 29}}}


FIRES = [
    ("stuck", stuck, "STUCK: work is waiting and no step landed for 41 s; #8 chatcmpl-00000008 waits: waits for cache"),
    ("paused", paused, "an operator paused the engine, 1 wait: POST /continue_generation"),
    ("pool too small", too_small, "may grow to 17,000 tokens and the whole pool has 16,384: raise kv.bytes (now 720"),
    (
        "capacity",
        capacity,
        "has waited 12 s for room (capacity: short by 19 blocks): raise kv.bytes (now 720",
    ),
    ("capacity", reserved, "lower scheduler.headroom (now 4096)"),
    ("retractions", retractions, "4.0 requests a second lose their blocks: raise kv.bytes (now 720 MiB) or lower"),
    ("retractions", retractions, "lower scheduler.max_seqs (now 7); kv.host_bytes (now 0 B) would keep"),
    ("rows", rows, "1 wait for a row while blocks for 5 more are free: raise scheduler.max_seqs (now 7)"),
    ("budget", budget, "prompts wait 12 s for their turn in a step: raise scheduler.chunk (now 256)"),
    ("bubble", bubble, "the device idles 40 % of a step between two: set scheduler.overlap (now 0) to 1"),
    (
        "prefix",
        never_hits,
        "no prefix hits (64 of 1.0M prompt tokens): prompts differ within their first",
    ),
    ("prefix", evicted_prefixes, "900 cached blocks were evicted: raise kv.bytes (now 720 MiB) or kv.host_bytes"),
    ("prefix", no_prefix_cache, "prompts are computed whole: scheduler.prefix_cache (now false)"),
    (
        "storage",
        stuck_storage,
        "has waited 12 s for the storage (3 operations are out): look at the disk",
    ),
    (
        "storage",
        late_storage,
        "the storage answers late 2.0 times a second: look at the disk of",
    ),
    ("slow reader", slow_reader, "its reader is too slow, and it was cut: it must read faster, or raise"),
    ("slow reader", slow_reader, "raise api.stream_buffer_bytes (now 1.0 MiB) or api.slow_reader_s (now 30)"),
    ("quota", quota, "requests get status 429: the key batch may ask 600 times a minute (api.requests_per_minute"),
    ("wrong numbers", nan, "the model gave NaN in 3 rows: check the weights"),
    ("failed steps", failed, "2 steps failed since the start: `tokenspeed logs`"),
    ("restarts", restarts, "2 engines lost since the start: `tokenspeed env --bundle`"),
    ("late work", late_work, "4 kernels were chosen or compiled while serving: `tokenspeed-kernel tune`"),
    ("memory", memory, "the engine took 1.5 GiB where 1.0 GiB were planned: lower kv.bytes (now 720 MiB)"),
]


@pytest.mark.parametrize(("rule", "arrange", "words"), FIRES)
def test_a_rule_speaks_in_its_situation(situation, rule, arrange, words):
    arrange(situation)
    found = situation.found()
    assert words in found[rule]


def test_every_rule_is_shown_to_speak():
    assert {rule for rule, _, _ in FIRES} == set(RULES)


def test_all_is_silent_at_a_calm_engine(situation):
    assert situation.found() == {}


def briefly(situation: Situation) -> None:
    situation.head = {"reason": "capacity: short by 19 blocks", "age_s": 1.0}


def another_reason(situation: Situation) -> None:
    waiting(situation, "its turn has not come")


def a_pause_without_progress(situation: Situation) -> None:
    stuck(situation)
    paused(situation)


def no_work(situation: Situation) -> None:
    stuck(situation)
    situation.snapshot["has_work"] = False


def a_full_pool_without_rows(situation: Situation) -> None:
    rows(situation)
    situation.snapshot["headroom"] = msgspec.structs.replace(situation.story.snapshot().headroom, requests=0)


def old_retractions(situation: Situation) -> None:
    situation.counters = situation.counters_before = {"retractions": 99}


def a_bubble_on_a_cpu(situation: Situation) -> None:
    bubble(situation)
    situation.state = {}


def a_bubble_with_overlap(situation: Situation) -> None:
    bubble(situation)
    situation.keys["scheduler.overlap"] = 1


def a_small_bubble(situation: Situation) -> None:
    bubble(situation)
    situation.snapshot["step"] = StepSnapshot(plan_ms=0.2, device_ms=6.0, commit_ms=0.4, bubble_ms=1.0)


def few_prompts(situation: Situation) -> None:
    situation.counters = situation.counters_before = {"prefix_query_tokens": 19_000, "prefix_hit_tokens": 0}


def some_hits(situation: Situation) -> None:
    situation.counters = situation.counters_before = {"prefix_query_tokens": 1_000_000, "prefix_hit_tokens": 30_000}


def a_short_fetch(situation: Situation) -> None:
    situation.head = {"state": "Prefetching", "age_s": 1.0}


def old_timeouts(situation: Situation) -> None:
    situation.counters = situation.counters_before = {"storage_timeouts": 7}


def an_old_slow_reader(situation: Situation) -> None:
    event(situation, "slow_reader", CUTS["stalled"], age=120.0)


def another_abort(situation: Situation) -> None:
    event(situation, "abort", "the client went away")


def memory_as_planned(situation: Situation) -> None:
    situation.memory = {"memory": {"predicted": {"sum": 1 << 30}, "observed": {"sum": (1 << 30) + (1 << 26)}}}


SILENT = [
    ("capacity", briefly),
    ("capacity", another_reason),
    ("pool too small", briefly),
    ("pool too small", capacity),
    ("capacity", too_small),
    ("stuck", a_pause_without_progress),
    ("stuck", no_work),
    ("stuck", capacity),
    ("rows", a_full_pool_without_rows),
    ("rows", another_reason),
    ("budget", another_reason),
    ("retractions", old_retractions),
    ("bubble", a_bubble_on_a_cpu),
    ("bubble", a_bubble_with_overlap),
    ("bubble", a_small_bubble),
    ("prefix", few_prompts),
    ("prefix", some_hits),
    ("storage", a_short_fetch),
    ("storage", old_timeouts),
    ("slow reader", an_old_slow_reader),
    ("slow reader", another_abort),
    ("quota", another_abort),
    ("memory", memory_as_planned),
    ("wrong numbers", failed),
    ("failed steps", nan),
    ("late work", nan),
    ("restarts", nan),
    ("paused", stuck),
]


@pytest.mark.parametrize(("rule", "arrange"), SILENT)
def test_a_rule_is_silent_where_it_does_not_apply(situation, rule, arrange):
    arrange(situation)
    assert rule not in situation.found()


def test_every_rule_is_shown_to_be_silent():
    assert {rule for rule, _ in SILENT} == set(RULES)


def test_a_request_behind_another_does_not_hide_why_that_one_waits(situation, story):
    behind = msgspec.structs.replace(
        story.snapshot().requests[0],
        handle=99,
        reason="behind request 8 in the line: capacity: short by 19 blocks",
        age_s=99.0,
    )
    first = msgspec.structs.replace(behind, handle=8, reason="capacity: short by 19 blocks", age_s=12.0)
    situation.snapshot["requests"] = [behind, first]
    assert "waits beside free blocks" in situation.found()["capacity"]


def test_the_servers_own_probe_calls_it_stuck_earlier(situation):
    situation.snapshot["last_progress"] = situation.story.epoch - 1.0
    assert "stuck" not in situation.found()
    situation.observation = {"progress": Probe(status=503)}
    assert "no step landed for 2.0 s" in situation.found()["stuck"]


def test_a_knob_whose_value_is_not_known_has_a_dash(situation):
    retractions(situation)
    situation.keys = {}
    assert "raise kv.bytes (now –)" in situation.found()["retractions"]


def test_nothing_is_advised_without_knowledge(story):
    assert advise(Picture(url=story.url), 0.0) == ()
    away = advance(
        advance(Picture(url=story.url), story.observation(state=story.state(story.snapshot(paused=True)))),
        story.observation(1.0, state=None, error="no server answers"),
    )
    assert advise(away, story.epoch) == ()


def test_the_worst_comes_first(situation):
    late_work(situation)
    situation.counters = situation.counters_before = {"late_kernel_work": 4, "nan_rows": 1}
    situation.state = {"lost": 1}
    assert list(situation.found()) == ["wrong numbers", "restarts", "late work"]


def test_the_line_says_how_many_more_there_are_and_the_page_has_all():
    advice = (Advice("a", "bad", "one " * 40), Advice("b", "hint", "two"))
    lines = advice_lines(advice, 60, 2)
    assert [line.plain[:5] for line in lines] == ["✖ one", "one o"]
    assert lines[-1].plain.endswith("… (+1: e)")
    assert all(line.cell_len <= 60 for line in lines)
    short = (Advice("b", "warn", "two"), Advice("c", "hint", "three " * 20), Advice("d", "hint", "four"))
    assert [line.plain[:7] for line in advice_lines(short, 60, 2)] == ["▲ two", "○ three"]
    assert advice_lines(short, 60, 2)[1].plain.endswith("… (+1: e)")
    body = [line.plain for line in advice_panel(advice, 60).body]
    assert body[-1] == "○ two"
    assert body[0].startswith("✖ one")
    assert [line.plain for line in advice_lines((), 60, 2)] == ["✓ nothing needs turning"]
