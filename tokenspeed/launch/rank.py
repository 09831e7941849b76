"""The program of an engine rank: ``python -m tokenspeed.launch.rank``, of several ``... RANK WORLD MEETING``."""

import gc
import sys


def main() -> int:
    """Runs one rank to its end and returns the process's exit status."""
    # Libraries and weights make two hundred thousand objects that live on; looking for garbage among them again and
    # again is a tenth of a start. rank_process turns the collector on once the engine is ready.
    gc.disable()
    from tokenspeed.launch.rank_process import main as run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
