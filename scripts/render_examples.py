"""Writes the files of images/compose and images/kubernetes from the recipes; with --check, says which are out of date.

python scripts/render_examples.py           # after a change of a recipe or of what is rendered
python scripts/render_examples.py --check   # exit code 1: a file differs
"""

import contextlib
import io
import os
import sys
import tempfile
from pathlib import Path

from tokenspeed.cli.commands import app

IMAGES = Path(__file__).resolve().parent.parent / "images"

_KIMI = "recipe render kimi-k2.5"
_TWO_NODES = f"{_KIMI} --as kubernetes --hardware a2 --profile a2-w4a8-two-nodes"
_SMALL = "recipe render smollm2-135m --hardware cpu --monitoring"

EXAMPLES: dict[str, str] = {
    "compose/cpu.yaml": f"{_SMALL} --as compose",
    "compose/nvidia.yaml": f"{_KIMI} --as compose --hardware b200 --monitoring",
    "compose/amd.yaml": f"{_KIMI} --as compose --hardware mi355x --monitoring",
    "compose/npu.yaml": f"{_KIMI} --as compose --hardware a3 --monitoring",
    "kubernetes/cpu.yaml": f"{_SMALL} --as kubernetes --api-key-file api-key",
    "kubernetes/nvidia.yaml": f"{_KIMI} --as kubernetes --hardware b200",
    "kubernetes/amd.yaml": f"{_KIMI} --as kubernetes --hardware mi355x",
    "kubernetes/npu.yaml": f"{_KIMI} --as kubernetes --hardware a3",
    "kubernetes/npu-two-nodes.yaml": _TWO_NODES,
    "kubernetes/npu-two-nodes-stateful-set.yaml": f"{_TWO_NODES} --workload stateful-set",
}
"""File to the command that makes it; --hardware, so that the machine at hand makes no difference."""


def rendered(command: str) -> str:
    """What the command prints."""
    arguments = command.split()
    text = io.StringIO()
    before = sys.argv
    sys.argv = ["tokenspeed", *arguments]
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(io.StringIO()):
            code = app(arguments, standalone_mode=False)
    finally:
        sys.argv = before
    if code:
        raise RuntimeError(f"tokenspeed {command}: exit code {code}")
    return text.getvalue()


def main() -> int:
    """Writes, or compares; returns the exit code."""
    stale = []
    with tempfile.TemporaryDirectory() as nothing_here:
        # Neither weights nor recipes of this machine may show in what is committed.
        os.environ |= {"TOKENSPEED_CACHE": nothing_here, "HF_HOME": nothing_here}
        os.environ.pop("TOKENSPEED_RECIPES", None)
        for name, command in EXAMPLES.items():
            path, text = IMAGES / name, rendered(command)
            if "--check" not in sys.argv:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            elif not path.is_file() or path.read_text() != text:
                stale.append(name)
    for name in stale:
        print(f"images/{name} is out of date: python scripts/render_examples.py writes it", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
