"""Is this project right and fast on the device of this machine? One command, within a bound of time.

    python -m scripts.device_check [--platform auto|cpu|cuda|npu] [--seconds 480] [--output FILE.json]
                                   [--records FILE.json] [--part NAME ...] [--sizes full|tiny]

It builds nothing: what is installed is checked. Each part runs in a process of its own, so that a kernel that ends its
process costs its family and no more, and within a bound of time; what time does not allow is left out, and said.
``docs/performance.md`` is made of the file that this writes, by ``scripts/render_device_check.py``.

Exit status: 0 all that was tried is right, 1 something is wrong, 2 there is no such device, or nothing to do, 3 nothing
is wrong, but parts were left out for time.
"""
