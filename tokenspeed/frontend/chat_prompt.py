"""A conversation made a prompt."""

from dataclasses import dataclass
from typing import Any

from tokenspeed.frontend.chat_template import ChatTemplate, ChatTemplateError
from tokenspeed.frontend.errors import RequestRefused
from tokenspeed.frontend.long_texts import PromptBound
from tokenspeed.frontend.tokenizer import Tokenizer

END_CHARACTERS = 256
"""So much of a prompt's end is looked at for what it opened."""


MESSAGE_CHARACTERS = 64
"""What a message costs beside its texts, in characters of them."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as the model reads it: its token ids, and the last characters of its text."""

    token_ids: list[int]
    end: str


def characters_of(messages: list[dict[str, Any]], variables: dict[str, Any] | None) -> int:
    """Returns about how many characters of text there are to be worked on."""
    texts = (value if isinstance(value, str) else str(value) for message in messages for value in message.values())
    return MESSAGE_CHARACTERS * len(messages) + sum(map(len, texts)) + len(str(variables or ""))


def render_chat(
    template: ChatTemplate | None,
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: dict[str, Any] | None,
    bound: PromptBound | None = None,
) -> ChatPrompt:
    """Returns the prompt; ``variables`` go to the template, tools among them.

    Raises RequestRefused where the template is missing, refuses, or has no place for tools that are given, and, as far
    as that is found without counting all its tokens, where the prompt is beyond ``bound``.
    """
    if template is None:
        raise RequestRefused(
            "the model has no chat template; start the server with --chat-template FILE, or use /v1/completions",
            "no_chat_template",
            "messages",
        )
    if variables and variables.get("tools") and not template.shows_tools:
        raise RequestRefused(
            "the model's chat template has no place for tools; start the server with --chat-template FILE",
            "chat_template_error",
            "tools",
        )
    try:
        text = template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )
    except ChatTemplateError as error:
        raise RequestRefused(str(error), "chat_template_error", "messages") from error
    if bound is not None:
        bound.check_text(tokenizer, text)
    return ChatPrompt(tokenizer.encode(text, add_special_tokens=False), text[-END_CHARACTERS:])
