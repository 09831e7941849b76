"""One choice on its way: the engine's tokens in, text deltas out, told apart where that was asked for."""

from collections import deque
from collections.abc import Sequence

from tokenspeed.frontend.detokenizer import IncrementalDetokenizer
from tokenspeed.frontend.parsing.parser import AnswerParser
from tokenspeed.frontend.parsing.parts import merged
from tokenspeed.frontend.request import Delta
from tokenspeed.frontend.stop import StopMatch, StopStringFinder
from tokenspeed.frontend.tokenizer import Tokenizer
from tokenspeed.messages import RequestOutput, TokenLogprobs


def _is_complete(delta: Delta) -> bool:
    """Whether the model ended its answer: with an end token, or since its constraint let nothing follow."""
    return delta.finish_reason == "stop" and not isinstance(delta.matched_stop, str)


class _HeldToken:
    """A token whose text was not let through yet: characters ``start`` to ``end`` (None while they are not whole)."""

    __slots__ = ("end", "logprob", "start", "token_id")

    def __init__(self, token_id: int, logprob: TokenLogprobs | None, start: int) -> None:
        self.token_id = token_id
        self.logprob = logprob
        self.start = start
        self.end: int | None = None


class Choice:
    """Detokenizes one choice and finds its stop strings.

    Attributes:
        index: of the choice in its call.
        generated: tokens that count so far: all that arrived, cut at a stop string.
        reasoning_tokens: those of them that came while reasoning was open, the one that closed it included.
        finished: nothing more will come.
    """

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str],
        min_tokens: int,
        include_stop: bool,
        skip_special_tokens: bool,
        parser: AnswerParser | None = None,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """``parser`` tells the text apart; ``shown`` are special tokens that it must see."""
        self.index = index
        self.generated = 0
        self.finished = False
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens, shown)
        self._parser = parser
        self._reasoned = 0
        self._finder = StopStringFinder(stop) if stop else None
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._held: deque[_HeldToken] = deque()
        self._whole = 0  # characters that the detokenizer gave so far
        self._free = 0  # characters that passed by the finder, before min_tokens
        self._fed = 0  # tokens that went into the text
        self._shown = 0  # tokens that came out in a delta

    def push(self, output: RequestOutput) -> Delta | None:
        """Takes what one round brought; returns what there is to show, None for nothing.

        After it ``finished`` may be true while the engine still runs (a stop string matched): then ``generated`` is
        what the engine should keep.
        """
        token_ids, logprobs = output.token_ids, output.logprobs
        self.generated += len(token_ids)
        if output.finish_reason == "stop" and output.stop_token_id >= 0 and not self._include_stop:
            token_ids, logprobs = token_ids[:-1], logprobs[:-1]
        delta = Delta(index=self.index)
        if self._finder is not None:
            self._search(self._finder, token_ids, logprobs, delta)
        else:
            delta.token_ids, delta.logprobs = token_ids, logprobs
            if self._parser is None:
                delta.text = self._detokenizer.push(token_ids)
            else:
                for token_id in token_ids:
                    self._say(self._detokenizer.push_one(token_id), delta, tokens=1)
        if output.finish_reason is not None and not self.finished:
            self._end(output, delta)
        if self._parser is not None:
            if self.finished:
                delta.parts += self._parser.finish(complete=_is_complete(delta))
            delta.parts = merged(delta.parts)
        return delta if delta.text or delta.token_ids or delta.finish_reason else None

    @property
    def reasoning_tokens(self) -> int:
        return min(self._reasoned, self.generated)

    def _say(self, text: str, delta: Delta, tokens: int = 0) -> None:
        """Adds text to the delta, and what it is; ``tokens`` it came with count by whether reasoning is open."""
        delta.text += text
        if self._parser is not None:
            open_before = self._parser.in_reasoning
            if text:
                delta.parts += self._parser.push(text)
            if open_before or self._parser.in_reasoning:
                self._reasoned += tokens

    def _search(
        self, finder: StopStringFinder, token_ids: list[int], logprobs: list[TokenLogprobs], delta: Delta
    ) -> None:
        """Takes the tokens one by one, so that a match says after which of them it was complete."""
        for at, token_id in enumerate(token_ids):
            self._held.append(_HeldToken(token_id, logprobs[at] if logprobs else None, self._whole))
            self._fed += 1
            text = self._detokenizer.push_one(token_id)
            self._grow(text)
            if self._fed <= self._min_tokens:
                self._say(text, delta, tokens=1)
                self._free += len(text)
                continue
            shown, match = finder.push(text)
            self._say(shown, delta, tokens=1)
            if match is not None:
                self._match(match, delta)
                return
        self._release(self._free + finder.released, delta)

    def _grow(self, text: str) -> None:
        """Notes that the text grew; tokens whose characters are now whole learn where they end."""
        self._whole += len(text)
        if self._detokenizer.holds_bytes:
            return
        for token in reversed(self._held):
            if token.end is not None:
                break
            token.end = self._whole

    def _match(self, match: StopMatch, delta: Delta) -> None:
        """Ends the choice at a stop string: text, tokens and count are cut to what is kept."""
        if self._include_stop:
            self._say(match.stop, delta)
        cut = self._free + (match.end if self._include_stop else match.start)
        for token in self._held:
            # A token without text right before the cut stays: it would have been shown, had its round ended with it.
            if token.start < cut or token.end == cut:
                self._show(token, delta)
        self._held.clear()
        self.generated = self._shown
        if self._parser is not None and self._parser.in_reasoning:
            self._reasoned = max(0, self._reasoned - (self._fed - self._shown))
        delta.finish_reason, delta.matched_stop = "stop", match.stop
        self.finished = True

    def _end(self, output: RequestOutput, delta: Delta) -> None:
        """Ends the choice because the engine did; what was held back is text after all."""
        rest = self._detokenizer.finish()
        if self._finder is not None:
            self._grow(rest)
            shown, match = self._finder.push(rest)
            self._say(shown, delta)
            if match is not None:
                self._match(match, delta)
                return
            rest = self._finder.finish()
            self._release(self._whole, delta)
        self._say(rest, delta)
        delta.finish_reason = output.finish_reason
        if output.finish_reason == "stop" and output.stop_token_id >= 0:
            delta.matched_stop = output.stop_token_id
        self.finished = True

    def _release(self, shown: int, delta: Delta) -> None:
        """Moves the held tokens whose text has been shown in full to the delta."""
        while self._held:
            end = self._held[0].end
            if end is None or end > shown:
                break
            self._show(self._held.popleft(), delta)

    def _show(self, token: _HeldToken, delta: Delta) -> None:
        self._shown += 1
        delta.token_ids.append(token.token_id)
        if token.logprob is not None:
            delta.logprobs.append(token.logprob)
