"""The prefix cache: whose pages a request may read, when they come and when they go."""

import pytest
from kv_model import expected_output, prompt_of
from played_engine import Engine

OVERLAPS = pytest.mark.parametrize("overlap", [0, 1])


def serve(engine: Engine, prompt: list[int], new: int = 1, **more: object) -> int:
    """Runs one request alone to its end and returns what the cache gave it."""
    handle = engine.submit(prompt, new, **more)  # type: ignore[arg-type]
    engine.run()
    assert engine.done[handle].output == expected_output(prompt, new, namespace=engine.done[handle].namespace)
    return engine.cached(handle)


# How much is hit.


@pytest.mark.parametrize(("granularity", "page"), [(1, 1), (1, 4), (2, 4), (4, 4), (4, 8), (8, 16)])
@OVERLAPS
def test_a_hit_comes_in_whole_prefix_pages_and_leaves_the_last_token(granularity: int, page: int, overlap: int) -> None:
    engine = Engine(granularity=granularity, prefix_granularity=page, overlap=overlap, num_parents=200, budget=64)
    prompt = prompt_of(3 * page + 2)
    serve(engine, prompt)
    for length in range(1, len(prompt) + 1):
        assert serve(engine, prompt[:length]) == (length - 1) // page * page, f"a prompt of {length} tokens"
    engine.assert_whole()


def test_a_prompt_that_parts_inside_a_page_hits_the_pages_before_it() -> None:
    engine = Engine()
    prompt = prompt_of(20)
    serve(engine, prompt)
    for parted, hit in [(0, 0), (3, 0), (4, 4), (11, 8), (12, 12), (15, 12), (16, 16), (18, 16)]:
        other = [*prompt[:parted], *range(900, 910)]
        assert serve(engine, other) == hit, f"parts at {parted}"


def test_equal_pages_behind_different_beginnings_are_not_equal() -> None:
    engine = Engine()
    page = prompt_of(4, 9)
    serve(engine, [1, 2, 3, 4, *page, 5])
    assert serve(engine, [*page, 5]) == 0
    assert serve(engine, [4, 3, 2, 1, *page, 5]) == 0
    assert serve(engine, [1, 2, 3, 4, *page, 6]) == 8


@pytest.mark.parametrize(("bound", "hit"), [(-1, 16), (0, 0), (3, 0), (4, 4), (9, 8), (16, 16), (1000, 16)])
def test_max_cached_prefix_tokens_bounds_a_hit(bound: int, hit: int) -> None:
    engine = Engine()
    serve(engine, prompt_of(18))
    assert serve(engine, prompt_of(18), max_cached=bound) == hit


def test_generated_tokens_are_cached_too() -> None:
    """The next turn of a conversation hits the answer, but for the last token, whose KV nobody computed."""
    engine = Engine()
    prompt = prompt_of(6)
    serve(engine, prompt, 10)
    turn = [*prompt, *expected_output(prompt, 10)]
    assert serve(engine, [*turn, 5, 6]) == 12
    assert serve(engine, [*turn[:9], 800, 801, 802, 803]) == 8


def test_a_conversation_hits_ever_more_and_holds_no_more_than_its_own_pages() -> None:
    engine = Engine(num_parents=200, max_model_len=1000)
    turns = prompt_of(6)
    for turn in range(12):
        hit = serve(engine, turns, 7)
        assert hit == (len(turns) - 3) // 4 * 4, "all but the last answer's last token and the new question"
        turns = [*turns, *expected_output(turns, 7), 500 + turn, 600 + turn]
        _, cached, _ = engine.group()
        assert cached == (len(turns) - 3) // 4, "equal pages are cached once"


def test_the_prefix_cache_can_be_switched_off() -> None:
    engine = Engine(prefix_cache=False)
    for _ in range(3):
        assert serve(engine, prompt_of(20), 8) == 0
    assert engine.group() == (0, 0, engine.settings.num_blocks)
    assert engine.scheduler.snapshot().prefix_hit_tokens == 0


def test_hits_are_counted() -> None:
    engine = Engine()
    hits = [serve(engine, prompt_of(length)) for length in (20, 13, 20, 5)]
    snapshot = engine.scheduler.snapshot()
    assert hits == [0, 12, 16, 4]
    assert snapshot.prefix_hit_tokens == 32
    assert 32 < snapshot.prefix_query_tokens <= 58
    assert snapshot.prefill_tokens == 58 - 32


def test_a_request_row_says_what_the_cache_gave() -> None:
    engine = Engine()
    serve(engine, prompt_of(18))
    engine.submit(prompt_of(18), 4)
    engine.round()
    (row,) = engine.scheduler.requests()
    assert (row.cached_tokens, row.prompt_tokens, row.computed_tokens) == (16, 18, 18)


def test_only_what_was_not_hit_costs_budget() -> None:
    engine = Engine(budget=4, num_parents=80)
    serve(engine, prompt_of(40))
    handle = engine.submit([*prompt_of(40), 1, 2, 3], 2)
    plan = engine.round()
    assert (plan.prefix_len.tolist(), plan.input_len.tolist(), plan.samples.tolist()) == ([40], [3], [1])
    assert plan.handle.tolist() == [handle]
    engine.run()


