"""The state machine's arrows, as the scheduler's transition table has them.

The dashboard runs on machines that have no scheduler, so the table stands here too; a test holds both equal.
"""

Arrow = tuple[str, str]

SUCCESSORS: dict[str, tuple[str, ...]] = {
    "Bootstrapping": ("Submitted", "Finished"),
    "Submitted": ("Prefetching", "Prefilling", "PrefillAwaitingResult", "PrefillDone", "RemotePrefilling", "Finished"),
    "Prefetching": ("Submitted", "Finished"),
    "Prefilling": ("PrefillAwaitingResult", "PrefillDone", "Submitted", "Retracted", "Finishing", "Finished"),
    "RemotePrefilling": ("PrefillDone", "Finishing"),
    "PrefillAwaitingResult": ("Decoding", "PrefillDone", "Finishing", "Finished"),
    "PrefillDone": ("Decoding", "Submitted", "Retracted", "Finishing", "Finished"),
    "Decoding": ("Submitted", "Retracted", "Finishing", "Finished"),
    "Retracted": ("Submitted", "Restoring", "Finished"),
    "Restoring": ("Prefilling", "PrefillDone", "Decoding", "Finishing"),
    "Finishing": ("Finished",),
    "Finished": (),
}
"""State to the other states that an event can lead to, in the order of the table."""

PEER_STATES = ("Bootstrapping", "RemotePrefilling", "PrefillAwaitingResult")
"""States of a deployment whose prefill and decode are apart; a fused engine has none of them."""


def arrows(states: frozenset[str]) -> list[Arrow]:
    """The arrows between the given states."""
    return [
        (source, target) for source, targets in SUCCESSORS.items() for target in targets if {source, target} <= states
    ]
