"""Where the state machine's boxes stand, and along which cells each of its arrows runs.

The line of most requests runs from left to right: Submitted, Prefilling, PrefillDone, Decoding, Finishing, Finished.
What all states may do shares a bus: above the line what ends, below it what gives way (to Retracted, or back to
Submitted), and below that what comes back from Restoring. A deployment with a peer has a lane more, on top.
"""

from functools import cache
from itertools import pairwise
from typing import NamedTuple

from tokenspeed_tui.machine import Arrow, arrows
from tokenspeed_tui.render.canvas import Point

MAIN_LANE = ("Submitted", "Prefilling", "PrefillDone", "Decoding", "Finishing", "Finished")
COUNT_WIDTH = 6
LEAST_GAP = 7
"""Cells between two boxes of the main lane: a rate and an arrowhead fit."""
MARGIN = 2
"""Columns left of the main lane, for what ends in Prefetching."""
LEAST_WIDTH = MARGIN + sum(len(name) + 2 for name in MAIN_LANE) + LEAST_GAP * (len(MAIN_LANE) - 1)


class Box(NamedTuple):
    """A state's frame; of height 4 it has name and count below each other, of height 3 beside each other."""

    x: int
    y: int
    width: int
    height: int

    @property
    def bottom(self) -> int:
        """Its last row."""
        return self.y + self.height - 1

    @property
    def right(self) -> int:
        """Its last column."""
        return self.x + self.width - 1

    @property
    def middle(self) -> int:
        """Its middle column."""
        return self.x + self.width // 2

    def has_on_border(self, point: Point) -> bool:
        """Whether a point is on the frame, corners left out."""
        x, y = point
        inside_columns, inside_rows = self.x < x < self.right, self.y < y < self.bottom
        return (inside_columns and y in (self.y, self.bottom)) or (inside_rows and x in (self.x, self.right))


class Plan(NamedTuple):
    """The drawing of a machine: boxes by state, and for each arrow the corners of its way, border to border."""

    boxes: dict[str, Box]
    routes: dict[Arrow, list[Point]]
    width: int
    height: int


@cache
def plan_machine(states: frozenset[str], width: int) -> Plan:
    """The plan for a role that has ``states``, in ``width`` ≥ LEAST_WIDTH cells."""
    peers = "Bootstrapping" in states
    top = 6 if peers else 2
    boxes = _main_lane(width, top) | _lower_lane(_main_lane(width, top), top)
    if peers:
        boxes |= _upper_lane(boxes)
    boxes = {name: box for name, box in boxes.items() if name in states}
    own = _own_routes(boxes, top)
    routes = {arrow: own.get(arrow) or _by_bus(arrow, boxes, top) for arrow in arrows(states)}
    return Plan(boxes, routes, width, top + 9)


def _main_lane(width: int, top: int) -> dict[str, Box]:
    names = sum(map(len, MAIN_LANE))
    gaps = len(MAIN_LANE) - 1
    padding = 4 if MARGIN + names + 4 * len(MAIN_LANE) + (LEAST_GAP + 1) * gaps <= width else 2
    gap = (width - MARGIN - names - padding * len(MAIN_LANE)) // gaps
    boxes, x = {}, MARGIN
    for name in MAIN_LANE:
        boxes[name] = Box(x, top, len(name) + padding, 4)
        x = boxes[name].right + 1 + gap
    return boxes


