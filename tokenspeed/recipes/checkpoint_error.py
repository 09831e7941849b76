"""The error of a checkpoint that cannot be used."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file, what is wrong in it, and what would mend it."""
