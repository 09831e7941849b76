"""Cases of sampling.verify and sampling.verify_proposals. The oracle is plain Python over lists, one node at a time."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch

from tokenspeed_kernel.numerics.cases import Buffers, Case, Exact, Expectation, Outputs, register_cases
from tokenspeed_kernel.numerics.sampling_cases import Draw, kept_weights
from tokenspeed_kernel.ops.sampling import uniform
from tokenspeed_kernel.registry import KernelFunction
from tokenspeed_kernel.signature import FormatSignature

_EDGE = 1e-9  # where a comparison is this close to even, kernels may differ: no case is

Trees = tuple[tuple[int, ...], ...]
"""The parents of each row's nodes."""

_CHAIN = (-1, 0, 1, 2, 3)
_TREE = (-1, 0, 0, 0, 1, 1, 2, 4, 4, 5)
_ROWS: dict[str, Trees] = {
    "no rows": (),
    "plain decode": ((-1,), (-1,), (-1,)),
    "chains": (_CHAIN, (), (-1,), _CHAIN[:3], (*_CHAIN, 4, 5)),
    "trees": (_TREE, _CHAIN, (), _TREE[:4], (-1, *[0] * 90, 70)),
}


@dataclass(frozen=True)
class _Rows:
    """What both operations take of a batch; ``width``: of a path, at most."""

    trees: Trees
    drafted: torch.Tensor
    width: int

    def held(self, buffers: Buffers, first: int, stop: int) -> list[torch.Tensor]:
        """drafted, parents and starts of some rows."""
        trees = self.trees[first:stop]
        begin = sum(map(len, self.trees[:first]))
        count = sum(map(len, trees))
        parents = torch.tensor([parent for tree in trees for parent in tree], dtype=torch.int32)
        starts = torch.tensor([0, *accumulate(map(len, trees))], dtype=torch.int32)
        parts = (self.drafted[begin : begin + count], parents, starts)
        return [buffers.read_only(name, x) for name, x in zip(("drafted", "parents", "starts"), parts, strict=True)]

    def outputs(self, buffers: Buffers) -> Outputs:
        rows = len(self.trees)
        shapes = {"path": (rows, self.width), "tokens": (rows, self.width), "counts": (rows,)}
        return {name: buffers.output(name, shape, torch.int32) for name, shape in shapes.items()}

    def expect(self, walks: list[list[tuple[int, int]]]) -> dict[str, Expectation]:
        """``walks``: nodes and tokens of each row."""
        found = torch.full((2, len(self.trees), self.width), -1, dtype=torch.int32)
        for row, walk in enumerate(walks):
            for step, pair in enumerate(walk):
                found[:, row, step] = torch.tensor(pair, dtype=torch.int32)
        counts = torch.tensor([len(walk) for walk in walks], dtype=torch.int32)
        return {"path": Exact(found[0]), "tokens": Exact(found[1]), "counts": Exact(counts)}

    def each(self) -> Iterator[tuple[int, tuple[int, ...], list[int]]]:
        """The first node, the parents and the drafts of each row."""
        first = 0
        for tree in self.trees:
            yield first, tree, self.drafted[first : first + len(tree)].tolist()
            first += len(tree)


def _nodes(trees: Trees) -> int:
    return sum(map(len, trees))


@dataclass(frozen=True)
class _Drawn:
    """One call of sampling.verify."""

    rows: _Rows
    drawn: torch.Tensor

    def run(self, fn: KernelFunction, buffers: Buffers, *, step: int) -> Outputs:
        outputs = self.rows.outputs(buffers)
        for row in range(0, max(1, len(self.rows.trees)), max(1, step)):
            begin = _nodes(self.rows.trees[:row])
            held = self.rows.held(buffers, row, row + step)
            drawn = buffers.read_only("drawn", self.drawn[begin : begin + held[0].shape[0]])
            fn(drawn, *held, *(out[row : row + step] for out in outputs.values()))
        return outputs

    def expect(self) -> dict[str, Expectation]:
        walks = []
        for first, tree, known in self.rows.each():
            walk: list[tuple[int, int]] = []
            node = 0 if tree else None
            while node is not None and len(walk) < self.rows.width:
                token = int(self.drawn[first + node])
                walk.append((node, token))
                children = (n for n, parent in enumerate(tree) if parent == node and known[n] == token)
                node = next(children, None)
            walks.append(walk)
        return self.rows.expect(walks)


