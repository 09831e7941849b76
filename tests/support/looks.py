"""Looking at a ControlPlane: its state, one request, and what is said of it."""

from control_plane import ControlPlane

from tokenspeed.messages import Inspect
from tokenspeed.messages.snapshot import RequestDetail, StateSnapshot


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(7 * position + 13 * salt) % 997 for position in range(length)]


def look(plane: ControlPlane) -> StateSnapshot:
    """The state now, complete."""
    plane.channel.send_in(watch_s=60)
    plane.loop.round()
    plane.loop.publish_snapshot()
    return plane.channel.snapshots[-1]


def detail(plane: ControlPlane, name: str) -> RequestDetail | None:
    """What the loop answers at the end of one more round."""
    plane.channel.send_in(inspects=[Inspect(7, name)])
    plane.loop.round()
    assert plane.channel.inspected[-1].number == 7
    return plane.channel.inspected[-1].detail


def known(plane: ControlPlane, name: str) -> RequestDetail:
    found = detail(plane, name)
    assert found is not None
    return found


def rounds(plane: ControlPlane, count: int) -> None:
    for _ in range(count):
        plane.loop.round()


def says(detail: RequestDetail, *parts: str) -> None:
    text = "\n".join([detail.reason, *detail.explain])
    for part in parts:
        assert part in text, text
