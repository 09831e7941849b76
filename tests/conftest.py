"""What holds for every test: kernels are chosen by their bands and records, not by what this machine measured."""

import os

os.environ.setdefault("TOKENSPEED_KERNEL_AUTOTUNE", "0")
"""Neither measures kernels nor reads or writes the user's cache of latencies; children inherit it."""