def verify_cases(_signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Chains and trees of few tokens, so that much of what was drafted is right, and paths that end early."""
    for name, trees in _ROWS.items():
        for width in (1, 3, 8):
            drafted, drawn = (
                torch.randint(0, 2, (_nodes(trees),), generator=generator, dtype=torch.int32) for _ in range(2)
            )
            case = _Drawn(_Rows(trees, drafted, width), drawn)
            whole, apart = (partial(case.run, step=step) for step in (len(trees), 1))
            yield Case(f"{name}, paths of {width}", {}, whole, case.expect, split=apart)


@dataclass(frozen=True)
class _Proposed:
    """One call of sampling.verify_proposals; a Draw, logits [V] and proposals [V] for each node."""

    rows: _Rows
    logits: torch.Tensor
    proposals: torch.Tensor
    draws: tuple[Draw, ...]

    def run(self, fn: KernelFunction, buffers: Buffers, *, step: int) -> Outputs:
        outputs = self.rows.outputs(buffers)
        for row in range(0, max(1, len(self.rows.trees)), max(1, step)):
            begin = _nodes(self.rows.trees[:row])
            held = self.rows.held(buffers, row, row + step)
            part = slice(begin, begin + held[0].shape[0])
            rules = [
                buffers.read_only(name, torch.tensor([getattr(draw, name) for draw in self.draws[part]], dtype=dtype))
                for name, dtype in (
                    ("temperature", torch.float32), ("top_k", torch.int32), ("top_p", torch.float32),
                    ("min_p", torch.float32), ("seed", torch.int64), ("choice", torch.int32),
                    ("position", torch.int32),
                )
            ]  # fmt: skip
            logits = buffers.read_only("logits", self.logits[part])
            beside = torch.cat([self.proposals[part], torch.full((self.proposals[part].shape[0], 3), torch.nan)], dim=1)
            proposals = buffers.read_only("proposals", beside)[:, : self.proposals.shape[1]]
            fn(logits, *rules, proposals, *held, *(out[row : row + step] for out in outputs.values()))
        return outputs

    def walks(self, shift: float) -> list[list[tuple[int, int]]]:
        """Every comparison shifted by a share of what it compares with."""
        walks = []
        for first, tree, known in self.rows.each():
            walk: list[tuple[int, int]] = []
            node = 0 if tree else None
            while node is not None and len(walk) < self.rows.width:
                children = [n for n, parent in enumerate(tree) if parent == node]
                token, place = self._decided(first + node, [known[child] for child in children], shift)
                walk.append((node, token))
                node = None if place is None else children[place]
            walks.append(walk)
        return walks

    def _decided(self, at: int, drafts: list[int], shift: float) -> tuple[int, int | None]:
        draw = self.draws[at]
        kept = kept_weights(self.logits[at].tolist(), draw, shift)
        if draw.top_k == 1:
            token = next(iter(kept))
            return token, drafts.index(token) if token in drafts else None
        q = self.proposals[at].tolist()
        key = (draw.seed, draw.choice, draw.position)
        taken, left = 0.0, sum(kept.values())
        for index, token in enumerate(drafts):
            rest = max(kept.get(token, 0.0) - taken * q[token], 0.0)
            if rest > 0.0 and uniform(*key, index + 1) * q[token] * left <= rest * (1.0 + shift):
                return token, index
            taken += left
            left = sum(max(weight - taken * q[token], 0.0) for token, weight in kept.items())
        rests = {token: max(w - taken * q[token], 0.0) for token, w in kept.items()} if left > 0.0 else kept
        running, target = 0.0, uniform(*key) * sum(rests.values()) * (1.0 + shift)
        for token, rest in rests.items():
            running += rest
            if rest > 0.0 and running >= target:
                return token, None
        return [token for token, rest in rests.items() if rest > 0.0][-1], None

    def expect(self) -> dict[str, Expectation]:
        return self.rows.expect(self.walks(0.0))


def _proposed(trees: Trees, draws: tuple[Draw, ...], tokens: int, width: int, generator: torch.Generator) -> _Proposed:
    """Drafts that are drawn from proposals near the model's; of a node's siblings all from its parent's."""
    nodes = _nodes(trees)
    logits = (torch.randn(nodes, tokens, generator=generator) * 8.0).round() / 4.0
    near = torch.softmax(logits + torch.randn(nodes, tokens, generator=generator), dim=1)
    drafted = torch.zeros(nodes, dtype=torch.int32)
    first = 0
    for tree in trees:
        for node, parent in enumerate(tree):
            if parent >= 0:
                drafted[first + node] = torch.multinomial(near[first + parent], 1, generator=generator)
        first += len(tree)
    return _Proposed(_Rows(trees, drafted, width), logits, near, draws)


def _sure(case: _Proposed) -> _Proposed:
    """The case with other seeds, where a comparison of it is too close to even."""
    while not case.walks(0.0) == case.walks(_EDGE) == case.walks(-_EDGE):
        case = replace(case, draws=tuple(replace(draw, seed=draw.seed + 1) for draw in case.draws))
    return case


def verify_proposals_cases(_signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Chains and trees under every rule of sampling.sample, each node under one of its own; proposals that leave out
    what the model keeps, and the model's own."""
    rules = (
        Draw(),
        Draw(temperature=0.6, top_k=4),
        Draw(top_k=1),
        Draw(temperature=1.4, top_p=0.8),
        Draw(min_p=0.1),
        Draw(temperature=0.9, top_k=9, top_p=0.9, min_p=0.02),
    )
    for name, trees in _ROWS.items():
        for tokens, width in ((13, 8), (40, 3)):
            nodes = _nodes(trees)
            draws = tuple(
                replace(rules[node % len(rules)], seed=97 * node - 300, choice=node % 3, position=node * 5)
                for node in range(nodes)
            )
            case = _sure(_proposed(trees, draws, tokens, width, generator))
            whole, apart = (partial(case.run, step=step) for step in (len(trees), 1))
            yield Case(f"{name}, {tokens} tokens, paths of {width}", {}, whole, case.expect, split=apart)
    case = _proposed((_CHAIN, _TREE), tuple(Draw(seed=seed) for seed in range(15)), 7, 6, generator)
    case = _sure(replace(case, proposals=torch.softmax(case.logits, dim=1)))
    yield Case("proposals of the model itself", {}, partial(case.run, step=2), case.expect)
    apart_from_model = torch.nn.functional.one_hot(case.logits.argmin(dim=1), 7).float()
    drafted = case.rows.drafted.clone()
    drafted.copy_(case.logits.argmin(dim=1).roll(1))
    case = _sure(replace(case, proposals=apart_from_model, rows=replace(case.rows, drafted=drafted)))
    yield Case("proposals of what the model finds least likely", {}, partial(case.run, step=2), case.expect)


register_cases("sampling.verify", verify_cases)
register_cases("sampling.verify_proposals", verify_proposals_cases)
