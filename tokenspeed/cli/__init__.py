"""The command line. ``main`` is the entry point, ``commands`` has the commands; each imports its work when it runs."""
