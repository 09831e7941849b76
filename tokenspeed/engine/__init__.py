"""The control plane in Python: the event loop, its commit, the engine's end of the wire, and the supervisor.

Nothing here can name a runner, a backend, a pool, a stream or a buffer: of the execution plane this room sees
``tokenspeed.device.handle`` and the plain facts of ``tokenspeed.device.specs`` only.
"""
