"""A device side that serves selects, binds, tunes and compiles nothing, and says which of its kernels to doubt."""

import logging

import pytest
from plan_maker import Request, run
from tiny_models import REFERENCE, build, random_config, resolved

from tokenspeed.messages import SamplingParameters
from tokenspeed.recipes.resolved import ModelSource
from tokenspeed_kernel.ops import bind_rms_norm
from tokenspeed_kernel.serving_guard import GUARD_VARIABLE, ServingViolation, begin_serving, process_guard

MODEL = ModelSource(kind="random", random_config=random_config())


def test_every_kind_of_step_runs_under_the_strict_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GUARD_VARIABLE, "strict")
    device = build(resolved(MODEL))
    begin_serving()
    try:
        with pytest.raises(ServingViolation, match=r"bind of norm\.rms while serving"):
            bind_rms_norm()  # the guard is awake
        begin_serving()
        samplings = (
            SamplingParameters(top_k=1),
            SamplingParameters(temperature=0.8, top_p=0.9, seed=1, frequency_penalty=0.5, logprobs=3),
        )
        for sampling in samplings:
            request = Request(prompt=list(range(2, 40)), row=1, max_new_tokens=6, chunk=16, sampling=sampling)
            assert len(run(device.handle, [request], granularity=16)[0]) == 6
        assert process_guard().violations() == {}
    finally:
        process_guard().end()
        device.handle.shutdown()


def test_the_start_tells_which_kernels_deserve_doubt(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tokenspeed_kernel"):
        device = build(resolved(MODEL, kernels=REFERENCE))
    device.handle.shutdown()
    assert set(device.specs.kernel_doubts) == set(device.specs.kernels)
    assert device.specs.kernel_doubts["norm.rms"] == "reference_norm_rms: the PyTorch reference, slow"
    assert "KERNEL TO DOUBT: norm.rms runs on reference_norm_rms" in caplog.text
    assert "kernel of norm.rms (input=float32, output=float32, weight=float32): reference_norm_rms" in caplog.text
