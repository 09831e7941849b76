"""The sampler: reproducible by (seed, choice, position), inside the support its parameters allow, in the order said."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from one_draw import draw_once
from plan_maker import ints
from tiny_models import REFERENCE

from tokenspeed.device.handle import RowStart
from tokenspeed.device.placement import HOST
from tokenspeed.device.sampling.backends import backend_names, make_backend
from tokenspeed.device.sampling.backends.candidates import first_candidates
from tokenspeed.device.sampling.sampler import Sampled, Sampler
from tokenspeed.layers.kernels import KernelBinder
from tokenspeed.messages import SamplingParameters

VOCABULARY = 50
ROWS = 8


@pytest.fixture(params=[({}, "chosen"), (REFERENCE, "reference")], ids=lambda pair: pair[1], scope="module")
def sampler(request: pytest.FixtureRequest) -> Sampler:
    backend = make_backend("registry", KernelBinder(request.param[0]))
    return Sampler(HOST, backend, num_rows=ROWS + 1, max_batch=ROWS, vocab_size=VOCABULARY)


def begin(sampler: Sampler, row: int, *, prompt: Any = (1,), output: Any = (), **parameters: Any) -> None:
    sampling = SamplingParameters(**parameters)
    sampler.begin(RowStart(handle=row, row=row, sampling=sampling, prompt=ints(prompt), output=ints(output)))


def sample(sampler: Sampler, logits: torch.Tensor, rows: list[int], positions: list[int]) -> Sampled:
    return draw_once(sampler, logits, rows, positions)


def one(sampler: Sampler, logits: torch.Tensor, row: int = 1, position: int = 9) -> int:
    return int(sample(sampler, logits[None], [row], [position]).tokens[0])


def random_logits(seed: int, rows: int = 1, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * scale


def test_backends_are_listed_and_unknown_ones_refused() -> None:
    assert "registry" in backend_names()
    with pytest.raises(ValueError, match="'dice' does not exist"):
        make_backend("dice", KernelBinder({}))


@pytest.mark.parametrize("name", backend_names())
def test_every_backend_has_the_five_operations(name: str) -> None:
    backend = make_backend(name, KernelBinder({}))
    for operation in ("has_nan", "apply_penalties", "apply_token_mask", "sample", "logprobs"):
        assert callable(getattr(backend, operation))


@pytest.mark.parametrize("solution", ["reference", "torch", "chosen"])
@given(which=st.integers(0, 10**6), most=st.integers(2, 100), coarse=st.booleans())
@settings(max_examples=20, deadline=None)
def test_few_candidates_give_the_token_of_the_whole_vocabulary(
    solution: str, which: int, most: int, coarse: bool
) -> None:
    """Ties at the last place, both zeros, infinities, NaN, greedy rows among the others."""
    kernels = {} if solution == "chosen" else {"sampling.sample": solution}
    few, whole = (make_backend(name, KernelBinder(kernels)) for name in ("candidates", "registry"))
    generator, rows = torch.Generator().manual_seed(which), 7
    logits = torch.randn(rows, 400, generator=generator) * 3.0
    logits = logits.round() if coarse else logits
    logits[0, ::3], logits[1, :200], logits[2, 7] = -0.0, -torch.inf, torch.nan
    logits[3, 11] = torch.inf
    top_k = torch.randint(1, most + 1, (rows,), generator=generator, dtype=torch.int32)
    tenths = torch.rand(3, rows, generator=generator)
    rules = (0.2 + tenths[0], top_k, 1.0 - 0.5 * tenths[1], 0.3 * tenths[2])
    draws = torch.randint(-(2**62), 2**62, (rows,), generator=generator), torch.arange(rows, dtype=torch.int32)
    found = [torch.full((rows,), -1, dtype=torch.int32) for _ in range(2)]
    for backend, out in zip((few, whole), found, strict=True):
        backend.sample(logits.clone(), *rules, draws[0], draws[1], draws[1], out, most_kept=int(top_k.max()))
    assert all(0 <= int(out[2]) < 400 for out in found), "of a row with a NaN any token will do"
    few_drawn, drawn = ([*out[:2].tolist(), *out[3:].tolist()] for out in found)
    assert few_drawn == drawn


@given(st.integers(1, 60), st.booleans())
@settings(max_examples=25, deadline=None)
def test_candidates_come_in_the_order_of_the_contract(count: int, coarse: bool) -> None:
    z = torch.randn(5, 90, generator=torch.Generator().manual_seed(count))
    z = z.round() if coarse else z
    z[0, 3], z[1, 5:] = torch.nan, -torch.inf
    expected = torch.sort(torch.where(torch.isnan(z), -torch.inf, z), dim=1, descending=True, stable=True).indices
    assert torch.equal(first_candidates(z, count), expected[:, :count])


def test_the_host_knows_how_many_candidates_a_step_keeps(sampler: Sampler) -> None:
    def most(*top_k: int) -> int:
        for row, kept in enumerate(top_k, start=1):
            begin(sampler, row, top_k=kept)
        return sampler._parameters.most_kept(np.arange(1, len(top_k) + 1))

    assert (most(20, 1, 64), most(20, 0), most(1), most()) == (64, 0, 1, 0)


@given(st.integers(0, 2**64 - 1), st.integers(0, 100), st.integers(0, 2**20), st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_a_token_depends_on_seed_choice_and_position_only(
    sampler: Sampler, seed: int, choice: int, position: int, which: int
) -> None:
    logits = random_logits(which, rows=4)
    begin(sampler, 1, seed=seed, choice=choice)
    alone = one(sampler, logits[0], 1, position)
    begin(sampler, 5, seed=seed, choice=choice)
    for row in (2, 3, 4):
        begin(sampler, row, seed=seed + row, temperature=0.5, top_k=row)
    batch = sample(sampler, logits[[1, 2, 0, 3]], [2, 3, 5, 4], [3, 4, position, 5])
    assert batch.tokens[2] == alone


def test_other_seeds_choices_and_positions_draw_other_tokens(sampler: Sampler) -> None:
    flat = torch.zeros(VOCABULARY)

    def draws(vary: str) -> set[int]:
        found = set()
        for value in range(40):
            begin(sampler, 1, seed=value if vary == "seed" else 1, choice=value if vary == "choice" else 0)
            found.add(one(sampler, flat, position=value if vary == "position" else 7))
        return found

    for vary in ("seed", "choice", "position"):
        assert len(draws(vary)) > 15, vary


def test_all_64_bits_of_a_seed_count(sampler: Sampler) -> None:
    flat = torch.zeros(VOCABULARY)
    for seed in (5, 5 + (1 << 62), 5 + (1 << 63), (1 << 64) - 1):
        begin(sampler, 1, seed=seed)
        begin(sampler, 2, seed=seed ^ (1 << 63))
        draws = [[one(sampler, flat, row, position) for position in range(8)] for row in (1, 2)]
        assert draws[0] != draws[1]


def test_frequencies_follow_the_probabilities(sampler: Sampler) -> None:
    logits = torch.full((VOCABULARY,), -torch.inf)
    logits[[3, 20, 41]] = torch.tensor([0.5, 0.3, 0.2]).log() * 0.7
    begin(sampler, 1, seed=11, temperature=0.7)
    count = 600
    tokens = [one(sampler, logits, position=position) for position in range(count)]
    for token, probability in ((3, 0.5), (20, 0.3), (41, 0.2)):
        deviation = (probability * (1 - probability) / count) ** 0.5
        assert abs(tokens.count(token) / count - probability) < 5 * deviation
    assert set(tokens) == {3, 20, 41}


def support(logits: torch.Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens that may be drawn, by plain formulas."""
    order = sorted(range(VOCABULARY), key=lambda token: (-float(logits[token]), token))
    probabilities = torch.softmax(logits.double() / temperature, dim=-1)
    kept = order[:top_k] if top_k else order
    total, mass, nucleus = sum(float(probabilities[token]) for token in kept), 0.0, []
    for token in kept:
        if mass >= top_p * total * (1 + 1e-9):
            break
        nucleus.append(token)
        mass += float(probabilities[token])
    least = min_p * float(probabilities[order[0]]) * (1 - 1e-5)
    return {token for token in nucleus if float(probabilities[token]) >= least}


