"""The demo's time: nothing passes unless something moves it."""

LOOK_S = 40e-6
"""What each look at the clock costs: so planning and committing, between looks, take a little time of their own."""


class DemoClock:
    """Seconds since the demo began; nothing passes unless something moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """What time it is; looking takes LOOK_S."""
        self.now += LOOK_S
        return self.now

    def move_to(self, moment: float) -> None:
        """Later, never back."""
        self.now = max(self.now, moment)
