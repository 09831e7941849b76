"""Log-probabilities in the three shapes that clients know."""

from collections.abc import Sequence

from tokenspeed.frontend.detokenizer import IncrementalDetokenizer
from tokenspeed.frontend.generation import Prompt
from tokenspeed.frontend.tokenizer import Tokenizer
from tokenspeed.messages import TokenLogprobs
from tokenspeed.server.responses import (
    ChatLogprobs,
    LegacyLogprobs,
    PromptLogprob,
    PromptLogprobList,
    TokenLogprob,
    TopLogprob,
)

SMALLEST = -9999.0
"""Stands for the logarithm of zero, which JSON cannot say."""


def token_text(data: bytes) -> str:
    """Returns a token's bytes as text; part of a character is spelled out, so that two such tokens stay apart."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return logprob if logprob >= SMALLEST else SMALLEST


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """Returns the shape of chat completions: one object a token, with its alternatives."""

    def named(token_id: int, logprob: float) -> TopLogprob:
        data = tokenizer.token_bytes(token_id)
        return TopLogprob(token_text(data), _finite(logprob), list(data))

    content = []
    for entry in entries:
        token = named(entry.token_id, entry.logprob)
        top = [named(*pair) for pair in zip(entry.top_ids, entry.top_logprobs, strict=True)]
        content.append(TokenLogprob(token.token, token.logprob, token.bytes, top))
    return ChatLogprobs(content)


class LegacyLogprobWriter:
    """Writes the shape of plain completions for one choice, slice by slice; offsets count characters of its text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._offset = 0

    def write(self, entries: Sequence[TokenLogprobs], first_token: int | None = None) -> LegacyLogprobs:
        """Returns the slice for ``entries``; before them ``first_token`` of a prompt, which has no probability."""
        result = LegacyLogprobs([], [], [], [])
        if first_token is not None:
            self._add(result, first_token, None, None)
        for entry in entries:
            top = {
                token_text(self._tokenizer.token_bytes(token_id)): _finite(logprob)
                for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
            }
            top.setdefault(token_text(self._tokenizer.token_bytes(entry.token_id)), _finite(entry.logprob))
            self._add(result, entry.token_id, _finite(entry.logprob), top)
        return result

    def _add(self, result: LegacyLogprobs, token_id: int, logprob: float | None, top: dict[str, float] | None) -> None:
        result.tokens.append(token_text(self._tokenizer.token_bytes(token_id)))
        result.token_logprobs.append(logprob)
        result.top_logprobs.append(top)
        result.text_offset.append(self._offset)
        self._offset += len(self._detokenizer.push_one(token_id))


def prompt_logprob_list(tokenizer: Tokenizer, prompt: Prompt) -> PromptLogprobList:
    """Returns one entry for each token of the prompt, keyed by token id; null for the first."""
    result: PromptLogprobList = [None]
    for entry in prompt_entries(prompt):
        pairs = [*zip(entry.top_ids, entry.top_logprobs, strict=True), (entry.token_id, entry.logprob)]
        result.append(
            {
                str(token_id): PromptLogprob(_finite(logprob), token_text(tokenizer.token_bytes(token_id)))
                for token_id, logprob in pairs
            }
        )
    return result


def prompt_entries(prompt: Prompt) -> list[TokenLogprobs]:
    """Returns the log-probabilities of the prompt's tokens, from the second on."""
    return [prompt.logprobs[at] for at in sorted(prompt.logprobs)]