# Namespaces.


def test_namespaces_share_nothing() -> None:
    engine = Engine(num_parents=100)
    names = [b"", b"a", b"b", b"ab", b"a\0", b"\0a", bytes(32), bytes(31)]
    for namespace in names:
        assert serve(engine, prompt_of(18), namespace=namespace) == 0, namespace
    for namespace in names:
        assert serve(engine, prompt_of(18), namespace=namespace) == 16, namespace


def test_a_namespace_is_not_confused_with_tokens() -> None:
    """Length framing: moving bytes between the namespace and the first tokens changes the key."""
    engine = Engine()
    first = int.from_bytes(b"abcd", "little")
    serve(engine, [first, 1, 2, 3, 4], namespace=b"")
    assert serve(engine, [1, 2, 3, 4, 5], namespace=b"abcd") == 0
    assert serve(engine, [first, 1, 2, 3, 9], namespace=b"") == 4


# When pages are published.


def test_nothing_is_published_before_its_forward_landed() -> None:
    engine = Engine(overlap=1, budget=64)
    engine.submit(prompt_of(20), 4)
    engine.plan()
    early = engine.submit(prompt_of(20), 4)
    engine.plan()
    assert engine.cached(early) == 0
    engine.land()
    late = engine.submit(prompt_of(20), 4)
    engine.plan()
    assert engine.cached(late) == 16, "the pages of a request that still runs are shared"
    engine.land_all()
    engine.run()
    engine.assert_whole()


def test_chunks_are_published_as_they_land() -> None:
    engine = Engine(budget=8)
    engine.submit(prompt_of(24), 1)
    engine.round()
    engine.plan()
    engine.land()
    sharer = engine.submit(prompt_of(24), 1)
    engine.run()
    assert engine.cached(sharer) == 16, "two chunks had landed when it came, and then it was its turn"


