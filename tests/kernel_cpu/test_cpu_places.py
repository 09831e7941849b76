"""The pool's threads run where they are told to."""

import logging
import os
import subprocess
import sys

import pytest

from tokenspeed_kernel_cpu.threads import PLACES_VARIABLE, read_places, take_places

CHILD = """
import os, threading
import torch
from tokenspeed_kernel.ops import bind_linear
from tokenspeed_kernel.plugins import load_plugins
from tokenspeed_kernel.quantized import QuantizedTensor

torch.set_num_threads(3)
load_plugins()
own = os.sched_getaffinity(0)
before = set(os.listdir("/proc/self/task"))
linear = bind_linear(QuantizedTensor.from_dense(torch.randn(512, 512), "test"), None)
linear(torch.randn(8, 512), torch.empty(8, 512))
started = sorted(set(os.listdir("/proc/self/task")) - before, key=int)
print([sorted(os.sched_getaffinity(int(task))) for task in started], os.sched_getaffinity(0) == own)
"""


@pytest.mark.parametrize(("text", "places"), [("", []), (" ", []), ("3", [3]), ("0, 2,4", [0, 2, 4])])
def test_places_are_cpu_numbers(text: str, places: list[int]) -> None:
    assert read_places(text) == places


@pytest.mark.parametrize("text", ["0-3", "a", "1,,2", "-1"])
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=rf"{PLACES_VARIABLE} is '{text}'; use CPU numbers"):
        read_places(text)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux's affinities")
def test_each_thread_of_the_pool_has_its_own_and_the_caller_keeps_its_freedom() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    first, last = cpus[0], cpus[-1]
    environment = os.environ | {PLACES_VARIABLE: f"{first},{last},{first}", "OMP_NUM_THREADS": "3"}
    output = subprocess.run([sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, check=True)
    assert output.stdout.strip() == f"[[{last}], [{first}]] True"


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux's affinities")
def test_cpus_of_others_are_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(PLACES_VARIABLE, "0,4095")
    with caplog.at_level(logging.WARNING):
        take_places()
    monkeypatch.setenv(PLACES_VARIABLE, "")
    take_places()
    assert "names the CPUs 4095, which this process may not use" in caplog.text
