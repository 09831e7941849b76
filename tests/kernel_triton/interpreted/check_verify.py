"""The walk down drafted trees by Triton's interpreter against the references, and against sampling one by one."""

import pytest
import torch

from tokenspeed_kernel.ops.sampling import reference_sample
from tokenspeed_kernel.ops.verify import reference_verify, reference_verify_proposals
from tokenspeed_kernel_triton import verify


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(20261130)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def outputs(rows, width):
    return [torch.full(shape, -9, dtype=torch.int32) for shape in ((rows, width), (rows, width), (rows,))]


def agree(fn, reference, *call, rows, width):
    """Both give the same; what they gave."""
    found, expected = outputs(rows, width), outputs(rows, width)
    fn(*call, *found)
    reference(*call, *expected)
    for one, other in zip(found, expected, strict=True):
        assert one.tolist() == other.tolist()
    return found


def rules(nodes, top_k=0, top_p=1.0, min_p=0.0):
    """The seven that sampling.sample takes, for nodes of one row."""
    return (
        torch.full((nodes,), 0.8), torch.full((nodes,), top_k, dtype=torch.int32), torch.full((nodes,), top_p),
        torch.full((nodes,), min_p), torch.arange(nodes) * 1000003 - 5, torch.zeros(nodes, dtype=torch.int32),
        torch.arange(nodes, dtype=torch.int32),
    )  # fmt: skip


def test_a_walk_takes_the_first_fitting_child_and_ends_with_the_path():
    """A tree whose second child fits, a row without nodes, a chain that is longer than a path, a plain decode."""
    drawn = ints(7, 0, 4, 2, 9, 1, 1, 1, 1, 6)
    drafted = ints(0, 3, 7, 7, 4, 0, 1, 1, 1, 0)
    parents = ints(-1, 0, 0, 0, 2, -1, 0, 1, 2, -1)
    found = agree(
        verify.verify, reference_verify, drawn, drafted, parents, ints(0, 5, 5, 9, 10), rows=4, width=3
    )  # fmt: skip
    assert found[0].tolist() == [[0, 2, 4], [-1, -1, -1], [0, 1, 2], [0, -1, -1]]
    assert found[1].tolist() == [[7, 4, 9], [-1, -1, -1], [1, 1, 1], [6, -1, -1]]
    assert found[2].tolist() == [3, 0, 3, 1]


@pytest.mark.parametrize("top_k", [1, pytest.param(4, marks=pytest.mark.long)])
def test_rejection_along_a_chain(top_k):
    logits = torch.randn(4, 12) * 2.0
    drafted = torch.cat([ints(0), logits.argmax(dim=1)[:3].to(torch.int32)])
    call = (logits, *rules(4, top_k), torch.softmax(logits, dim=1), drafted, ints(-1, 0, 1, 2), ints(0, 4))
    agree(verify.verify_proposals, reference_verify_proposals, *call, rows=1, width=6)


@pytest.mark.long
def test_every_sibling_that_is_rejected_leaves_less_of_what_was_proposed():
    """Rows whose three siblings are unlikely under the model and likely under the proposals."""
    rows, tokens = 6, 8
    logits = torch.randn(4 * rows, tokens)
    likely = torch.softmax(-1.5 * logits, dim=1)
    drafted = likely.topk(4).indices[::4].flatten().to(torch.int32)
    call = (logits, *rules(4 * rows), likely, drafted, ints(-1, 0, 0, 0).repeat(rows), 4 * ints(*range(rows + 1)))
    found = agree(verify.verify_proposals, reference_verify_proposals, *call, rows=rows, width=1)
    assert any(token not in drafted[4 * row + 1 : 4 * row + 4] for row, token in enumerate(found[1].flatten()))


@pytest.mark.long
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (6, 0.8, 0.0), (0, 0.9, 0.1)])
def test_a_row_of_one_node_is_a_plain_decode(top_k, top_p, min_p):
    logits, given = (torch.randn(8, 30) * 2.0).round(), torch.empty(8, dtype=torch.int32)
    own = rules(8, top_k, top_p, min_p)
    reference_sample(logits.clone(), *own, given)
    alone, none, starts = torch.full((8,), -1, dtype=torch.int32), torch.full((8, 30), torch.nan), torch.arange(9)
    found = agree(
        verify.verify_proposals, reference_verify_proposals, logits, *own, none, alone, alone,
        starts.to(torch.int32), rows=8, width=2,
    )  # fmt: skip
    assert found[1][:, 0].tolist() == given.tolist() and found[2].tolist() == [1] * 8


@pytest.mark.long
def test_more_nodes_than_are_looked_at_together():
    nodes = 3 * verify.NODES
    drafted, parents = ints(*range(nodes)), ints(-1, *[0] * (nodes - 1))
    drawn = torch.full((nodes,), nodes - 1, dtype=torch.int32)
    found = agree(verify.verify, reference_verify, drawn, drafted, parents, ints(0, nodes), rows=1, width=4)
    assert found[0].tolist() == [[0, nodes - 1, -1, -1]]


def test_calls_without_rows_launch_nothing():
    none = ints()
    verify.verify(none, none, none, ints(0), *outputs(0, 2))
    verify.verify_proposals(torch.empty(0, 5), *rules(0), torch.empty(0, 5), none, none, ints(0), *outputs(0, 2))