@pytest.mark.parametrize("chunk", [3, 8, 64])
@OVERLAPS
def test_two_equal_prompts_in_one_batch_are_both_right_and_cached_once(chunk: int, overlap: int) -> None:
    engine = Engine(budget=chunk, overlap=overlap)
    handles = [engine.submit(prompt_of(22), 5, choice=choice) for choice in range(2)]
    engine.run()
    for choice, handle in enumerate(handles):
        assert engine.done[handle].output == expected_output(prompt_of(22), 5, choice=choice)
    outputs = [engine.done[handle].output for handle in handles]
    pages = {tuple([*prompt_of(22), *output][: 4 * n]) for output in outputs for n in range(1, 26 // 4 + 1)}
    assert engine.group()[1] == len(pages), "equal blocks computed twice are deduplicated"
    engine.assert_whole()


@OVERLAPS
def test_blocks_computed_twice_are_shared_once_they_are_published(overlap: int) -> None:
    engine = Engine(budget=64, overlap=overlap)
    first, second = (engine.submit(prompt_of(22), 30, choice=choice) for choice in range(2))
    engine.plan()
    assert not set(engine.table(first)) & set(engine.table(second))
    engine.land()
    engine.rounds(3)
    engine.plan()
    assert engine.table(first)[:5] == engine.table(second)[:5]
    assert engine.table(first)[5:] != engine.table(second)[5:]
    engine.run()
    engine.assert_whole()


def test_an_aborted_prompt_publishes_what_landed_and_no_more() -> None:
    engine = Engine(budget=8, overlap=1)
    handle = engine.submit(prompt_of(30), 4)
    engine.plan()
    engine.land()
    engine.plan()
    engine.abort(handle)
    engine.land()
    engine.check()
    hit = serve(engine, prompt_of(30))
    assert hit in (8, 16)


# Failed rows.


@OVERLAPS
def test_a_failed_row_publishes_nothing(overlap: int) -> None:
    engine = Engine(overlap=overlap, budget=64)
    bad = engine.submit(prompt_of(20), 4)
    good = engine.submit(prompt_of(20, 1), 4)
    engine.plan()
    engine.land(failed={bad})
    engine.run()
    assert serve(engine, prompt_of(20)) == 0
    assert serve(engine, prompt_of(20, 1)) == 16
    assert engine.done[good].output == expected_output(prompt_of(20, 1), 4)
    engine.assert_whole()


@OVERLAPS
def test_what_landed_before_a_failed_row_stays_published(overlap: int) -> None:
    engine = Engine(overlap=overlap, budget=8)
    bad = engine.submit(prompt_of(24), 4)
    engine.plan()
    engine.land()
    engine.plan()
    engine.land(failed={bad})
    assert serve(engine, prompt_of(24)) == 8


def test_a_chunk_behind_a_failed_one_is_not_published_either() -> None:
    """The second chunk was out when the first failed. It landed well, but it read what the first had broken."""
    engine = Engine(overlap=1, budget=8)
    bad = engine.submit(prompt_of(24), 4)
    engine.plan()
    engine.plan()
    engine.land(failed={bad})
    engine.land()
    serve(engine, prompt_of(9))
    assert serve(engine, prompt_of(24)) == 8


def test_a_failed_decode_takes_its_page_with_it() -> None:
    engine = Engine(budget=64)
    bad = engine.submit(prompt_of(6), 20)
    engine.round()
    engine.plan()  # position 6
    engine.land()
    engine.plan()  # position 7 fills the second page
    engine.land(failed={bad})
    turn = [*prompt_of(6), *expected_output(prompt_of(6), 4)]
    assert serve(engine, turn) == 4


@OVERLAPS
def test_a_failed_sharer_leaves_the_shared_pages_alone(overlap: int) -> None:
    engine = Engine(overlap=overlap, budget=64)
    serve(engine, prompt_of(16))
    bad = engine.submit([*prompt_of(16), 1, 2, 3, 4, 5], 4)
    engine.plan()
    assert engine.cached(bad) == 16
    engine.land(failed={bad})
    assert serve(engine, [*prompt_of(16), 1, 2, 3, 4, 5]) == 16


# Eviction.


def test_a_cached_page_is_taken_when_there_is_no_free_block() -> None:
    engine = Engine(num_parents=10, budget=64)
    serve(engine, prompt_of(37))
    assert engine.group() == (0, 9, 1)
    serve(engine, prompt_of(37, 1))
    assert engine.group()[1] <= 10
    assert serve(engine, prompt_of(37, 1)) == 36
    engine.assert_whole()


def test_the_suffix_goes_before_the_prefix() -> None:
    engine = Engine(num_parents=10, budget=64)
    serve(engine, prompt_of(32))
    serve(engine, prompt_of(14, 1))
    hit = serve(engine, prompt_of(33))
    assert 16 <= hit <= 24, "a beginning is left, and only the end was taken"


def test_the_least_recently_used_goes_first() -> None:
    engine = Engine(num_parents=12, budget=64)
    old, used, new = prompt_of(16), prompt_of(16, 1), prompt_of(14, 2)
    serve(engine, old)
    serve(engine, used)
    assert serve(engine, [*old, 5]) == 16  # now `used` is the older one
    serve(engine, new)
    serve(engine, prompt_of(10, 3))
    assert serve(engine, [*old, 5]) == 16
    assert serve(engine, [*used, 5]) < 16


@pytest.mark.parametrize("taken", [0, 1, 2, 3, 4])
def test_a_page_that_lost_one_of_its_blocks_is_no_hit(taken: int) -> None:
    """Pages of two blocks; other load takes ``taken`` blocks from the end of the chain, odd or even."""
    engine = Engine(num_parents=15, granularity=2, prefix_granularity=4, budget=64)
    serve(engine, prompt_of(29))
    assert engine.group() == (0, 14, 1)
    serve(engine, prompt_of(2 * (taken + 1), 1))
    assert serve(engine, prompt_of(29)) == (28 - 2 * taken) // 4 * 4
    assert serve(engine, prompt_of(29)) == 28
    engine.assert_whole()


def test_an_evicted_prefix_is_hit_no_more_and_the_text_is_right() -> None:
    engine = Engine(num_parents=30, budget=32, max_model_len=1000)
    long = prompt_of(100)
    serve(engine, long, 4)
    assert serve(engine, long, 4) == 96
    for salt in range(1, 6):
        serve(engine, prompt_of(100, salt), 4)
    assert serve(engine, long, 4) == 0
    engine.assert_whole()


def test_pages_that_somebody_reads_are_not_evicted() -> None:
    engine = Engine(num_parents=16, budget=64)
    serve(engine, prompt_of(16))
    reader = engine.submit([*prompt_of(16), 7], 30, declared=False)
    engine.round()
    assert engine.cached(reader) == 16
    for salt in range(1, 6):
        engine.submit(prompt_of(20, salt), 2)
    engine.run()
    assert engine.done[reader].output == expected_output([*prompt_of(16), 7], 30)
    engine.assert_whole()


@OVERLAPS
def test_four_requests_of_two_prompts_in_a_pool_of_two(overlap: int) -> None:
    """A A B B: every answer is right, whoever shares with whom."""
    engine = Engine(num_parents=28, budget=16, overlap=overlap, max_num_seqs=4)
    prompts = [prompt_of(46, 1), prompt_of(46, 1), prompt_of(46, 2), prompt_of(46, 2)]
    handles = [engine.submit(prompt, 8, declared=False) for prompt in prompts]
    engine.run()
    for prompt, handle in zip(prompts, handles, strict=True):
        assert engine.done[handle].output == expected_output(prompt, 8)
    engine.assert_whole()


def test_a_sharer_of_a_prefix_as_large_as_half_the_pool_makes_progress() -> None:
    engine = Engine(num_parents=20, budget=16)
    prefix = prompt_of(40)
    first = engine.submit([*prefix, 1], 20)
    engine.rounds(5)
    second = engine.submit([*prefix, 2], 20)
    engine.run(200)
    assert engine.cached(second) == 40
    assert engine.done[first].output == expected_output([*prefix, 1], 20)
    assert engine.done[second].output == expected_output([*prefix, 2], 20)
    engine.assert_whole()
