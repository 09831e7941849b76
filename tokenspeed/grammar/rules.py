"""Compiles every kind of rule for one vocabulary, and what each kind needs when it is first asked for."""

from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING

from tokenspeed.grammar.budget import CompiledBudget
from tokenspeed.grammar.delay import free_mask
from tokenspeed.grammar.vocabulary import Vocabulary
from tokenspeed.grammar.words import CompiledWords, TokenIndex
from tokenspeed.messages import BadWords, ConstraintError, Rule, ThinkingBudget

if TYPE_CHECKING:
    from tokenspeed.grammar.checker import CheckedCompiler
    from tokenspeed.grammar.llguidance_compiler import CompiledGrammar


class RuleCompiler:
    """See tokenspeed.grammar.pool.Compiler. ``constrains`` false refuses constraints; the other rules need no library
    for them."""

    def __init__(self, vocabulary: Vocabulary, *, constrains: bool) -> None:
        self._vocabulary = vocabulary
        self._constrains = constrains
        self._free = free_mask(len(vocabulary.tokens), vocabulary.ends)
        self._making = Lock()

    def compile(self, rule: Rule) -> "CompiledGrammar | CompiledWords | CompiledBudget":
        """Returns the rule, compiled; raises ConstraintError where that cannot be."""
        if isinstance(rule, ThinkingBudget):
            return CompiledBudget(rule, self._vocabulary, self._free)
        if isinstance(rule, BadWords):
            with self._making:
                index = self._index
            return CompiledWords(index, [word.encode("utf-8", "surrogatepass") for word in rule.words], self._free)
        if not self._constrains:
            raise ConstraintError("structured output is off (api.structured_output)", "constraint_unavailable")
        with self._making:
            constraints = self._constraints
        return constraints.compile(rule)

    def close(self) -> None:
        """Ends what was started for it."""
        if "_constraints" in self.__dict__:
            self._constraints.close()

    @cached_property
    def _index(self) -> TokenIndex:
        return TokenIndex(self._vocabulary)

    @cached_property
    def _constraints(self) -> "CheckedCompiler":
        from tokenspeed.grammar.checker import CheckedCompiler  # its library may be missing where nothing constrains

        return CheckedCompiler(self._vocabulary)
