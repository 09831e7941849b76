"""What holds for every test: nothing of this machine's own, no measured kernel and no luck, decides what is run."""

import os

from hypothesis import settings

settings.register_profile("same", derandomize=True)
settings.register_profile("search")
settings.load_profile("same")
"""A change is judged by the examples that judged the last one; ``--hypothesis-profile=search`` draws new ones."""

os.environ.setdefault("TOKENSPEED_KERNEL_AUTOTUNE", "0")
"""Neither measures kernels nor reads or writes the user's cache of latencies; children inherit it."""
