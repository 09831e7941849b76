"""The names of tool and reasoning formats that a recipe or a flag may say; docs/recipes.md has this table.

The parsers of these names are the frontend's; a test holds both lists equal. Here they are plain words, so that a wrong
one is found before anything is loaded.
"""

from typing import Annotated

from pydantic import AfterValidator, Field

from tokenspeed.recipes.validation import nearest

TOOL_FORMATS = {
    "deepseek_v3": "DeepSeek-V3, R1",
    "deepseek_v31": "DeepSeek-V3.1",
    "deepseek_v32": "DeepSeek-V3.2",
    "deepseek_v4": "DeepSeek-V4",
    "glm45": "GLM-4.5, 4.6",
    "glm47": "GLM-4.7, 5 and later",
    "gpt_oss": "gpt-oss (harmony)",
    "hermes": "Hermes, Qwen2.5, Qwen3",
    "inkling": "Inkling",
    "kimi_k2": "Kimi K2 to K2.6",
    "kimi_k3": "Kimi K3",
    "llama3_json": "Llama 3.1 to 3.3",
    "llama4_pythonic": "Llama 4, Llama 3.2",
    "minimax_m2": "MiniMax-M2, M2.5",
    "minimax_m3": "MiniMax-M3",
    "mistral": "Mistral",
    "qwen3": "Qwen3, the same as hermes",
    "qwen3_coder": "Qwen3-Coder, Qwen3.5 to 3.8",
}
"""Name to the models that write so."""

REASONING_FORMATS = {
    "deepseek_r1": "DeepSeek-R1",
    "deepseek_v31": "DeepSeek-V3.1, V3.2",
    "deepseek_v4": "DeepSeek-V4",
    "glm45": "GLM-4.5 to 5",
    "gpt_oss": "gpt-oss (harmony)",
    "inkling": "Inkling",
    "kimi_k2": "Kimi K2 Thinking to K2.6",
    "kimi_k3": "Kimi K3",
    "minimax_m2": "MiniMax-M2, M2.5",
    "minimax_m3": "MiniMax-M3",
    "mistral": "Magistral and later",
    "qwen3": "Qwen3 to 3.8",
}
"""Name to the models that write so."""

WHOLE_FORMATS = ("gpt_oss", "inkling", "kimi_k3")
"""Formats that frame reasoning, answer and calls at once: both keys name one of them, or neither does."""

THINKING_SWITCHES = {
    "enable_thinking": "true or false",
    "thinking": "true or false",
    "thinking_mode": "enabled or disabled",
    "reasoning_effort": "the request's own word",
}
"""The template's variable to the values that it takes."""


def _one_of(kind: str, known: dict[str, str]) -> tuple[AfterValidator, object]:
    def check(value: str) -> str:
        if value and value not in known:
            raise ValueError(f'there is no {kind} "{value}"{nearest(value, known)}')
        return value

    return AfterValidator(check), Field(json_schema_extra={"enum": ["", *known]})


ToolFormatName = Annotated[str, *_one_of("tool format", TOOL_FORMATS)]
ReasoningFormatName = Annotated[str, *_one_of("reasoning format", REASONING_FORMATS)]
ThinkingSwitch = Annotated[str, *_one_of("thinking switch", THINKING_SWITCHES)]


def check_pair(tools: str, reasoning: str) -> None:
    """Raises ValueError where one of both names a format that the other must name too."""
    for name in (tools, reasoning):
        if name in WHOLE_FORMATS and tools != reasoning:
            raise ValueError(
                f"{name} frames reasoning and calls at once: set tools (--tool-format) and reasoning "
                f"(--reasoning-format) to {name} both; they are {tools or 'none'} and {reasoning or 'none'}"
            )
