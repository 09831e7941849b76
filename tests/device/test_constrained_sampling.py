"""Constrained rows draw what conforms, whatever else is asked; the rows beside them draw what they drew before."""

import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from grammars import END, SIZE, allowed, compiled, ids, piece, text_of, vocabulary
from numpy.typing import NDArray
from one_draw import draw_once
from plan_maker import ints
from tiny_models import REFERENCE

from tokenspeed.device.handle import Grammar, RowStart, TokenMatcher
from tokenspeed.device.placement import HOST
from tokenspeed.device.sampling.backends import make_backend
from tokenspeed.device.sampling.constraints import NO_PROBABILITY, NO_TOKEN
from tokenspeed.device.sampling.sampler import Sampled, Sampler
from tokenspeed.layers.kernels import KernelBinder
from tokenspeed.messages import SamplingParameters

ROWS = 8
PROMPT = 5


@pytest.fixture(params=[({}, "chosen"), (REFERENCE, "reference")], ids=lambda pair: pair[1])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return made(request.param[0])


def made(kernels: dict[str, str]) -> Sampler:
    backend = make_backend("registry", KernelBinder(kernels))
    return Sampler(HOST, backend, num_rows=ROWS + 1, max_batch=ROWS, vocab_size=SIZE)


def begin(sampler: Sampler, row: int, grammar: Grammar | None, output: Sequence[int] = (), **parameters: Any) -> None:
    parameters.setdefault("stop_token_ids", (END,))
    sampling = SamplingParameters(**parameters)
    sampler.begin(
        RowStart(
            handle=row, row=row, sampling=sampling, prompt=ints([1] * PROMPT), output=ints(output), grammar=grammar
        )
    )


def step(sampler: Sampler, logits: torch.Tensor, rows: Sequence[int], generated: int) -> Sampled:
    return draw_once(sampler, logits, rows, [PROMPT + generated] * len(rows))


def noise(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(seed)) * 2.0


def draw(sampler: Sampler, row: int, seed: int, most: int = 400, start: int = 0) -> tuple[list[int], str]:
    """Tokens under random logits until the row ends, and how: "whole", "stop", "refused: ..." or "length"."""
    tokens: list[int] = []
    for at in range(start, most):
        sampled = step(sampler, noise(1000 * seed + at), [row], at)
        if sampled.refused:
            return tokens, f"refused: {sampled.refused[0]}"
        tokens.append(int(sampled.tokens[0]))
        if tokens[-1] == END:
            return tokens[:-1], "stop"
        if sampled.complete:
            return tokens, "whole"
    return tokens, "length"


def random_schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose texts are short: strings, arrays and numbers are bounded."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    kind = chance.choice([*kinds, "object", "array", "anyOf", "object", "array"] if depth < 3 else kinds)
    if kind == "string":
        return {"type": "string", "minLength": chance.randrange(3), "maxLength": chance.randrange(3, 9)}
    if kind in ("integer", "number"):
        low = chance.randrange(-500, 500)
        return {"type": kind, "minimum": low, "maximum": low + chance.randrange(1, 2000)}
    if kind == "enum":
        return {"enum": [chance.choice(["a", "ü", 1, -2.5, None, True, [1], {"k": "v"}, 'q"\\']) for _ in range(3)]}
    if kind == "const":
        return {"const": chance.choice(["x y", 17, False, {"a": []}])}
    if kind == "pattern":
        return {"type": "string", "pattern": chance.choice(["^[a-f]{2,5}$", "^(ab|cd)+$", r"^\d{3}-\d{2}$"])}
    inner = [random_schema(chance, depth + 1) for _ in range(chance.randrange(1, 4))]
    if kind == "anyOf":
        return {"anyOf": inner}
    if kind == "array":
        return {"type": "array", "items": inner[0], "minItems": chance.randrange(2), "maxItems": chance.randrange(2, 4)}
    properties = {f"{chance.choice('abcd')} {at}": schema for at, schema in enumerate(inner)}
    required = [name for name in properties if chance.random() < 0.5]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def test_a_hundred_random_schemas_under_random_logits() -> None:
    sampler = made({})
    whole, known = 0, vocabulary().tokens
    for seed in range(100):
        schema = random_schema(random.Random(seed))
        # White space at random would go on for long: here it says nothing.
        begin(sampler, 1, compiled("json_schema", {"x-guidance": {"whitespace_flexible": False}, **schema}), seed=seed)
        tokens, how = draw(sampler, 1, seed)
        assert how in ("whole", "stop", "length"), (schema, how)
        if how == "length":
            continue
        whole += 1
        jsonschema.validate(json.loads(b"".join(known[token] for token in tokens)), schema)
    assert whole >= 95


