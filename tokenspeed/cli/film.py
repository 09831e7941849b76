"""A journal as the dashboard's film: what a server would tell of each round."""

from pathlib import Path
from typing import Any

import msgspec

from tokenspeed.launch.history import Frame, JournalHistory
from tokenspeed.messages.snapshot import StateSnapshot
from tokenspeed_tui.film import Progress, Shot


class JournalFilm:
    """Implements tokenspeed_tui.film.Film over a journal. Raises JournalError as JournalHistory does."""

    def __init__(self, path: Path) -> None:
        self._history = JournalHistory(path)
        self.title = path.name

    @property
    def length(self) -> int:
        """Rounds."""
        return self._history.rounds

    @property
    def warning(self) -> str:
        """Where the plans of this scheduler part from the recorded ones."""
        found = self._history.divergence
        if found is None:
            return ""
        return f"the film ends here: {found.what} in round {found.round:,} (tokenspeed replay shows how)"

    def shot(self, number: int, progress: Progress) -> Shot:
        """The state after a round's plan."""
        frame = self._history.frame(number, progress)
        return Shot(frame.number, self._body(frame), frame.decided)

    def next_event(self, number: int, *, forward: bool, progress: Progress) -> int | None:
        """The nearest round with something to tell."""
        return self._history.next_event(number, forward=forward, progress=progress)

    def detail(self, request: str, number: int, progress: Progress) -> dict[str, Any] | None:
        """What became of a request, named by its handle."""
        detail = self._history.detail(int(request), number, progress) if request.isdecimal() else None
        return None if detail is None else dict(msgspec.to_builtins(detail))

    def _body(self, frame: Frame) -> dict[str, Any]:
        begin = self._history.begin
        return {
            "model": self.title,
            "recipe": f"{begin.implementation} scheduler",
            "profile": None,
            "recipe_hash": None,
            "phase": "ready",
            "ready": True,
            "facts": {"max_model_len": begin.config.get("max_model_len")},
            "snapshot": without_times(frame.snapshot),
        }


def without_times(snapshot: StateSnapshot) -> dict[str, Any]:
    """The snapshot as plain data; what a journal cannot know is left out, for the screen to show a dash."""
    plain = dict(msgspec.to_builtins(snapshot))
    del plain["step"]
    for group in [*plain["groups"], *(plain["host"] or ())]:
        del group["bytes_per_block"]
    return plain
