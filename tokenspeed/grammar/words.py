"""Words that an answer may not hold, whatever tokens spell them.

All words of a request are one automaton over bytes (Aho and Corasick, "Efficient string matching: an aid to
bibliographic search", 1975): its state is the longest end of the text so far that begins a word. A token would complete
a word if it holds one whole, or if it begins with what is left of a word behind such an end. In a vocabulary sorted by
bytes the tokens that begin alike lie side by side, so a state's tokens are a few ranges of it.
"""

import itertools
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tokenspeed.grammar.vocabulary import Vocabulary

_BETWEEN = b"\xff"
"""Stands in no text in UTF-8, so that no word is found across two tokens."""


class TokenIndex:
    """The tokens of a vocabulary that are text, by their bytes. Special tokens are no text: no word is looked for in
    them, and what they stand between counts as one text, since clients are not shown them.

    Attributes:
        tokens: the bytes of each token, b"" for those that are no text.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        special = vocabulary.special
        self.tokens = [b"" if token in special else text for token, text in enumerate(vocabulary.tokens)]
        order = sorted((token for token, text in enumerate(self.tokens) if text), key=self.tokens.__getitem__)
        self._order = np.array(order, np.int64)
        self._sorted = [self.tokens[token] for token in order]
        self._joined = _BETWEEN.join(self._sorted)
        ends = itertools.accumulate(len(text) + len(_BETWEEN) for text in self._sorted)
        self._begins = [0, *ends]

    def beginning_with(self, text: bytes) -> slice:
        """Places in the sorted vocabulary of the tokens that begin with ``text``, which does not end with 0xFF."""
        behind = text[:-1] + bytes((text[-1] + 1,))
        return slice(bisect_left(self._sorted, text), bisect_left(self._sorted, behind))

    def holding(self, texts: Sequence[bytes]) -> NDArray[np.int64]:
        """Places of the tokens in which one of ``texts`` stands; each is looked at once, however many hold it."""
        pattern, places = re.compile(b"|".join(map(re.escape, texts))), []
        found = pattern.search(self._joined)
        while found is not None:
            places.append(bisect_right(self._begins, found.start()) - 1)
            found = pattern.search(self._joined, self._begins[places[-1] + 1])
        return np.array(places, np.int64)

    def mask(self, places: Sequence[slice | NDArray[np.int64]]) -> NDArray[np.int32]:
        """int32 [ceil(V / 32)], bit t % 32 of word t // 32 clear where token t is at one of the places."""
        flags = np.ones(-(-len(self.tokens) // 32) * 32, np.bool_)
        for some in places:
            flags[self._order[some]] = False
        return np.packbits(flags, bitorder="little").view(np.int32)


class CompiledWords:
    """The automaton of one list of words. Node 0 is the empty text."""

    def __init__(self, index: TokenIndex, words: Sequence[bytes], free: NDArray[np.int32]) -> None:
        """``free`` int32 [ceil(V / 32)]: the mask of a text that nothing constrains."""
        self.index = index
        self.free = free
        self._next: list[dict[int, int]] = [{}]
        self._shorter: list[int] = [0]
        self._places: list[list[slice]] = [[]]  # of the tokens that complete a word which this node begins
        for word in words:
            self._add(word)
        self._link()
        self._never = index.mask([index.holding(words)])

    def step(self, node: int, token: int) -> int:
        """The node behind ``token``."""
        for byte in self.index.tokens[token]:
            while node and byte not in self._next[node]:
                node = self._shorter[node]
            node = self._next[node].get(byte, 0)
        return node

    def narrow(self, node: int, mask: NDArray[np.int32]) -> None:
        """Clears the bits of the tokens that would complete a word at ``node``."""
        np.bitwise_and(mask, self._never, out=mask)
        places: list[slice] = []
        while node:
            places += self._places[node]
            node = self._shorter[node]
        if places:
            np.bitwise_and(mask, self.index.mask(places), out=mask)

    def _add(self, word: bytes) -> None:
        node = 0
        for at, byte in enumerate(word):
            if node:
                places = self.index.beginning_with(word[at:])
                if places.start < places.stop:
                    self._places[node].append(places)
            found = self._next[node].get(byte)
            if found is None:
                found = self._next[node][byte] = len(self._next)
                self._next.append({})
                self._shorter.append(0)
                self._places.append([])
            node = found

    def _link(self) -> None:
        """Each node learns the longest shorter end of its text that begins a word, nodes of short texts first."""
        level = list(self._next[0].values())
        while level:
            deeper: list[int] = []
            for node in level:
                for byte, below in self._next[node].items():
                    shorter = self._shorter[node]
                    while shorter and byte not in self._next[shorter]:
                        shorter = self._shorter[shorter]
                    self._shorter[below] = self._next[shorter].get(byte, 0)
                    deeper.append(below)
            level = deeper


class WordsMatcher:
    """Where the text of one choice is among the words."""

    def __init__(self, words: CompiledWords) -> None:
        self._words = words
        self._node = 0

    def narrow(self, mask: NDArray[np.int32]) -> None:
        """Clears the bits of the tokens that would complete a word."""
        self._words.narrow(self._node, mask)

    def accept(self, token: int) -> None:
        """The choice goes on with ``token``."""
        self._node = self._words.step(self._node, token)
