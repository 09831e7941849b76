"""The state machine drawn: a box a state with its live count, and the flow per second along every arrow."""

from itertools import pairwise

from rich.text import Text

from tokenspeed.telemetry.snapshot import STATES
from tokenspeed_tui.machine import PEER_STATES, Arrow
from tokenspeed_tui.picture import Picture
from tokenspeed_tui.render import text as t
from tokenspeed_tui.render.canvas import EAST, WEST, Canvas, Point
from tokenspeed_tui.render.plan import COUNT_WIDTH, Box, Plan, plan_machine

FUSED = frozenset(STATES) - frozenset(PEER_STATES)
HEADS = {(0, 1): "▼", (0, -1): "▲", (1, 0): "▶", (-1, 0): "◀"}


def present_states(picture: Picture) -> frozenset[str]:
    """The states that the engine's role has; those of a fused one before anything is known."""
    counts = picture.snapshot.states if picture.snapshot is not None else {}
    return frozenset(name for name, number in counts.items() if number is not None) or FUSED


def absent_words(picture: Picture) -> str:
    """The states that the role does not have, in words."""
    absent = [name for name in STATES if name not in present_states(picture)]
    return f"{t.DASH} {' '.join(absent)}: not in this role" if absent and picture.snapshot is not None else ""


def arrow_rate(picture: Picture, arrow: Arrow) -> float | None:
    """Requests a second along an arrow; one that a snapshot leaves out was never taken."""
    rates = picture.rates
    return rates.flows.get(arrow, 0.0) if rates.span_s is not None else None


def render_machine(picture: Picture, width: int) -> list[Text]:
    """The drawing, in ``width`` ≥ LEAST_WIDTH cells."""
    states = present_states(picture)
    plan = plan_machine(states | FUSED, width)
    canvas = Canvas(plan.width, plan.height)
    for name, box in plan.boxes.items():
        _draw_box(canvas, name, box, state_count(picture, name))
    for arrow, points in plan.routes.items():
        moving = bool(arrow_rate(picture, arrow))
        canvas.line(points, "flow" if moving else "idle", rank=int(moving))
    _draw_heads(canvas, picture, plan)
    _draw_labels(canvas, picture, plan)
    return canvas.lines()


def state_count(picture: Picture, name: str) -> int | None:
    """How many requests are in the state; None where the role has no such state or nothing is known."""
    return picture.snapshot.states.get(name) if picture.snapshot is not None else None


def _draw_box(canvas: Canvas, name: str, box: Box, number: int | None) -> None:
    canvas.box(box.x, box.y, box.width, box.height, "accent" if number and name != "Finished" else "idle")
    style = "count" if number else "muted"
    figure = t.count(number)
    if box.height == 3:
        canvas.write(box.x + 1, box.y + 1, name, "title" if number else "muted")
        canvas.write(box.right - COUNT_WIDTH, box.y + 1, figure.rjust(COUNT_WIDTH), style)
        return
    inner = box.width - 2
    canvas.write(box.x + 1, box.y + 1, name.center(inner), "title" if number else "muted")
    canvas.write(box.x + 1, box.y + 2, figure.center(inner), style)


def _draw_heads(canvas: Canvas, picture: Picture, plan: Plan) -> None:
    """An arrowhead where a way ends; bright where any arrow that ends there moves."""
    for end, arrows in _by_point(plan, -1).items():
        before = plan.routes[arrows[0]][-2]
        direction = (_sign(end[0] - before[0]), _sign(end[1] - before[1]))
        moving = any(arrow_rate(picture, arrow) for arrow in arrows)
        canvas.write(*end, HEADS[direction], "flow" if moving else "idle")


def _draw_labels(canvas: Canvas, picture: Picture, plan: Plan) -> None:
    """What arrives at each arrowhead; and on a bus what comes from each state, where anything does."""
    ends, starts = _by_point(plan, -1), _by_point(plan, 0)
    for arrows in ends.values():
        _draw_label(canvas, plan.routes[arrows[0]][::-1], _sum(picture, arrows))
    for arrows in starts.values():
        end = plan.routes[arrows[0]][-1]
        shared = len(arrows) > 1 or len(ends[end]) > 1
        flow = _sum(picture, arrows)
        if shared and flow:
            _draw_label(canvas, plan.routes[arrows[0]], flow)


def _draw_label(canvas: Canvas, points: list[Point], flow: float | None) -> None:
    """Writes a rate where the way is level and free, as near to its first point as that is."""
    label, style = t.rate(flow), "flow" if flow else "idle"
    for (x, y), (to_x, to_y) in pairwise(points):
        if y != to_y:
            continue
        step = _sign(to_x - x)
        place = _free_place(canvas, y, x, to_x, step, len(label))
        if place is not None:
            canvas.write(place, y, label, style)
        return
    (x, y), (_, to_y) = points[0], points[-1]
    row = (y + to_y) // 2
    if not any(canvas.sides(x + 1 + offset, row) for offset in range(len(label))):
        canvas.write(x + 1, row, label, style)


def _free_place(canvas: Canvas, y: int, start: int, stop: int, step: int, length: int) -> int | None:
    """The column of ``length`` cells of plain level line, with one more at each side, nearest to ``start``."""
    run = 0
    for x in range(start, stop, step):
        run = run + 1 if canvas.sides(x, y) == EAST | WEST else 0
        if run == length + 2:
            return min(x, x - step * (length + 1)) + 1
    return None


def _by_point(plan: Plan, index: int) -> dict[Point, list[Arrow]]:
    """The arrows by the first or the last point of their way."""
    grouped: dict[Point, list[Arrow]] = {}
    for arrow, points in plan.routes.items():
        grouped.setdefault(points[index], []).append(arrow)
    return grouped


def _sum(picture: Picture, arrows: list[Arrow]) -> float | None:
    rates = [arrow_rate(picture, arrow) for arrow in arrows]
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None


def _sign(value: int) -> int:
    return (value > 0) - (value < 0)
