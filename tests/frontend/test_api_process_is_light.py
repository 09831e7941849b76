"""The API process imports neither torch nor transformers, and nothing of the engine's weight."""

import json
import subprocess
import sys

PROGRAM = """
import json, sys
import tokenspeed.frontend.async_llm, tokenspeed.frontend.connection
import tokenspeed.server.app
import tokenspeed.telemetry.snapshot, tokenspeed.telemetry.metrics
print(json.dumps(sorted(sys.modules)))
"""


def test_what_the_api_process_imports() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    modules = json.loads(ended.stdout)
    assert "tokenspeed.server.app" in modules
    heavy = (
        "opentelemetry.sdk",
        "opentelemetry.exporter",
        "torch",
        "transformers",
        "tokenspeed_kernel",
        "tokenspeed_kernel_cpu",
        "tokenspeed_kernel_triton",
        "tokenspeed_scheduler",
    )
    ours = ("tokenspeed.device", "tokenspeed.engine", "tokenspeed.layers", "tokenspeed.models", "tokenspeed.launch")
    found = [name for name in modules if name.startswith(tuple(f"{part}." for part in heavy + ours))]
    assert found == [] and not set(modules) & {*heavy, *ours}