def _lower_lane(main: dict[str, Box], top: int) -> dict[str, Box]:
    y = top + 6
    restoring_width = _flat_width("Restoring")
    restoring = Box(main["PrefillDone"].middle - restoring_width // 2, y, restoring_width, 3)
    return {
        "Prefetching": Box(main["Submitted"].x, y, _flat_width("Prefetching"), 3),
        "Restoring": restoring,
        "Retracted": Box(main["Decoding"].right - 3, y, _flat_width("Retracted"), 3),
    }


def _upper_lane(boxes: dict[str, Box]) -> dict[str, Box]:
    remote_width = _flat_width("RemotePrefilling")
    awaiting = boxes["PrefillDone"].x + 4
    awaiting_width = max(_flat_width("PrefillAwaitingResult"), boxes["Decoding"].x + 10 - awaiting)
    return {
        "Bootstrapping": Box(boxes["Submitted"].x, 0, _flat_width("Bootstrapping"), 3),
        "RemotePrefilling": Box(boxes["PrefillDone"].right + 5 - remote_width, 0, remote_width, 3),
        "PrefillAwaitingResult": Box(awaiting, 0, awaiting_width, 3),
    }


def _flat_width(name: str) -> int:
    return len(name) + COUNT_WIDTH + 3


def _by_bus(arrow: Arrow, boxes: dict[str, Box], top: int) -> list[Point]:
    """The way of an arrow over the bus that its target belongs to."""
    source, target = boxes[arrow[0]], boxes[arrow[1]]
    if arrow[1] in ("Finishing", "Finished"):
        return _ending(arrow, source, target, top)
    if arrow[0] == "Restoring":
        return _restoring(source, target, top)
    return _giving_way(arrow, source, target, top)


def _own_routes(boxes: dict[str, Box], top: int) -> dict[Arrow, list[Point]]:
    """The arrows that share their way with no others."""
    count_row, bypass, peer_row = top + 2, top - 1, 3
    routes: dict[Arrow, list[Point]] = {}
    for name, following in pairwise(MAIN_LANE):
        routes[name, following] = [(boxes[name].right, count_row), (boxes[following].x, count_row)]
    submitted, done = boxes["Submitted"], boxes["PrefillDone"]
    up, across = submitted.right - 2, done.x + 2
    routes["Submitted", "PrefillDone"] = [(up, top), (up, bypass), (across, bypass), (across, top)]
    for arrow, x in ((("Submitted", "Prefetching"), submitted.x + 2), (("Prefetching", "Submitted"), submitted.x + 5)):
        ends = [(x, submitted.bottom), (x, top + 6)]
        routes[arrow] = ends if arrow[0] == "Submitted" else ends[::-1]
    retracted, restoring = boxes["Retracted"], boxes["Restoring"]
    lower = retracted.y + 1
    routes["Retracted", "Restoring"] = [(retracted.x, lower), (restoring.right, lower)]
    finished = boxes["Finished"]
    routes["Retracted", "Finished"] = [
        (retracted.right, lower),
        (finished.middle, lower),
        (finished.middle, finished.bottom),
    ]
    if "Bootstrapping" in boxes:
        routes["Bootstrapping", "Submitted"] = [(submitted.x + 4, 2), (submitted.x + 4, top)]
    for peer in ("RemotePrefilling", "PrefillAwaitingResult"):
        if peer in boxes:
            routes |= _peer_routes(peer, boxes, top, peer_row)
    return routes


def _peer_routes(peer: str, boxes: dict[str, Box], top: int, peer_row: int) -> dict[Arrow, list[Point]]:
    """The ways to and from a state that waits for the peer or for the last result."""
    entry = boxes[peer].x + 3
    routes: dict[Arrow, list[Point]] = {}
    for name, x in (("Submitted", boxes["Submitted"].right - 4), ("Prefilling", boxes["Prefilling"].x + 4)):
        routes[name, peer] = [(x, top), (x, peer_row), (entry, peer_row), (entry, 2)]
    for name, x in (("PrefillDone", boxes["PrefillDone"].right - 4), ("Decoding", boxes["Decoding"].x + 5)):
        routes[peer, name] = [(x, 2), (x, top)]
    return routes


def _ending(arrow: Arrow, source: Box, target: Box, top: int) -> list[Point]:
    """Over the bus above the main lane."""
    bus = top - 2
    if arrow[0] == "Restoring":
        return _restoring(source, target, top, ends=True)
    if arrow[0] == "Prefetching":
        side = source.y + 1
        return [(source.x, side), (0, side), (0, bus), (target.middle, bus), (target.middle, top)]
    if source.y < bus:  # a state of the peers' lane
        return [(source.right - 2, source.bottom), (source.right - 2, bus), (target.middle, bus), (target.middle, top)]
    stub = source.x + 2 if arrow[0] == "Submitted" else source.right - 2
    return [(stub, top), (stub, bus), (target.middle, bus), (target.middle, top)]


def _giving_way(arrow: Arrow, source: Box, target: Box, top: int) -> list[Point]:
    """Over the bus below the main lane: to Retracted, or back to Submitted."""
    bus = top + 4
    start = (source.x + 6, source.y) if arrow[0] == "Retracted" else (source.x + 2, source.bottom)
    end = (target.x + 3, target.y) if arrow[1] == "Retracted" else (target.right - 2, target.bottom)
    return [start, (start[0], bus), (end[0], bus), end]


def _restoring(source: Box, target: Box, top: int, *, ends: bool = False) -> list[Point]:
    """Over the lowest bus, up to where the request was."""
    bus = top + 5
    end = target.middle if ends else target.right - 2
    return [(source.middle, source.y), (source.middle, bus), (end, bus), (end, target.bottom)]