@pytest.mark.parametrize(
    "parameters",
    [
        {"top_k": 1},
        {"top_k": 3, "temperature": 2.0},
        {"top_p": 0.1},
        {"min_p": 0.5},
        {"presence_penalty": 2.0, "frequency_penalty": 1.0, "repetition_penalty": 1.5},
        {"logit_bias": {ord("x"): 100.0, END: 100.0}},
        {"logprobs": 3},
        {"stop_token_ids": ()},
    ],
    ids=str,
)
def test_every_parameter_goes_with_a_constraint(sampler: Sampler, parameters: dict[str, Any]) -> None:
    grammar = compiled("regex", "(ab|c){3}[0-9]{2}!")
    begin(sampler, 3, grammar, seed=5, **parameters)
    tokens, how = draw(sampler, 3, 1)
    assert how == "whole"
    text = text_of(tokens)
    assert text.endswith("!") and set(text[:-3]) <= set("abc") and text[-3:-1].isdigit()


def test_log_probabilities_are_the_models_own(sampler: Sampler) -> None:
    begin(sampler, 1, compiled("choice", ["q"]), logprobs=2)
    logits = noise(3)
    sampled = step(sampler, logits, [1], 0)
    expected = torch.log_softmax(logits[0], dim=-1)
    assert sampled.tokens.tolist() == [ord("q")]
    assert sampled.logprobs is not None
    assert sampled.logprobs.logprobs[0] == pytest.approx(float(expected[ord("q")]), abs=1e-4)
    assert sampled.logprobs.top_ids[0].tolist() == torch.topk(expected, 2).indices.tolist()


def test_rows_without_a_constraint_draw_what_they_drew(sampler: Sampler) -> None:
    logits = noise(9, rows=6)
    rows = [1, 2, 3, 4, 5, 6]
    for row in rows:
        begin(sampler, row, None, seed=row, top_p=0.9)
    alone = step(sampler, logits, rows, 0).tokens.tolist()
    for row in (2, 5):
        begin(sampler, row, compiled("regex", "[a-z]+"), seed=row, top_p=0.9)
    mixed = step(sampler, logits, rows, 0)
    assert [mixed.tokens[at] for at in (0, 2, 3, 5)] == [alone[at] for at in (0, 2, 3, 5)]
    assert all(text_of([mixed.tokens[at]]).isalpha() for at in (1, 4))
    for row in (2, 5):  # other requests take the rows
        begin(sampler, row, None, seed=row, top_p=0.9)
    assert step(sampler, logits, rows, 0).tokens.tolist() == alone


def test_the_masks_grow_with_the_rows(sampler: Sampler) -> None:
    for row in range(1, ROWS + 1):
        begin(sampler, row, compiled("choice", [chr(ord("a") + row)]))
    sampled = step(sampler, noise(1, rows=ROWS), list(range(1, ROWS + 1)), 0)
    assert text_of(sampled.tokens) == "bcdefghi"
    assert sorted(sampled.complete) == list(range(ROWS))


