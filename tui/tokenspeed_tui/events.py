"""The event log: what servers tell of, and what only an onlooker sees, in the order in which it came."""

from tokenspeed_tui.view import EventView

MOST_EVENTS = 200
KNOWN = 64
"""A snapshot repeats at most so many events."""

Events = tuple[EventView, ...]

AWAY, BACK = "away", "back"
"""Kinds of the dashboard's own events: the server stopped answering, and answers again."""


def with_told(events: Events, told: Events) -> Events:
    """The log after a snapshot told its newest events; what is known already is not repeated.

    A server that was started again numbers from the beginning: an event is known by its number and its time.
    """
    known = {(event.sequence, event.time) for event in events[-2 * KNOWN :]}
    fresh = tuple(event for event in told if (event.sequence, event.time) not in known)
    return (*events, *fresh)[-MOST_EVENTS:] if fresh else events


def with_own(events: Events, kind: str, time: float, text: str) -> Events:
    """The log with an event that the dashboard saw itself."""
    return (*events, EventView(time=time, kind=kind, request_id="", text=text))[-MOST_EVENTS:]
