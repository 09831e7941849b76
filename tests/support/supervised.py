"""What a supervisor under test speaks to."""

import asyncio

from tokenspeed.engine.supervisor import RestartPolicy

POLICY = RestartPolicy(first_s=0.01, longest_s=0.02, attempts=3)


class Link:
    """Notes what the supervisor says."""

    def __init__(self) -> None:
        self.generations = 0
        self.lost: list[str] = []
        self.given_up: list[str] = []

    def rebind(self) -> tuple[str, str]:
        self.generations += 1
        return f"in-{self.generations}", f"out-{self.generations}"

    def engine_lost(self, cause: str) -> None:
        self.lost.append(cause)

    def engine_given_up(self, cause: str) -> None:
        self.given_up.append(cause)

    async def until(self, condition) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.005)
