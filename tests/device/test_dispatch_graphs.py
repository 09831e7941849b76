"""The recorder of torch's dispatcher: it replays over the captured memory with the host's values frozen, and refuses
what a device's graph would."""

from collections.abc import Callable

import pytest
import torch

from tokenspeed.device.graphs.dispatch import DispatchGraphs
from tokenspeed.device.graphs.provider import NO_LENGTHS, GraphCaptureError
from tokenspeed_kernel.ops import bind_attention_decode, bind_fused_add_rms_norm, bind_rms_norm

Body = Callable[[], object]


@pytest.fixture(autouse=True)
def _inference() -> object:
    with torch.inference_mode():
        yield


def captured(body: Body, *, graphs: DispatchGraphs | None = None) -> Callable[[], None]:
    _, graph = (graphs or DispatchGraphs()).capture(body)
    return lambda: graph.replay(NO_LENGTHS, 0)


def test_a_replay_reads_and_writes_the_captured_memory() -> None:
    """New memory, views of it, work in place, results into memory that was there, and conversions."""
    x, ids, out = torch.randn(4, 6), torch.tensor([2, 0, 1, 3], dtype=torch.int32), torch.zeros(4, 3)

    def body() -> None:
        left, right = x[ids.long()].chunk(2, dim=1)
        total = left * 2
        total += right
        torch.add(total, 1.0, out=out)
        out[:, 0].mul_(3.0)

    replay = captured(body)
    x.normal_()
    ids.copy_(torch.tensor([3, 1, 0, 2]))
    expected = (x[ids.long(), :3] * 2 + x[ids.long(), 3:]) + 1.0
    expected[:, 0] *= 3.0
    out.fill_(torch.nan)
    replay()
    assert torch.equal(out, expected)


def test_what_is_made_anew_each_step_goes_stale() -> None:
    out, made = torch.zeros(3), [torch.ones(3)]

    def body() -> None:
        out.copy_(made[0] * 2)

    replay = captured(body)
    made[0] = torch.full((3,), 5.0)
    replay()
    assert out.tolist() == [2.0] * 3, "the graph reads the tensor it was captured with"


def test_a_number_of_the_hosts_goes_stale() -> None:
    out, length = torch.zeros(4), [2]

    def body() -> None:
        out.zero_()
        out[: length[0]] = 1.0

    replay = captured(body)
    length[0] = 4
    replay()
    assert out.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_memory_that_nobody_filled_is_nan() -> None:
    out = torch.zeros(2)

    def body() -> None:
        room = torch.empty(2)
        room[0] = 1.0
        out.copy_(room)

    replay = captured(body)
    replay()
    assert out[0] == 1.0
    assert out[1].isnan()
    kept = captured(body, graphs=DispatchGraphs(poisoned=False))
    kept()
    assert out[0] == 1.0


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "bool": lambda x: bool(x[0] > 0),
    "int": lambda x: int(x[0]),
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "nonzero": lambda x: torch.nonzero(x),
    "mask": lambda x: x[x > 0],
    "any": lambda x: 1 if (x > 0).any() else 0,
    "repeat": lambda x: torch.repeat_interleave(x, x.long()),
    "equal": lambda x: torch.equal(x, x),
}


@pytest.mark.parametrize("name", READS)
def test_reading_on_the_host_is_refused(name: str) -> None:
    x, graphs = torch.ones(3), DispatchGraphs()
    with pytest.raises(GraphCaptureError, match=r"reads on the host what a kernel computes.*Prepare it"):
        graphs.capture(lambda: READS[name](x))
    READS[name](x)  # nothing is in the way afterwards
    out = torch.zeros(3)
    replay = captured(lambda: out.copy_(x[torch.tensor([0, 1, 1])]), graphs=graphs)
    replay()


def test_drawing_inside_is_refused() -> None:
    with pytest.raises(GraphCaptureError, match="draws from a generator"):
        DispatchGraphs().capture(lambda: torch.zeros(3).normal_())


def test_an_error_of_the_body_comes_through_and_ends_the_capture() -> None:
    graphs = DispatchGraphs()

    def body() -> None:
        raise KeyError("weights")

    with pytest.raises(KeyError, match="weights"):
        graphs.capture(body)
    assert not graphs.notes_operations
    assert graphs.tape.nodes == []


def test_a_kernel_that_walks_rows_is_one_launch_and_others_are_noted_inside() -> None:
    graphs = DispatchGraphs()
    norm, native = bind_rms_norm(override="reference"), bind_fused_add_rms_norm(override="cpu_native")
    decode = bind_attention_decode(
        head_dim=8, q_per_kv=1, kernel_page_size=4, windowed=False, sinks=False, soft_cap=False,
        kv_dtype=torch.float32, override="reference",
    )  # fmt: skip
    read, add, plain = (graphs.around(bound.spec, bound.fn) for bound in (decode, native, norm))
    assert plain is norm.fn
    keys, values = torch.randn(3, 1, 4, 8), torch.randn(3, 1, 4, 8)
    q, out, flat = torch.randn(2, 1, 8), torch.zeros(2, 1, 8), torch.zeros(2, 8)
    pages, lengths = torch.tensor([[1, 0], [2, 1]], dtype=torch.int32), torch.tensor([3, 4], dtype=torch.int32)
    gain, residual = torch.rand(8), torch.randn(2, 8)

    def body() -> None:
        read(q, keys, values, pages, lengths, 0.5, 0, out)
        add(out.view(2, 8), residual, gain, 1e-5, flat)
        plain(flat, gain, 1e-5, flat)

    replay = captured(body, graphs=graphs)
    assert [type(node).__name__ for node in graphs.tape.nodes][:2] == ["KernelNode"] * 2
    assert {type(node).__name__ for node in graphs.tape.nodes[2:]} == {"OperationNode"}
    lengths.copy_(torch.tensor([2, 7]))  # another walk than the captured one
    pages[0, 0] = 2
    before = residual.clone()
    replay()
    replayed = flat.clone()
    residual.copy_(before)
    body()
    assert torch.equal(replayed, flat)
    assert not graphs.notes_operations


def test_lists_and_tensors_of_the_callers_may_change_afterwards() -> None:
    graphs, out = DispatchGraphs(), torch.zeros(2)
    seen: list[list[float]] = []
    bound = bind_fused_add_rms_norm(override="cpu_native")
    kernel = graphs.around(bound.spec, lambda values, tensor: seen.append([*values, float(tensor[0])]))
    values, tensor = [1.0], torch.ones(2)

    def body() -> None:
        kernel(values, tensor)
        out.add_(1.0)

    replay = captured(body, graphs=graphs)
    values.append(2.0)
    replay()
    assert seen == [[1.0, 1.0]] * 2
    assert out.tolist() == [2.0, 2.0]
