"""Merges for vocabularies that only rank their tokens, as tiktoken and SentencePiece files do.

Both join, again and again, the two neighbours whose union ranks first. A library that wants pairs gets every pair that
makes a token, in the order of the tokens they make.
"""

from collections.abc import Iterable


def merges_of(ranked: Iterable[str], known: frozenset[str]) -> list[tuple[str, str]]:
    """Returns the pairs out of ``known`` that make a token, for each of ``ranked``, best first.

    The shorter left part comes first, so that equal ranks are taken from the left.
    """
    return [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
