"""The formats by their names, which are those of recipes (recipes/formats.py; a test holds both equal)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tokenspeed.frontend.parsing import (
    deepseek_v3,
    dsml,
    glm,
    gpt_oss,
    hermes,
    inkling,
    kimi_k2,
    kimi_k3,
    llama3_json,
    llama4_pythonic,
    minimax_m2,
    minimax_m3,
    mistral,
    qwen3_coder,
)
from tokenspeed.frontend.parsing.out import Out
from tokenspeed.frontend.parsing.reader import Reader, Steps
from tokenspeed.frontend.parsing.thoughts import Thoughts
from tokenspeed.frontend.parsing.typed import Tools


class AnswerGrammar(Protocol):
    """The grammar of a whole answer, for families that frame everything."""

    def __call__(self, out: Out, *, prompt_end: str, separate: bool) -> Callable[[Reader], Steps[None]]: ...


@dataclass(frozen=True)
class ToolFormat:
    """How a family writes calls.

    Attributes:
        grammar: of what follows the reasoning.
        markers: the texts that must reach the grammar, special tokens or not.
        ends_reasoning: the beginnings of calls that models are known to write without closing their reasoning first.
    """

    grammar: Callable[[Reader, Out, Tools], Steps[None]]
    markers: tuple[str, ...]
    ends_reasoning: tuple[str, ...] = ()


@dataclass(frozen=True)
class WholeFormat:
    """How a family frames reasoning, answer and calls at once; it is named for tools and reasoning both.

    Attributes:
        opening: what begins a piece of reasoning.
        ends: what ends one.
        closing: what is written to end one and begin the answer.
        answer: what begins the answer, behind the reasoning.
        efforts: the words for reasoning_effort that the model knows.
    """

    grammar: AnswerGrammar
    markers: tuple[str, ...]
    opening: str
    ends: tuple[str, ...]
    closing: str
    answer: str
    efforts: tuple[str, ...] = ()


_GPT_OSS = WholeFormat(
    gpt_oss.grammar, gpt_oss.MARKERS, gpt_oss.OPENING, gpt_oss.ENDS, gpt_oss.CLOSING, gpt_oss.ANSWER, gpt_oss.EFFORTS
)
_INKLING = WholeFormat(inkling.grammar, inkling.MARKERS, inkling.OPENING, inkling.ENDS, inkling.CLOSING, inkling.ANSWER)
_KIMI_K3 = WholeFormat(kimi_k3.grammar, kimi_k3.MARKERS, kimi_k3.OPENING, kimi_k3.ENDS, kimi_k3.CLOSING, kimi_k3.ANSWER)

TOOL_FORMATS: dict[str, ToolFormat | WholeFormat] = {
    "deepseek_v3": ToolFormat(deepseek_v3.grammar_v3, deepseek_v3.MARKERS),
    "deepseek_v31": ToolFormat(deepseek_v3.grammar_v31, deepseek_v3.MARKERS),
    "deepseek_v32": ToolFormat(dsml.grammar_v32, dsml.MARKERS),
    "deepseek_v4": ToolFormat(dsml.grammar_v4, dsml.MARKERS),
    "glm45": ToolFormat(glm.grammar, glm.MARKERS),
    "glm47": ToolFormat(glm.grammar, glm.MARKERS),
    "gpt_oss": _GPT_OSS,
    "hermes": ToolFormat(hermes.grammar, hermes.MARKERS),
    "inkling": _INKLING,
    "kimi_k2": ToolFormat(kimi_k2.grammar, kimi_k2.MARKERS, (kimi_k2.SECTION,)),
    "kimi_k3": _KIMI_K3,
    "llama3_json": ToolFormat(llama3_json.grammar, llama3_json.MARKERS),
    "llama4_pythonic": ToolFormat(llama4_pythonic.grammar, llama4_pythonic.MARKERS),
    "minimax_m2": ToolFormat(minimax_m2.grammar, minimax_m2.MARKERS),
    "minimax_m3": ToolFormat(minimax_m3.grammar, minimax_m3.MARKERS),
    "mistral": ToolFormat(mistral.grammar, mistral.MARKERS),
    "qwen3": ToolFormat(hermes.grammar, hermes.MARKERS),
    "qwen3_coder": ToolFormat(qwen3_coder.grammar, qwen3_coder.MARKERS, (qwen3_coder.BEGINNING,)),
}

_THINK = Thoughts()

REASONING_FORMATS: dict[str, Thoughts | WholeFormat] = {
    "deepseek_r1": _THINK,
    "deepseek_v31": _THINK,
    "deepseek_v4": _THINK,
    "glm45": _THINK,
    "gpt_oss": _GPT_OSS,
    "inkling": _INKLING,
    "kimi_k2": _THINK,
    "kimi_k3": _KIMI_K3,
    "minimax_m2": _THINK,
    "minimax_m3": Thoughts("<mm:think>", "</mm:think>"),
    "mistral": Thoughts("[THINK]", "[/THINK]"),
    "qwen3": _THINK,
}