def test_a_row_begins_again_where_it_was(sampler: Sampler) -> None:
    grammar = compiled("json_schema", {"type": "array", "items": {"type": "integer"}, "minItems": 9, "maxItems": 9})
    begin(sampler, 1, grammar, seed=4)
    tokens, _ = draw(sampler, 1, 2)
    for kept in (1, len(tokens) // 2, len(tokens) - 1):
        begin(sampler, 2, grammar, output=tokens[:kept], seed=4)
        again, how = draw(sampler, 2, 2, start=kept)
        assert [*tokens[:kept], *again] == tokens and how == "whole"


def test_the_end_may_come_where_the_text_is_whole_and_only_there(sampler: Sampler) -> None:
    eager = torch.zeros(1, SIZE)
    eager[0, END] = 50.0
    begin(sampler, 1, compiled("regex", "ab+"), top_k=1)
    drawn = [int(step(sampler, eager, [1], at).tokens[0]) for at in range(2)]
    assert text_of(drawn) == "ab"
    begin(sampler, 1, compiled("regex", "ab+"), top_k=1, output=ids("ab"))
    last = step(sampler, eager, [1], 2)
    assert last.tokens.tolist() == [END] and not last.complete
    assert step(sampler, eager, [1], 3).refused == {}, "a step was out behind the end; what it draws is dropped"
    begin(sampler, 1, compiled("regex", "ab+"), top_k=1, output=ids("ab"), min_tokens=4)
    assert text_of(step(sampler, eager, [1], 2).tokens) == "b"
    begin(sampler, 1, compiled("regex", "ab+"), top_k=1, output=ids("ab"), stop_token_ids=())
    assert text_of(step(sampler, eager, [1], 2).tokens) == "b", "an end token that is to be ignored is not drawn"


def test_a_stop_token_of_text_ends_only_what_is_whole(sampler: Sampler) -> None:
    begin(sampler, 1, compiled("regex", "b*ab*"), top_k=1, stop_token_ids=(ord("b"), piece(b"ab")))
    wants_b = torch.zeros(1, SIZE)
    wants_b[0, ord("b")] = 9.0
    assert text_of(step(sampler, wants_b, [1], 0).tokens) == "a"
    assert text_of(step(sampler, wants_b, [1], 1).tokens) == "b"
    begin(sampler, 1, compiled("choice", ["b"]), stop_token_ids=(ord("b"),))
    assert step(sampler, wants_b, [1], 0).refused == {0: NO_TOKEN}


def test_a_dead_end_is_the_error_of_its_row(sampler: Sampler) -> None:
    begin(sampler, 1, compiled("choice", ["abc"]), top_k=1)
    begin(sampler, 2, None, top_k=1)
    begin(sampler, 3, compiled("regex", "[ab]x"), top_k=1, logit_bias={ord("a"): -100.0})
    logits = noise(2, rows=3)
    logits[0, ord("a")] = logits[0, piece(b"ab")] = -torch.inf
    sampled = step(sampler, logits, [1, 2, 3], 0)
    assert sampled.refused == {0: NO_PROBABILITY}
    assert sampled.tokens[0] == -1 and not sampled.nan.any()
    assert sampled.tokens[1] == int(logits[1].argmax())
    assert text_of([sampled.tokens[2]]) == "b"
    logits[2, 5] = torch.nan
    again = step(sampler, logits, [1, 2, 3], 1)
    assert again.refused == {0: NO_PROBABILITY} and again.nan.tolist() == [False, False, True]


class _Broken(TokenMatcher):
    may_end = False
    error = ""

    def fill(self, mask: NDArray[np.int32]) -> None:
        mask[:] = -1

    def accept(self, token: int) -> None:
        raise RuntimeError("out of order")


class _BrokenGrammar(Grammar):
    def matcher(self) -> TokenMatcher:
        return _Broken()


def test_a_matcher_that_raises_ends_its_row_alone(sampler: Sampler) -> None:
    begin(sampler, 1, _BrokenGrammar(), top_k=1)
    begin(sampler, 2, None, top_k=1)
    assert step(sampler, noise(1, rows=2), [1, 2], 0).refused == {}
    sampled = step(sampler, noise(2, rows=2), [1, 2], 1)
    assert sampled.refused == {0: "the constraint failed: out of order"}
    assert sampled.tokens[1] == int(noise(2, rows=2)[1].argmax())


def test_the_constraint_begins_when_the_reasoning_ends(sampler: Sampler) -> None:
    grammar = compiled("choice", ["yes"], "</think>")
    begin(sampler, 1, grammar, top_k=1)
    eager = torch.zeros(1, SIZE)
    eager[0, END], eager[0, ord("h")] = 50.0, 9.0
    assert text_of(step(sampler, eager, [1], 0).tokens) == "h", "no end before the answer"
    closing = torch.zeros(1, SIZE)
    closing[0, piece(b"</think>")] = 9.0
    assert step(sampler, closing, [1], 1).tokens.tolist() == [piece(b"</think>")]
    assert text_of(int(step(sampler, eager, [1], at).tokens[0]) for at in (2, 3, 4)) == "yes"
    begin(sampler, 1, grammar, output=[ord("h"), piece(b"</think>"), ord("y")], top_k=1)
    assert text_of(step(sampler, eager, [1], 3).tokens) == "e", "a request that comes back knows where it was"
    assert allowed(grammar.matcher()) == set(range(SIZE)) - {END}
