"""The dashboard of an operator: what it adds are the keys that change something, each of which asks first."""

from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

from textual.binding import Binding, BindingType

from tokenspeed_tui.admin import Administration, Outcome
from tokenspeed_tui.controls import chosen_request, moved_selection
from tokenspeed_tui.dashboard import DashboardScreen
from tokenspeed_tui.dialogs import Confirm


class OperatorScreen(DashboardScreen):
    """One server that may be changed (``--allow-admin``).

    Args:
        administration: what does it.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("x", "abort", "Abort", tooltip="end the selected request (with --allow-admin)"),
        Binding("f", "flush", "Flush", show=False, tooltip="forget all cached prefixes (with --allow-admin)"),
        Binding("z", "hold", "Hold", show=False, tooltip="stop planning steps, or go on (with --allow-admin)"),
    ]

    def __init__(self, *arguments: Any, administration: Administration, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._administration = administration

    def action_abort(self) -> None:
        """Ends the selected request, once that is agreed to."""
        selected = moved_selection(self.picture, self.controls, 0)
        if self.controls.shown == "detail":
            selected = self.controls.selected
        request = chosen_request(self.picture, selected)
        if request is None or not request.request_id:
            self.notify("no live request is selected", severity="warning")
            return
        name = request.request_id
        self._ask(
            f"End the request {name}? Its client gets the error `aborted`.", lambda: self._administration.abort(name)
        )

    def action_flush(self) -> None:
        """Forgets all cached prefixes, once that is agreed to."""
        self._ask(
            "Forget all cached prefixes, on the device and in host memory? Every prompt is computed anew then.",
            self._administration.flush,
        )

    def action_hold(self) -> None:
        """Pauses the engine, or lets it go on, once that is agreed to."""
        snapshot = self.picture.snapshot
        pausing = not (snapshot is not None and snapshot.paused)
        question = (
            "Stop planning steps? Requests stay where they are, and none makes progress until you go on."
            if pausing
            else "Go on planning steps?"
        )
        self._ask(question, lambda: self._administration.hold(pausing))

    def _ask(self, question: str, action: Callable[[], Awaitable[Outcome]]) -> None:
        """Asks; the action runs beside the dashboard, which goes on meanwhile."""

        def answered(agreed: bool | None) -> None:
            if agreed:
                self.run_worker(self._act(action), exit_on_error=False)

        self.app.push_screen(Confirm(f"{question}\n\n{self.picture.url}"), answered)

    async def _act(self, action: Callable[[], Awaitable[Outcome]]) -> None:
        outcome = await action()
        self.notify(outcome.text, severity="information" if outcome.done else "error", timeout=10, markup=False)
        self.hurry()
