"""What a grammar has to know of a model's tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model, from id 0 up to the width of its logits.

    Attributes:
        tokens: the bytes each token adds to a text; b"" for ids without a meaning (the padding of the logits).
        special: ids that steer and are no text: no constraint but one that names them ever lets them through.
        ends: the model's own end tokens.
        encode: text to ids as the model was trained on them, special tokens not looked for; a constraint that leaves
            one way to go on has it spelled in these tokens.
    """

    tokens: Sequence[bytes]
    special: frozenset[int]
    ends: tuple[int, ...]
    encode: Callable[[str], list[int]]
