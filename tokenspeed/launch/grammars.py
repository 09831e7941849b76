"""Brings rules of answers into an engine process: what compiles them, and the vocabulary read at their first use."""

import importlib.util
from collections.abc import Callable

from tokenspeed.grammar.pool import Compiler, GrammarPool
from tokenspeed.recipes.model_config import ModelConfig
from tokenspeed.recipes.resolved import ResolvedConfig


def grammar_pool(config: ResolvedConfig, model: ModelConfig) -> GrammarPool:
    """Returns what compiles rules; where structured output is off it refuses constraints.

    Raises ValueError where the package that constraints need is not installed: better now than at the first request.
    """
    if config.api.structured_output != "none" and importlib.util.find_spec("llguidance") is None:
        raise ValueError(
            "api.structured_output is llguidance, and the package llguidance is not installed; install it "
            "(it comes with tokenspeed-appliance[cpu]) or set api.structured_output=none"
        )
    return GrammarPool(_loader(config, model))


def _loader(config: ResolvedConfig, model: ModelConfig) -> Callable[[], Compiler]:
    def load() -> Compiler:
        # Here and not above: neither the libraries nor the tokens take memory before somebody asks for rules.
        from tokenspeed.frontend.text_assets import load_text_assets
        from tokenspeed.grammar.rules import RuleCompiler
        from tokenspeed.grammar.vocabulary import Vocabulary

        tokenizer = load_text_assets(config.model).tokenizer
        size = model.vocab_size
        known = min(size, tokenizer.vocab_size)
        return RuleCompiler(
            Vocabulary(
                tokens=[*(tokenizer.token_bytes(token) for token in range(known)), *[b""] * (size - known)],
                special=frozenset(token for token in tokenizer.special_ids if token < known),
                ends=tuple(model.eos_token_ids),
                encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
            ),
            constrains=config.api.structured_output != "none",
        )

    return load
