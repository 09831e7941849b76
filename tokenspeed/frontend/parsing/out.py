"""Where grammars send what they found, and the small filters between."""

import secrets
import string

from tokenspeed.frontend.parsing.parts import CallArguments, CallBegun, CallEnded, Content, Part, Reasoning
from tokenspeed.frontend.parsing.reader import Sink

_ALPHANUMERIC = string.ascii_letters + string.digits


def new_call_id() -> str:
    """An id in OpenAI's manner."""
    return f"call_{secrets.token_hex(12)}"


def new_short_id() -> str:
    """Nine letters and digits, which is what Mistral's templates take."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


class Out:
    """Collects parts.

    White space next to a tool call belongs to the call: ``content`` holds it until text follows it.

    Attributes:
        parts: what was found since they were last taken.
        calls: how many calls were begun.
        in_reasoning: whether the text is inside reasoning at this moment.
        valid_calls: the engine lets through valid calls only, so that JSON can be read by its own rules.
    """

    def __init__(self, *, calls: bool = True, parallel: bool = True, valid_calls: bool = False) -> None:
        """``calls`` false makes calls text; ``parallel`` false gives the first call only and leaves out all others."""
        self.parts: list[Part] = []
        self.calls = 0
        self.in_reasoning = False
        self.valid_calls = valid_calls
        self._takes_calls = calls
        self._parallel = parallel
        self._space = ""
        self._behind_call = False
        self._wrote_arguments = False

    def take(self) -> list[Part]:
        parts, self.parts = self.parts, []
        return parts

    def reasoning(self, text: str) -> None:
        if text:
            self.parts.append(Reasoning(text))

    def plain(self, text: str) -> None:
        """Content as it is; for answers that can hold no calls."""
        if text:
            self.parts.append(Content(text))

    def content(self, text: str) -> None:
        """Content of an answer that may hold calls."""
        if self._behind_call:
            text = text.lstrip()
            self._behind_call = not text
        body = text.rstrip()
        if body:
            self.plain(self._space + body)
            self._space = text[len(body) :]
        else:
            self._space += text

    def flush(self) -> None:
        """The answer ended; white space that was held is content after all."""
        self.plain(self._space)
        self._space = ""

    def begin(self, name: str, id_: str = "") -> None:
        """Begins a call."""
        if not self._takes_calls:
            self.content(name)
            return
        self._space, self._behind_call, self._wrote_arguments = "", True, False
        if self._shows():
            self.parts.append(CallBegun(self.calls, id_ or new_call_id(), name))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """A piece of the arguments of the call begun last."""
        if not self._takes_calls:
            self.content(text)
        elif text:
            self._wrote_arguments = True
            if self._shows(begun=1):
                self.parts.append(CallArguments(self.calls - 1, text))

    def end(self) -> None:
        """Ends the call begun last; one without arguments has an empty object of them."""
        if not self._takes_calls:
            return
        if not self._wrote_arguments:
            self.arguments("{}")
        if self._shows(begun=1):
            self.parts.append(CallEnded(self.calls - 1))

    def _shows(self, begun: int = 0) -> bool:
        return self._parallel or self.calls <= begun


class Trimmed:
    """Passes text on without the ``characters`` at its ends; None is white space."""

    def __init__(self, sink: Sink, characters: str | None = None) -> None:
        self._sink = sink
        self._characters = characters
        self._begun = False
        self._held = ""

    def push(self, text: str) -> None:
        if not self._begun:
            text = text.lstrip(self._characters)
        if not text:
            return
        self._begun = True
        body = text.rstrip(self._characters)
        if body:
            self._sink(self._held + body)
            self._held = text[len(body) :]
        else:
            self._held += text


class Unwrapped:
    """Passes text on without one line break at its beginning and one at its end."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._begun = False
        self._held = ""

    def push(self, text: str) -> None:
        if not self._begun and text:
            self._begun = True
            text = text.removeprefix("\n")
        text = self._held + text
        body = text.removesuffix("\n")
        self._held = text[len(body) :]
        if body:
            self._sink(body)
