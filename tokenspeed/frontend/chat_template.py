"""Renders a conversation with the model's own template, in a sandbox."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tokenspeed.frontend.template_messages import takes_no_content, template_messages
from tokenspeed.frontend.tool_declaration import NAME, declare_tools, sorted_deep


class ChatTemplateError(ValueError):
    """A template that cannot be read, or that refuses a conversation; the message says why."""


class _GenerationTag(Extension):
    """``{% generation %} … {% endgeneration %}`` marks the assistant's words for training; here it shows its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it as an instance's)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)  # what is set inside stays inside


class _Namespace(Namespace):
    """Jinja's own, without the names that lead to a program's insides."""

    def __init__(self, /, *parts: Any, **values: Any) -> None:
        given = dict(*parts, **values)
        for name in given:
            _refuse_hidden(name)
        super().__init__(given)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_hidden(name)
        super().__setitem__(name, value)


def _refuse_hidden(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore, such as {name!r}")


class ChatTemplate:
    """A compiled template. Rendering is thread-safe.

    Attributes:
        shows_tools: whether it says anything of tools.
    """

    def __init__(self, source: str, bos_token: str, eos_token: str) -> None:
        """Raises ChatTemplateError where ``source`` is no valid template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        environment.globals["namespace"] = _Namespace
        self._wants_declarations = NAME in source
        self.shows_tools = "tools" in source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"the chat template, line {error.lineno}: {error.message}") from error
        self._takes_none = takes_no_content(lambda messages: self._text(messages, {}, add_generation_prompt=False))

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """Returns the prompt text for ``messages``.

        Args:
            messages: role and content of each, oldest first.
            add_generation_prompt: whether to open the assistant's turn.
            continue_final_message: leave the last message open, so that the model goes on with it.
            variables: further names for the template; they cannot replace the ones it always has.

        Raises:
            ChatTemplateError: the template refuses the conversation, or fails on it.
        """
        messages = template_messages(messages, takes_none=self._takes_none)
        try:
            text = self._text(messages, variables or {}, add_generation_prompt=add_generation_prompt)
        except ChatTemplateError:
            raise
        except Exception as error:  # a template can fail in any way that code can
            raise ChatTemplateError(f"the chat template failed on this conversation: {error}") from error
        return _cut_after_last(text, messages) if continue_final_message else text

    def _text(self, messages: list[dict[str, Any]], variables: dict[str, Any], *, add_generation_prompt: bool) -> str:
        fixed = {"messages": messages, "add_generation_prompt": add_generation_prompt, **self._tokens}
        given = {"tools": None, "documents": None, **variables}
        if self._wants_declarations and given["tools"] and NAME not in given:
            given["tools"] = sorted_deep(given["tools"])
            given[NAME] = declare_tools(given["tools"])
        text: str = self._template.render({**given, **fixed})
        return text


def read_template_setting(setting: str) -> str:
    """Returns the template that ``--chat-template`` names: a file's content, or the setting itself if it is a template.

    Raises ChatTemplateError where it names a file that cannot be read.
    """
    if "{{" in setting or "{%" in setting:
        return setting
    try:
        return Path(setting).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ChatTemplateError(
            f"--chat-template {setting}: {error}. Give a readable file or the template's text itself"
        ) from error


def _cut_after_last(text: str, messages: list[dict[str, Any]]) -> str:
    """Cuts what the template wrote behind the last message's content (its end-of-turn marker)."""
    if not messages:
        raise ChatTemplateError("continue_final_message: there is no message to go on from")
    content = str(messages[-1].get("content") or "").strip()
    at = text.rfind(content) if content else -1
    if at < 0:
        raise ChatTemplateError(
            "continue_final_message: the last message's content does not appear in the rendered prompt, so there is no "
            "place to go on from"
        )
    return text[: at + len(content)]


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own ``tojson`` escapes for HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> str:
    raise ChatTemplateError(f"the chat template refuses this conversation: {message}")


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
