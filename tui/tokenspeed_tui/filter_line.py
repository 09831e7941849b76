"""The line in which a filter is typed. It is a module of its own because Textual's input takes a while to load."""

from textual import events
from textual.message import Message
from textual.widgets import Input


class FilterLine(Input):
    """Below the scene, while one types: what is typed works at once."""

    DEFAULT_CSS = """
    FilterLine { height: 1; border: none; padding: 0; background: $background; }
    FilterLine:focus { border: none; }
    """

    class Dropped(Message):
        """Esc was pressed: all are to be shown again."""

    def __init__(self, pattern: str) -> None:
        hint = "part of an id, a state or a reason; Enter keeps it, Esc shows all"
        super().__init__(pattern, placeholder=hint, compact=True, select_on_focus=False)

    async def _on_key(self, event: events.Key) -> None:
        if event.key == "escape":
            event.stop()
            event.prevent_default()
            self.post_message(self.Dropped())
            return
        await super()._on_key(event)
