"""Layers with a state by Triton's interpreter against the references: rows of all kinds, chunk edges, strong decays,
states that stay in their block."""

import pytest
import torch

from tokenspeed_kernel.numerics.state_rows import ROWS
from tokenspeed_kernel.ops.causal_conv import reference_causal_conv
from tokenspeed_kernel.ops.gated_delta import reference_gated_delta
from tokenspeed_kernel.ops.gated_norm import reference_gated_rms
from tokenspeed_kernel_triton import elementwise, gated_delta_chunks, recurrent
from tokenspeed_kernel_triton.configs import SHARED_MEMORY, delta_tile
from tokenspeed_kernel_triton.device import compiling_for

EPS = 1e-6

CUTS = {(tile.chunk, tile.values): name for name in sorted(SHARED_MEMORY) for tile in [delta_tile(name)]}
"""An architecture for each way in which rows are cut; the number of threads makes no difference here."""


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(20261130)


def close(found, expected, bound=4e-6):
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


def rows_of(rows):
    """Starts, sources, targets; ``rows``: tokens, source and target of each."""
    lengths, sources, targets = zip(*rows, strict=True)
    ints = (torch.tensor([0, *lengths]).cumsum(0), torch.tensor(sources), torch.tensor(targets))
    return tuple(values.to(torch.int32) for values in ints)


def arena(rows, *shape):
    """Blocks of a state; NaN in those that no row begins from, block 0 included."""
    state = torch.full((10, *shape), torch.nan)
    for _, source, _ in rows:
        if source:
            state[source] = torch.randn(shape)
    return state


class Delta:
    """One call of the rule with random inputs that lie beside other columns."""

    def __init__(self, rows, key_heads=1, shared=2, key_dim=16, value_dim=16, channel=False):
        self.rows = rows_of(rows)
        tokens, heads = sum(length for length, _, _ in rows), key_heads * shared
        decayed = (heads, key_dim) if channel else (heads,)
        self.q, self.k = (torch.randn(tokens, key_heads, key_dim) for _ in range(2))
        beside = torch.randn(tokens, heads * value_dim + 3)
        self.v = beside[:, : heads * value_dim].view(tokens, heads, value_dim)
        self.decay, self.beta = torch.randn(tokens, *decayed) * 2.0, torch.randn(tokens, heads) * 2.0
        self.rate, self.bias = torch.rand(heads) * 2.0 + 0.05, torch.randn(decayed) - 2.0
        self.state = arena(rows, heads, 1, key_dim * value_dim)

    def run(self, fn, eps=EPS):
        """The output and the state behind."""
        out, state = torch.full(self.v.shape, torch.nan), self.state.clone()
        inputs = (self.q, self.k, self.v, self.decay, self.beta, self.rate, self.bias, eps)
        fn(*inputs, state, *self.rows, out)
        return out, state

    def agrees(self, fn, bound=4e-6, eps=EPS):
        for found, expected in zip(self.run(fn, eps), self.run(reference_gated_delta, eps), strict=True):
            torch.testing.assert_close(found, expected, rtol=bound, atol=bound, equal_nan=True)


