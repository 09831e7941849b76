"""``tokenspeed bench``: how fast a server is, how fast kernels are, and what a layout trades for what.

Each workload says which requests there are, the load says when they are sent, the endpoint sends them and notes when
what came, the statistics condense that, and the report, the table and the figures show it.
"""
