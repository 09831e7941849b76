"""The formats by their names: every one that has a parser (parsing/registry.py) has a grammar here, a test holds it."""

from collections.abc import Callable, Mapping

from tokenspeed.frontend.calling import objects, pythonic, tags, whole
from tokenspeed.frontend.calling.functions import Wanted
from tokenspeed.frontend.calling.lark import Lark

CALL_GRAMMARS: dict[str, Callable[[Lark, Wanted], str]] = {
    "deepseek_v3": objects.deepseek_v3,
    "deepseek_v31": objects.deepseek_v31,
    "deepseek_v32": tags.deepseek_v32,
    "deepseek_v4": tags.deepseek_v4,
    "glm45": tags.glm45,
    "glm47": tags.glm47,
    "gpt_oss": whole.gpt_oss,
    "hermes": objects.hermes,
    "inkling": whole.inkling,
    "kimi_k2": objects.kimi_k2,
    "kimi_k3": whole.kimi_k3,
    "llama3_json": objects.llama3_json,
    "llama4_pythonic": pythonic.llama4_pythonic,
    "minimax_m2": tags.minimax_m2,
    "minimax_m3": tags.minimax_m3,
    "mistral": objects.mistral,
    "qwen3": objects.hermes,
    "qwen3_coder": tags.qwen3_coder,
}


def call_grammar(tool_format: str, wanted: Wanted, special: Mapping[str, int]) -> str:
    """Returns the Lark grammar of an answer; behind its reasoning, where the format does not frame that too.

    Args:
        tool_format: a name of CALL_GRAMMARS.
        wanted: what may be called, and whether it must.
        special: the names of the tokenizer's special tokens, and their ids.

    Raises:
        UnwritableCallError: a function has a parameter that must be written and cannot.
    """
    lark = Lark(special)
    return lark.source(CALL_GRAMMARS[tool_format](lark, wanted))