def test_a_convolution_keeps_its_last_inputs():
    rows = ROWS["rows of all kinds"]
    tokens = sum(length for length, _, _ in rows)
    x, weight, bias = torch.randn(tokens, 9)[:, :7], torch.randn(4, 7), torch.randn(7)
    state = arena(rows, 3, 1, 7)
    found, expected = (torch.full((tokens + 1, 7), torch.nan) for _ in range(2))
    states = []
    for fn, out in ((recurrent.causal_conv, found), (reference_causal_conv, expected)):
        states.append(state.clone())
        fn(x, weight, bias, states[-1], *rows_of(rows), out[:tokens])
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6, equal_nan=True)
    torch.testing.assert_close(*states, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.long
@pytest.mark.parametrize("width", [2, 4, 9, 30])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_a_convolution_reads_across_the_edges_of_its_tiles(width, length):
    """Widths beyond a tile's tokens; a row whose state stays in its block beside one that only ends."""
    rows = [(length, 2, 2), (3, 0, 4), (1, 5, 0)]
    x, weight = torch.randn(length + 4, 150), torch.randn(width, 150)
    state = arena(rows, width - 1, 1, 150)
    found, expected = torch.empty(2, length + 4, 150)
    states = []
    for fn, out in ((recurrent.causal_conv, found), (reference_causal_conv, expected)):
        states.append(state.clone())
        fn(x, weight, None, states[-1], *rows_of(rows), out)
    close(found, expected)
    torch.testing.assert_close(*states, rtol=0.0, atol=0.0, equal_nan=True)


def test_tokens_that_are_no_rows_are_left_alone():
    """Rows that begin behind the first token."""
    x, out = torch.randn(40, 5), torch.full((40, 5), 7.0)
    ints = [torch.tensor(values, dtype=torch.int32) for values in ([35, 36, 36, 39], [0, 0, 0], [0, 0, 0])]
    recurrent.causal_conv(x, torch.randn(3, 5), None, torch.empty(2, 2, 1, 5), *ints, out)
    assert bool((out[:35] == 7.0).all()) and bool((out[39:] == 7.0).all()) and not bool((out[35:39] == 7.0).any())


@pytest.mark.parametrize("channel", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_rule_token_by_token(channel):
    Delta(ROWS["rows of all kinds"], 2, 1, 7, 20, channel).agrees(recurrent.gated_delta)


@pytest.mark.parametrize("channel", [pytest.param(False, marks=pytest.mark.long), True])
def test_the_rule_over_two_chunks(channel):
    """Beside a row that goes token by token, and one without tokens."""
    rows = [(65, 1, 1), (2, 0, 3), (0, 4, 5)]
    Delta(rows, channel=channel).agrees(gated_delta_chunks.gated_delta)


@pytest.mark.long
@pytest.mark.parametrize("channel", [False, True])
@pytest.mark.parametrize("architecture", CUTS.values())
def test_the_chunks_of_every_architecture(architecture, channel):
    """Lengths about the edges of blocks and chunks, with sizes that fill no block."""
    with compiling_for(architecture):
        chunk = delta_tile(architecture).chunk
        for length in (9, 16, 17, chunk, chunk + 1, 2 * chunk + 20):
            rows = [(length, 2, 2), (9, 0, 0), (1, 4, 4)]
            Delta(rows, 1, 2, 7, 37, channel).agrees(gated_delta_chunks.gated_delta)


@pytest.mark.long
@pytest.mark.parametrize("channel", [False, True])
def test_chunks_of_heads_as_models_have_them(channel):
    """Without an epsilon, which a token that is not there must not miss."""
    Delta([(70, 1, 2)], 1, 1, 128, 128, channel).agrees(gated_delta_chunks.gated_delta, eps=0.0)


@pytest.mark.long
@pytest.mark.parametrize("channel", [False, True])
def test_strong_decays_leave_no_infinity_and_weak_ones_behind_them_stay_exact(channel):
    """Logarithms down to -800 a token: a factor formed from differences of their sums would overflow, and one from the
    sums' differences would lose the weak decays that follow."""
    case = Delta([(80, 1, 1)], channel=channel)
    case.decay[:20] = 400.0
    case.decay[20:] = -9.0
    case.rate.fill_(2.0)
    case.agrees(gated_delta_chunks.gated_delta)


@pytest.mark.long
def test_few_long_rows_among_many_share_the_room_for_states_between_chunks():
    """Twelve rows, of which two have several chunks: room is for as many as the tokens allow."""
    rows = [(1, 1, 0), (1, 2, 0), (70, 3, 3), (1, 1, 0), (66, 4, 4), *[(1, 1, 0)] * 7]
    Delta(rows).agrees(gated_delta_chunks.gated_delta)


@pytest.mark.long
def test_keys_that_are_all_alike_do_not_blow_up_the_inverse():
    """The worst system: every token overwrites what the one before wrote, and nothing decays."""
    case = Delta([(100, 0, 1)], 1, 1)
    case.k.copy_(case.k[:1].expand_as(case.k))
    case.decay.fill_(-60.0)
    case.beta.fill_(60.0)
    case.agrees(gated_delta_chunks.gated_delta, bound=2e-5)


def test_the_norm_under_a_gate():
    x, beside, weight = torch.randn(3, 5, 20), torch.randn(3, 107) * 3.0, torch.randn(20)
    gate = beside[:, 7:].view(3, 5, 20)
    for silu in (True, False):
        expected, found = torch.empty_like(x), x.clone()
        reference_gated_rms(x, gate, weight, EPS, silu, expected)
        elementwise.gated_rms(found, gate, weight, EPS, silu, found)
        close(found, expected)


def test_calls_without_tokens_or_rows_launch_nothing():
    nothing, ints = torch.empty(0, 4), [torch.tensor(values, dtype=torch.int32) for values in ([0], [], [])]
    recurrent.causal_conv(nothing, torch.ones(2, 4), None, torch.empty(1, 1, 1, 4), *ints, nothing)
    heads = torch.empty(0, 1, 4)
    call = (heads, heads, heads, nothing[:, :1], nothing[:, :1], torch.ones(1), torch.ones(1), EPS)
    for fn in (recurrent.gated_delta, gated_delta_chunks.gated_delta):
        fn(*call, torch.empty(1, 1, 1, 16), *ints, heads)
