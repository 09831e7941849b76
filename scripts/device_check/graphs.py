"""Whether a replayed step makes what the same step makes when its kernels are called one by one."""

from collections.abc import Callable

import torch

from scripts.device_check.bandwidth import grouped_decode
from scripts.device_check.engines import greedy_tokens, random_llama
from scripts.device_check.results import Figure, NotHere, PartResult
from scripts.device_check.target import Target
from tokenspeed_kernel import ops
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.recording import recorder_of
from tokenspeed_kernel.registry import KernelSpec

HIDDEN = 4096
ROWS, TOKENS = {"full": 8, "tiny": 2}, {"full": 2048, "tiny": 128}


class Step:
    """A piece of a decoder: norm, projection, attention over a paged cache, projection, residual sum; in memory that
    stays where it is.

    Attributes:
        x: float32 [rows, HIDDEN], what goes in, and what comes out.
        specs: the kernels.
    """

    def __init__(self, target: Target, rows: int, tokens: int) -> None:
        self._attention = grouped_decode(target, rows, tokens)
        generator = torch.Generator().manual_seed(1)

        def weight() -> QuantizedTensor:
            data = torch.randn(HIDDEN, HIDDEN, generator=generator).mul_(HIDDEN**-0.5).bfloat16()
            return QuantizedTensor.from_dense(data.to(target.device), "a step's weight")

        self._norm, self._into = ops.bind_rms_norm(), ops.bind_linear(weight(), None, activations="bfloat16")
        self._back, self._add = ops.bind_linear(weight(), None, activations="bfloat16"), ops.bind_add()
        bound = (self._norm, self._into, self._attention.bound, self._back, self._add)
        self.specs: list[KernelSpec] = [kernel.spec for kernel in bound]
        self._scale = torch.ones(HIDDEN, device=target.device)
        self.x, self._normed, self._inner = (torch.zeros(rows, HIDDEN, device=target.device) for _ in range(3))

    def feed(self, seed: int) -> None:
        """Puts other numbers where x lies."""
        self.x.copy_(torch.randn(self.x.shape, generator=torch.Generator().manual_seed(seed)))

    def __call__(self) -> None:
        self._norm.fn(self.x, self._scale, 1e-5, self._normed)
        q = self._attention.arguments[0]
        self._into.fn(self._normed, q.view(self.x.shape))
        self._attention()
        self._back.fn(self._attention.out.view(self.x.shape), self._inner)
        self._add.fn(self._inner, self.x)


def record(target: Target, step: Step) -> Callable[[], object]:
    """What makes the step's calls again with one: a graph, on the CPU its kernels' recorder. Raises NotHere."""
    if target.kind == "cpu":
        recorder = recorder_of(step.specs)
        if isinstance(recorder, str):
            raise NotHere(f"this step cannot be recorded on the CPU: {recorder}")
        _, replay = recorder(step)
        return replay
    if target.kind != "cuda":
        raise NotHere("graphs of the npu are those of its own package, whose checks run them")
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # whatever is compiled or allocated once is not recorded
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def compare_step(target: Target, result: PartResult) -> None:
    """A replay over other numbers has the bits of the plain calls, and how long both take."""
    step = Step(target, ROWS[target.sizes], TOKENS[target.sizes])
    step.feed(0)
    step()
    replay = record(target, step)
    for seed in (1, 2, 3):
        step.feed(seed)
        step()
        plain = step.x.clone()
        step.feed(seed)
        replay()
        target.timer.wait()
        if not torch.equal(step.x, plain):
            off = float((step.x - plain).abs().max())
            result.problems.append(f"a replayed step differs from the plain one by up to {off:.3g} (seed {seed})")
            return
    result.checks.append(f"a replayed step of {len(step.specs)} kernels has the bits of the plain one")
    plain_s, replay_s = (target.seconds_of(call, runs=10) for call in (step, replay))
    result.figures.append(Figure("step, its kernels called one by one", plain_s * 1e6, "us"))
    result.figures.append(Figure("step, replayed", replay_s * 1e6, "us"))


def compare_engine(target: Target, result: PartResult) -> None:
    """An engine that records its decode steps draws the tokens of one that does not."""
    config = random_llama(target, "tiny")
    plain = config.model_copy(update={"scheduler": config.scheduler.model_copy(update={"max_recorded_seqs": 0})})
    found = [greedy_tokens(one, prompts=3, tokens=16) for one in (config, plain)]
    if found[0] == found[1]:
        result.checks.append("an engine that records its decode steps draws the tokens of one that does not")
    else:
        result.problems.append(f"recorded decode steps draw other tokens: {found[0]} instead of {found[1]}")


def run(target: Target) -> PartResult:
    """The step alone, then a whole engine with and without recording."""
    result = PartResult("graphs")
    compare_step(target, result)
    compare_engine(target, result)
    return result.settle()