@given(
    which=st.integers(0, 10**6),
    temperature=st.floats(0.2, 3.0),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.5),
)
@settings(max_examples=25, deadline=None)
def test_tokens_lie_in_the_support(
    sampler: Sampler, which: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = random_logits(which)[0]
    allowed = support(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    begin(sampler, 1, seed=which, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for position in range(8):
        assert one(sampler, logits, position=position) in allowed


def test_greedy_takes_the_best_and_of_equals_the_lower_id(sampler: Sampler) -> None:
    begin(sampler, 1, top_k=1, seed=5)
    logits = random_logits(3)[0]
    assert one(sampler, logits) == int(logits.argmax())
    logits[[9, 30]] = 100.0
    assert one(sampler, logits) == 9


def test_logit_bias(sampler: Sampler) -> None:
    logits = random_logits(4)[0]
    best = int(logits.argmax())
    other = (best + 1) % VOCABULARY
    begin(sampler, 1, top_k=1, logit_bias={best: -100.0})
    assert one(sampler, logits) == int(logits.argsort(descending=True)[1])
    begin(sampler, 1, top_k=1, logit_bias={other: 100.0, 10**6: 5.0})  # an id beyond the vocabulary changes nothing
    assert one(sampler, logits) == other


def test_stop_tokens_are_masked_until_min_tokens(sampler: Sampler) -> None:
    logits = random_logits(4)[0]
    best, second = logits.argsort(descending=True)[:2].tolist()
    begin(sampler, 1, top_k=1, prompt=[1, 2, 3], min_tokens=2, stop_token_ids=(best,))
    assert [one(sampler, logits, position=position) for position in (3, 4, 5, 6)] == [second, second, best, best]


def plain_penalties(
    logits: torch.Tensor, prompt: list[int], output: list[int], presence: float, frequency: float, repetition: float
) -> torch.Tensor:
    result = logits.clone()
    for token in range(VOCABULARY):
        count = output.count(token)
        if count or token in prompt:
            result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
        result[token] -= frequency * count + presence * (count > 0)
    return result


TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=12)


@given(
    which=st.integers(0, 10**6),
    prompt=TOKENS.filter(bool),
    output=TOKENS,
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    repetition=st.floats(0.5, 2),
)
@settings(max_examples=40, deadline=None)
def test_penalties_equal_plain_formulas(
    sampler: Sampler,
    which: int,
    prompt: list[int],
    output: list[int],
    presence: float,
    frequency: float,
    repetition: float,
) -> None:
    logits = random_logits(which, rows=2)
    parameters = {"presence_penalty": presence, "frequency_penalty": frequency, "repetition_penalty": repetition}
    begin(sampler, 2, top_k=1, prompt=prompt, output=output, **parameters)
    begin(sampler, 3, top_k=1, prompt=prompt, output=output)
    tokens = sample(sampler, logits, [2, 3], [30, 30]).tokens.tolist()
    penalised = plain_penalties(logits[0], prompt, output, presence, frequency, repetition)
    assert float(penalised.max() - penalised[tokens[0]]) < 1e-4
    assert tokens[1] == int(logits[1].argmax())


def test_drawn_tokens_are_counted_and_a_restart_rebuilds_the_counts(sampler: Sampler) -> None:
    logits = random_logits(8)[0]
    begin(sampler, 1, top_k=1, prompt=[0], frequency_penalty=0.9)
    drawn = [one(sampler, logits, position=position) for position in range(1, 9)]
    assert len(set(drawn)) > 1
    begin(sampler, 1, top_k=1)  # another request without penalties takes the row in between
    assert one(sampler, logits) == int(logits.argmax())
    begin(sampler, 1, top_k=1, prompt=[0], output=drawn[:5], frequency_penalty=0.9)
    assert [one(sampler, logits, position=position) for position in range(6, 9)] == drawn[5:]


def test_many_penalised_rows_keep_their_own_counts(sampler: Sampler) -> None:
    logits = random_logits(8, rows=ROWS)
    rows = list(range(1, ROWS + 1))
    for row in rows:
        begin(sampler, row, top_k=1, prompt=[0], output=[int(logits[row - 1].argmax())], presence_penalty=50.0)
    tokens = sample(sampler, logits, rows, [9] * ROWS).tokens.tolist()
    assert tokens == logits.argsort(dim=1, descending=True)[:, 1].tolist()
    for row in rows:
        begin(sampler, row, top_k=1)
    assert sample(sampler, logits, rows, [9] * ROWS).tokens.tolist() == logits.argmax(dim=1).tolist()


def test_rows_with_nan_are_flagged_and_others_are_not_touched(sampler: Sampler) -> None:
    logits = random_logits(5, rows=3)
    logits[1, 7] = torch.nan
    for row in (1, 2, 3):
        begin(sampler, row, top_k=1, logprobs=0)
    result = sample(sampler, logits, [1, 2, 3], [4, 4, 4])
    assert result.nan.tolist() == [False, True, False]
    assert result.tokens.tolist() == [int(logits[0].argmax()), -1, int(logits[2].argmax())]


def test_logprobs_are_those_of_the_raw_logits(sampler: Sampler) -> None:
    logits = random_logits(6, rows=3)
    expected = torch.log_softmax(logits, dim=-1)
    begin(sampler, 1, top_k=1, temperature=0.1, logit_bias={7: 100.0}, presence_penalty=1.0, logprobs=3)
    begin(sampler, 2, top_k=1)
    begin(sampler, 3, top_k=1, logprobs=0)
    result = sample(sampler, logits, [1, 2, 3], [4, 4, 4])
    assert result.tokens[0] == 7
    taken = result.logprobs
    assert taken is not None
    assert taken.logprobs[0] == pytest.approx(float(expected[0, 7]), abs=1e-5)
    assert taken.top_ids[0].tolist() == expected[0].topk(3).indices.tolist()
    np.testing.assert_allclose(taken.top_logprobs[0], expected[0].topk(3).values, atol=1e-5)
    assert np.isnan(taken.logprobs[1])
    assert taken.top_ids[1].tolist() == [-1] * 3
    assert taken.logprobs[2] == pytest.approx(float(expected[2].max()), abs=1e-5)


def test_nobody_asking_means_no_logprobs(sampler: Sampler) -> None:
    begin(sampler, 1, top_k=1)
    assert sample(sampler, random_logits(1), [1], [1]).logprobs is None


def test_more_logprobs_than_tokens_give_all_tokens(sampler: Sampler) -> None:
    begin(sampler, 1, top_k=1, logprobs=10**6)
    taken = sample(sampler, random_logits(1), [1], [1]).logprobs
    assert taken is not None
    assert sorted(taken.top_ids[0].tolist()) == list(range(VOCABULARY))


def test_results_are_copies(sampler: Sampler) -> None:
    begin(sampler, 1, top_k=1)
    first = sample(sampler, random_logits(1), [1], [1])
    kept = first.tokens.tolist()
    for seed in range(2, 6):
        sample(sampler, random_logits(seed), [1], [1])
    assert first.tokens.tolist() == kept
