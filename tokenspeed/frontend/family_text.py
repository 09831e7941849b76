"""How each family marks its turns: a chat template of ours and the special tokens that it writes.

Models with random weights speak with them, so that a smoke profile shows its family's shape. Checkpoints bring their
own template; where DeepSeek-V3.2 and V4 bring an encoder in Python instead, ours stands in.
"""

from dataclasses import dataclass
from pathlib import Path

from tokenspeed.frontend.tokenizer_bytes import CHAT_TEMPLATE

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class FamilyText:
    """One family's way of marking turns.

    Attributes:
        template: the name of a file in templates/, "" for plain turns.
        begin, end: the tokens that begin a text and end it.
        markers: the other special tokens; they steer and are no text.
        tags: tokens of their own that are text: a client may want to see them.
    """

    template: str
    begin: str
    end: str
    markers: tuple[str, ...]
    tags: tuple[str, ...] = ()

    def chat_template(self) -> str:
        """The template's source."""
        return (TEMPLATES / f"{self.template}.jinja").read_text("utf-8") if self.template else CHAT_TEMPLATE

    @property
    def special(self) -> tuple[str, ...]:
        """All tokens that steer, the first of them and the last of a text first."""
        return tuple(dict.fromkeys((self.begin, self.end, *self.markers)))


_CHATML = ("<|im_start|>", "<|im_end|>")
_CALLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_THOUGHTS = ("<think>", "</think>")
_DSML = ("｜DSML｜", *_THOUGHTS)

PLAIN = FamilyText("", "<|bos|>", "<|eos|>", _CHATML)
_QWEN3 = FamilyText("qwen3", "<|endoftext|>", "<|im_end|>", _CHATML, (*_CALLS, *_THOUGHTS))
_QWEN3_5 = FamilyText("qwen3_5", "<|endoftext|>", "<|im_end|>", _CHATML, (*_CALLS, *_THOUGHTS))
_KIMI = FamilyText(
    "kimi",
    "[BOS]",
    "[EOS]",
    (
        "<|im_system|>",
        "<|im_user|>",
        "<|im_assistant|>",
        "<|im_middle|>",
        "<|im_end|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
    _THOUGHTS,
)
_DEEPSEEK_EDGES = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
_DEEPSEEK_SPEAKERS = ("<｜User｜>", "<｜Assistant｜>")
_DEEPSEEK_CALLS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
)
_DEEPSEEK = FamilyText("deepseek_v3", *_DEEPSEEK_EDGES, _DEEPSEEK_SPEAKERS, (*_DEEPSEEK_CALLS, *_THOUGHTS))
_GLM = FamilyText(
    "glm",
    "<|endoftext|>",
    "<|user|>",
    ("[gMASK]", "<sop>", "<|system|>", "<|assistant|>", "<|observation|>"),
    ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", *_THOUGHTS),
)
_HARMONY = FamilyText(
    "harmony",
    "<|startoftext|>",
    "<|return|>",
    ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"),
)
_MINIMAX = FamilyText(
    "minimax",
    "]~!b[",
    "[e~[",
    ("]~b]",),
    ("<minimax:tool_call>", "</minimax:tool_call>", *_THOUGHTS),
)

FAMILY_TEXTS: dict[str, FamilyText] = {
    "smollm3": _QWEN3,
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "qwen3_next": _QWEN3,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "kimi_k25": _KIMI,
    "kimi_linear": _KIMI,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": FamilyText("deepseek_v32", *_DEEPSEEK_EDGES, _DEEPSEEK_SPEAKERS, _DSML),
    "deepseek_v4": FamilyText("deepseek_v4", *_DEEPSEEK_EDGES, _DEEPSEEK_SPEAKERS, _DSML),
    "glm4": _GLM,
    "glm4_moe": _GLM,
    "glm4_moe_lite": _GLM,
    "glm_moe_dsa": _GLM,
    "gpt_oss": _HARMONY,
    "minimax_m2": _MINIMAX,
}
"""By the engine's name of the architecture; all others have plain turns."""

WITHOUT_TEMPLATE = ("deepseek_v32", "deepseek_v4")
"""Architectures whose checkpoints come without a chat template."""


def family_text(architecture: str) -> FamilyText:
    """The family's, or plain turns."""
    return FAMILY_TEXTS.get(architecture, PLAIN)
