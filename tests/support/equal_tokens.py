"""What "equal tokens" means, said once for every test that compares generations.

Under the determinism objective tokens are bit-equal whatever else runs. Between two implementations they are equal up
to the first position where the reference's two best logits lie within a margin that the dtype's rounding explains;
there the other token must be one of those within the margin, and the comparison goes on with the reference's token.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Generate = Callable[[list[int], int], list[int]]
"""Greedy generation: (prompt, count) to tokens."""


def assert_greedy_equal(
    generate: Generate,
    prompt: Sequence[int],
    reference_tokens: Sequence[int],
    reference_logits: NDArray[np.float32],
    margin: float,
) -> int:
    """Asserts that ``generate`` continues ``prompt`` as the reference did; returns at how many positions logits tied.

    ``reference_logits`` [len(reference_tokens), vocabulary] are those from which each reference token was taken.
    """
    greedy = reference_logits.argmax(axis=-1).tolist()
    assert greedy == list(reference_tokens), "the reference's tokens are not its own greedy ones"
    done, ties = 0, 0
    while done < len(reference_tokens):
        ours = generate([*prompt, *reference_tokens[:done]], len(reference_tokens) - done)
        theirs = list(reference_tokens[done:])
        if ours == theirs:
            return ties
        at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours))
        assert at < len(ours), f"generation ended after {done + at} of {len(reference_tokens)} tokens"
        logits = reference_logits[done + at]
        gap = float(logits.max() - logits[ours[at]])
        assert gap <= margin, (
            f"token {done + at}: {ours[at]} instead of {theirs[at]}, whose logit is {gap:.5f} larger (margin {margin})"
        )
        ties += 1
        done += at + 1
    return ties
