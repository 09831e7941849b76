"""How often rounding leaves the most probable token as it was, teacher-forced over our own documents.

    python scripts/measure_agreement.py FILE.gguf|FOLDER [--tokens 4096] [--activations int16 int8]
                                        [--caches float8_e4m3]

Rounded activations over a float32 cache, and exact ones over rounded caches, each beside exact activations over a
float32 cache: at how many positions the best token is the same, and how
far apart the two best were at the others. The text is tokenised by the model's own tokenizer.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests/support"))

from plan_maker import Request, groups_of, run  # type: ignore[import-not-found]  # noqa: E402
from tiny_models import build, resolved  # type: ignore[import-not-found]  # noqa: E402

from tokenspeed.frontend.text_assets import load_text_assets  # noqa: E402
from tokenspeed.messages import SamplingParameters  # noqa: E402
from tokenspeed.recipes.resolved import ModelSource  # noqa: E402

TEXTS = ("docs/architecture.md", "docs/deploying.md", "docs/design/scheduler.md")
LENGTH = 1024  # tokens of one sequence
Best = tuple[NDArray[np.int32], NDArray[np.float32]]


def best_tokens(source: ModelSource, ids: list[int], activations: str, cache: str = "float32") -> Best:
    """The best token of each position but each sequence's last, and how far the second lies behind it."""
    config = resolved(source, max_len=LENGTH + 64, chunk=256, kv_dtype=cache, activations=activations)
    device = build(config.model_copy(update={"threads": 0}))
    tokens: list[int] = []
    margins: list[float] = []

    def watch(plan: object, result: object) -> None:
        del plan
        for part in result.prompt_logprobs.values():  # type: ignore[attr-defined]
            for token in part.tokens:
                order = np.argsort(token.top_logprobs)[::-1]
                tokens.append(int(token.top_ids[order[0]]))
                margins.append(float(token.top_logprobs[order[0]] - token.top_logprobs[order[1]]))

    try:
        for start in range(0, len(ids), LENGTH):
            sampling = SamplingParameters(top_k=1, prompt_logprobs=2)
            request = Request(prompt=ids[start : start + LENGTH], row=1, max_new_tokens=1, chunk=256, sampling=sampling)
            run(device.handle, [request], granularity=16, groups=groups_of(device.specs), watch=watch)
    finally:
        device.handle.shutdown()
    return np.array(tokens, np.int32), np.array(margins, np.float32)


def main() -> None:
    """Prints a line for each kind of activations and each cache."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--activations", nargs="*", default=["bfloat16", "int16", "int8"])
    parser.add_argument("--caches", nargs="*", default=["bfloat16", "float16", "float8_e4m3"])
    arguments = parser.parse_args()
    source = ModelSource(kind="folder" if arguments.model.is_dir() else "gguf", path=str(arguments.model.absolute()))
    text = "\n".join((ROOT / name).read_text("utf-8") for name in TEXTS)
    ids = list(load_text_assets(source).tokenizer.encode(text, False))[: arguments.tokens]
    expected, margins = best_tokens(source, ids, "float32")
    kinds = [(activations, "float32") for activations in arguments.activations]
    kinds += [("float32", cache) for cache in arguments.caches]
    for activations, cache in kinds:
        same = best_tokens(source, ids, activations, cache)[0] == expected
        others = margins[~same] if not same.all() else np.zeros(1, np.float32)
        print(
            f"activations {activations:9} cache {cache:12} {same.mean():.2%} of {same.size} positions; the others "
            f"{others.mean():.2f} apart on average, {others.max():.2f} at most",
            flush=True,
        )


if __name__ == "__main__":
    main()
