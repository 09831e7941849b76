"""What brings constraints into an engine: nothing before they are asked for, and the model's own vocabulary then."""

import importlib.util
import json
import subprocess
import sys
import threading

import numpy as np
import pytest
from numpy.typing import NDArray

from tokenspeed.device.handle import Grammar
from tokenspeed.grammar.pool import GrammarPool
from tokenspeed.launch.grammars import grammar_pool
from tokenspeed.messages import BadWords, Constraint, ConstraintError, Rule
from tokenspeed.recipes.model_config import read_model_config
from tokenspeed.recipes.resolved import ApiSettings, ModelSource, ResolvedConfig

END = 257


def config_of(vocab_size: int, structured_output: str = "llguidance") -> ResolvedConfig:
    random_config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "bos_token_id": 256,
        "eos_token_id": END,
    }
    return ResolvedConfig(
        name="r",
        served_name="r",
        model=ModelSource(kind="random", random_config=json.dumps(random_config)),
        api=ApiSettings(structured_output=structured_output),
    )


def outcome_of(pool: GrammarPool, rule: Rule) -> Grammar | ConstraintError:
    compilation, ticker = pool.compile(rule), threading.Event()
    while (found := compilation.outcome()) is None:
        ticker.wait(0.01)
    return found


def allowed_in(mask: NDArray[np.int32]) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize("vocab_size", [300, 1000])
def test_the_vocabulary_is_the_models(vocab_size: int) -> None:
    config = config_of(vocab_size)
    pool = grammar_pool(config, read_model_config(config.model))
    grammar = outcome_of(pool, Constraint(kind="regex", text="[a-z]+"))
    assert not isinstance(grammar, ConstraintError), grammar
    mask = np.zeros(-(-vocab_size // 32), np.int32)
    grammar.matcher().fill(mask)
    allowed = allowed_in(mask)
    assert set(b"abcxyz") <= allowed
    assert not allowed & {ord("A"), 256, END}
    assert max(allowed) < vocab_size
    pool.close()


def test_structured_output_may_be_off() -> None:
    config = config_of(300, "none")
    pool = grammar_pool(config, read_model_config(config.model))
    refused = outcome_of(pool, Constraint(kind="regex", text="a"))
    assert isinstance(refused, ConstraintError) and refused.code == "constraint_unavailable"
    grammar = outcome_of(pool, BadWords(words=("b",)))
    assert not isinstance(grammar, ConstraintError), "words need no library"
    mask = np.zeros(-(-300 // 32), np.int32)
    grammar.matcher().fill(mask)
    assert not allowed_in(mask) & {ord("b"), END} and {ord("a"), 299} <= allowed_in(mask)
    pool.close()


def test_a_missing_package_is_said_before_anything_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "llguidance" else find(name, *rest)
    )
    config = config_of(300)
    with pytest.raises(ValueError, match=r"llguidance is not installed.*structured_output=none"):
        grammar_pool(config, read_model_config(config.model))


def test_neither_compiler_nor_tokenizer_is_imported_before_the_first_constraint() -> None:
    program = (
        "import sys; import tokenspeed.launch.grammars, tokenspeed.engine.loop;"
        "print([name for name in ('llguidance', 'tokenizers', 'tokenspeed.frontend') if name in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "[]"


def test_the_checker_imports_no_torch() -> None:
    program = "import sys, tokenspeed.grammar.checker; print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "False"
