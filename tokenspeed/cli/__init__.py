"""The command line. ``main`` has the commands; each imports the file that does the work when it runs."""
