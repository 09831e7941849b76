"""The question before something is changed."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Footer, Static


class Confirm(ModalScreen[bool]):
    """Asks before an action; closes with whether it was agreed to. Anything but y is no."""

    DEFAULT_CSS = """
    Confirm { align: center middle; background: $background 40%; }
    Confirm > Vertical { width: 64; max-width: 96%; height: auto; padding: 1 2; }
    Confirm > Vertical { border: round $error; background: $background; }
    Confirm Footer { background: $background; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes, do it"),
        Binding("n,escape,enter", "answer(False)", "No", key_display="n"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self.question = question

    def compose(self) -> ComposeResult:
        """The question above the two answers."""
        with Vertical():
            yield Static(self.question, markup=False)
            yield Static("\ny does it, any of n, Esc and Enter does not.", markup=False)
        yield Footer(compact=True)

    def action_answer(self, agreed: bool) -> None:
        """Closes with the answer."""
        self.dismiss(agreed)
