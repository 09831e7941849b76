"""Captured launches: grids, split counts and workspaces of the capture hold for every length that is replayed.

Launches are noted as a graph notes them, what is around them operation by operation, and a wrapper that read a length
on the host would be refused. Workspaces are NaN before each replay.
"""

import pytest
import torch

from tokenspeed.device.graphs.dispatch import DispatchGraphs
from tokenspeed.device.graphs.provider import NO_LENGTHS
from tokenspeed_kernel.ops.attention import reference_decode
from tokenspeed_kernel.ops.mla import reference_mla_decode
from tokenspeed_kernel_triton import attention, paged_attention
from tokenspeed_kernel_triton.loading import Launch

PAGE, PAGES, ROWS = 8, 6, 3
LENGTHS = [(1, 0, 0), (PAGE, PAGE + 1, 17), (PAGE * PAGES, 2, 0)]
"""Of few positions, at page edges and of whole tables; padding has none."""


@pytest.fixture
def graphs(monkeypatch):
    found = DispatchGraphs()
    run = found.launched(Launch.run)
    monkeypatch.setattr(Launch, "run", lambda launch: run(launch))
    return found


def paged(width, heads=1):
    torch.manual_seed(20261130)
    cache = torch.randn(ROWS * PAGES + 1, heads, PAGE, width)
    table = torch.randperm(ROWS * PAGES).add(1).view(ROWS, PAGES).to(torch.int32)
    return cache, table


def replayed(graphs, body, lengths, out, expected):
    """Captures ``body`` at the first lengths and compares each replay with the reference."""
    lengths.copy_(torch.tensor(LENGTHS[0]))
    _, graph = graphs.capture(body)
    for values in LENGTHS:
        lengths.copy_(torch.tensor(values))
        out.fill_(torch.nan)
        graph.replay(NO_LENGTHS, 0)
        torch.testing.assert_close(out, expected(), rtol=2e-6, atol=2e-6)
    return graph


@pytest.mark.parametrize("processors", [64, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("window", [5, pytest.param(0, marks=pytest.mark.long)])
def test_grouped_queries(graphs, monkeypatch, processors, window):
    monkeypatch.setattr(paged_attention, "processors_of", lambda device: processors)
    keys, table = paged(16)
    values, lengths = torch.randn_like(keys), torch.zeros(ROWS, dtype=torch.int32)
    q, out = torch.randn(ROWS, 2, 16), torch.zeros(ROWS, 2, 16)
    read = (keys, values, table, lengths, 0.3, window)

    def expected():
        wanted = torch.zeros_like(out)
        reference_decode(q, *read, wanted)
        return wanted

    graph = replayed(graphs, lambda: attention.decode(q, *read, out), lengths, out, expected)
    launches = sum(type(node).__name__ == "KernelNode" for node in graph.tape.nodes)
    assert launches == (1 if processors == 1 else 2), "several splits are merged by a second launch"


@pytest.mark.long
def test_latents(graphs, monkeypatch):
    monkeypatch.setattr(paged_attention, "processors_of", lambda device: 64)
    cache, table = paged(38)
    lengths, out = torch.zeros(ROWS, dtype=torch.int32), torch.zeros(ROWS, 3, 32)
    q_latent, q_rope = torch.randn(ROWS, 3, 32), torch.randn(ROWS, 3, 6)
    read = (q_latent, q_rope, cache, table, lengths, 0.3)

    def expected():
        wanted = torch.zeros_like(out)
        reference_mla_decode(*read, wanted, None)
        return wanted

    replayed(graphs, lambda: attention.mla_decode(*read, out, None), lengths, out, expected)
