"""Puts this folder's helpers on the path: the importlib mode of pytest does not."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
