"""``bench kernels``: the kernel core's own benchmark, under the name where one looks for it."""

from collections.abc import Sequence
from importlib.util import find_spec

from tokenspeed.cli.records import ServerError


def bench_kernels(arguments: Sequence[str]) -> int:
    """Hands the arguments to ``tokenspeed-kernel bench`` and returns its exit code. Without torch: ServerError."""
    if find_spec("torch") is None or find_spec("tokenspeed_kernel") is None:
        raise ServerError("bench kernels runs kernels here, which needs torch and the kernel packages: make setup")
    from tokenspeed_kernel.plugins.cli import main

    return main(["bench", *arguments])
