#!/usr/bin/env python3
"""Measures how long ``tokenspeed top`` takes from its start to the first screen, on a terminal of its own.

    python scripts/first_paint.py --times 10 --width 120 --height 40

Nothing answers at the address that it is given: the first screen does not wait for a server. Prints for each start the
seconds until the screen stood and the processor time that the process had taken by its end, then the medians.
"""

import argparse
import os
import pty
import re
import select
import signal
import statistics
import struct
import sys
import termios
import time
from fcntl import ioctl
from socket import socket

_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]")
_SCREEN = 600
"""Characters besides control sequences: less is no screen, the smallest of 120 columns has some thousand."""
_LIMIT_S = 30.0


def unused_address() -> str:
    """A URL of this machine at which nobody listens."""
    with socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{found.getsockname()[1]}"


def first_paint(url: str, width: int, height: int) -> tuple[float, float]:
    """Returns the seconds to the first screen and the processor's seconds. Raises TimeoutError where none comes."""
    began = time.perf_counter()
    process, terminal = pty.fork()
    if process == 0:
        os.environ["TERM"] = "xterm-256color"
        os.execv(sys.executable, [sys.executable, "-m", "tokenspeed.cli", "top", "--url", url])
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    written = b""
    try:
        while len(_CONTROL.sub(b"", written)) < _SCREEN:
            if not select.select([terminal], [], [], _LIMIT_S)[0]:
                raise TimeoutError(f"no screen within {_LIMIT_S:g} s, only {written!r}")
            written += os.read(terminal, 65536)
        painted = time.perf_counter() - began
    finally:
        os.kill(process, signal.SIGTERM)
        os.close(terminal)
        _, _, used = os.wait4(process, 0)
    return painted, used.ru_utime + used.ru_stime


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--width", type=int, default=120)
    parser.add_argument("--height", type=int, default=40)
    arguments = parser.parse_args()
    url = unused_address()
    found = [first_paint(url, arguments.width, arguments.height) for _ in range(arguments.times)]
    for painted, used in found:
        print(f"  first screen after {painted:.3f} s, {used:.3f} s of a core")
    painted, used = (statistics.median(column) for column in zip(*found, strict=True))
    print(f"median of {len(found)}: first screen after {painted:.3f} s, {used:.3f} s of a core")


if __name__ == "__main__":
    main()
