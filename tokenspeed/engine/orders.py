"""An operator's orders inside the loop: a pause, its end, and a flush of the prefix cache."""

from tokenspeed.messages import PROTOCOL_VERSION, Order, OrderDone
from tokenspeed_scheduler import Event, ForgetCache


class Orders:
    """What was ordered and how far it got. A flush is an event for the loop's first site; nothing is advanced here.

    Attributes:
        paused: whether no step may be planned.
    """

    def __init__(self) -> None:
        self.paused = False
        self._flushes: list[int] = []
        self._answers: list[OrderDone] = []

    @property
    def waiting(self) -> bool:
        """Whether a flush waits for what is out to land."""
        return bool(self._flushes)

    def take(self, order: Order) -> None:
        """Takes an order in; whatever it needs of the loop is asked for with ``events``."""
        if order.action == "flush_cache":
            self._flushes.append(order.number)
            return
        self.paused = order.action == "pause"
        self._answer(order.number)

    def events(self, live: int, idle: bool) -> list[Event]:
        """Returns what the orders tell the scheduler now.

        Args:
            live: requests that run or wait; any of them refuses a flush.
            idle: whether nothing is out: no step, no copy, no storage operation. Until then a flush waits.
        """
        if not self._flushes or (not live and not idle):
            return []
        numbers, self._flushes = self._flushes, []
        for number in numbers:
            self._answer(number, f"{live} requests run or wait; the cache is flushed when none does" if live else "")
        return [] if live else [ForgetCache()]

    def answers(self) -> list[OrderDone]:
        """Returns the answers that are due, once; to be sent at the end of a round, when what was ordered is so."""
        answers, self._answers = self._answers, []
        return answers

    def _answer(self, number: int, refused: str = "") -> None:
        self._answers.append(OrderDone(version=PROTOCOL_VERSION, number=number, refused=refused))
