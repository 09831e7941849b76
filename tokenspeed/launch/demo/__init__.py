"""The dashboard's demo: the real scheduler and the real event loop over a scripted load and a device that is none."""

from tokenspeed.launch.demo.engine import Demo, demo_world

__all__ = ["Demo", "demo_world"]
