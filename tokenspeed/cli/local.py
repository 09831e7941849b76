"""What the dashboard cannot have by itself: an engine for its demo, and the servers of this machine."""

import sys
from collections.abc import Callable
from importlib.util import find_spec

from tokenspeed.cli.records import ServerError, running_servers
from tokenspeed_tui.demo import Simulation
from tokenspeed_tui.local import Found


class LocalMachine:
    """Implements tokenspeed_tui.local.Local."""

    command = (sys.executable, "-m", "tokenspeed.cli", "top")

    def demo(self, seed: int) -> Callable[[], Simulation]:
        """Makes the demo's engine; raises ServerError where the scheduler is not installed."""
        if find_spec("tokenspeed_scheduler") is None:
            raise ServerError("the demo runs the scheduler: install the package tokenspeed-appliance-scheduler")

        def make() -> Simulation:
            from tokenspeed.launch.demo import Demo

            return Demo(seed)

        return make

    def servers(self) -> list[Found]:
        """Those in this user's records."""
        return [Found(record.url, record.name, record.where) for record in running_servers()]

    def find(self) -> list[Found]:
        """Those, and containers of this project's images that publish a port."""
        from tokenspeed.cli.containers import PROGRAMS, published_containers

        found = {server.url: server for server in self.servers()}
        for program in PROGRAMS:
            for container in published_containers(program):
                found.setdefault(container.url, Found(container.url, container.name, f"{container.name} ({program})"))
        return list(found.values())
