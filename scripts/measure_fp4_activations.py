"""How often activations of four bits leave the most probable token as weights of four bits alone have it.

    python scripts/measure_fp4_activations.py FILE.gguf [--tokens 2048] [--formats NVFP4 MXFP4]

The model of a llama's GGUF file is dequantised, each layer's linears are quantised to four bits by plain rounding, and
the engine runs both: with activations as they are (W4A16's stand-in: float32) and in four bits (W4A4), teacher-forced
over our own documents. Also printed: how often weights of four bits alone leave the file's own best token.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]

from quantised_checkpoints import FORMATS, quantise_checkpoint  # type: ignore[import-not-found]  # noqa: E402

from scripts.measure_agreement import TEXTS, best_tokens  # noqa: E402
from tokenspeed.frontend.text_assets import load_text_assets  # noqa: E402
from tokenspeed.recipes.resolved import ModelSource  # noqa: E402


@dataclass(frozen=True)
class Agreement:
    """Of one format: shares of positions with the same best token, and how far apart the two best lay at the others.

    Attributes:
        weights: weights of four bits against the file's.
        activations: activations of four bits against them as they are, weights of four bits in both.
        mean_margin, most_margin: of the log-probabilities where activations changed the best token.
        positions: how many were compared.
    """

    weights: float
    activations: float
    mean_margin: float
    most_margin: float
    positions: int


def dense_checkpoint(file: Path, folder: Path) -> Path:
    """The file's model in float32, as a folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
    # it calls itself quantised, for where it came from, and would not be saved so
    config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    twin = transformers.AutoModelForCausalLM.from_config(config, dtype="float32")  # type: ignore[no-untyped-call]
    twin.load_state_dict(model.state_dict())
    twin.save_pretrained(folder)
    return folder


def agreements(model: Path, names: Sequence[str], tokens: int) -> Iterator[tuple[str, Agreement]]:
    """Each format's, of the first ``tokens`` of the texts."""
    tokenizer = load_text_assets(ModelSource(kind="gguf", path=str(model.absolute()))).tokenizer
    text = "\n".join((ROOT / name).read_text("utf-8") for name in TEXTS)
    ids = list(tokenizer.encode(text, False))[:tokens]
    with tempfile.TemporaryDirectory() as scratch:
        dense = dense_checkpoint(model, Path(scratch) / "dense")
        whole, _ = best_tokens(ModelSource(kind="folder", path=str(dense)), ids, "float32")
        for name in names:
            folder = Path(shutil.copytree(dense, Path(scratch) / name))
            quantise_checkpoint(folder, FORMATS[name])
            source = ModelSource(kind="folder", path=str(folder))
            weights, margins = best_tokens(source, ids, "float32")
            same = best_tokens(source, ids, "fp4")[0] == weights
            others = margins[~same]
            yield (
                name,
                Agreement(
                    float((weights == whole).mean()),
                    float(same.mean()),
                    float(others.mean()) if others.size else 0.0,
                    float(np.max(others, initial=0.0)),
                    same.size,
                ),
            )


def main() -> None:
    """Prints two lines a format."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--formats", nargs="+", choices=("NVFP4", "MXFP4"), default=["NVFP4", "MXFP4"])
    arguments = parser.parse_args()
    for name, found in agreements(arguments.model, arguments.formats, arguments.tokens):
        print(f"{name}: weights of four bits keep {found.weights:.2%} of the file's best tokens")
        print(
            f"{name}: W4A4 keeps {found.activations:.2%} of {found.positions} best tokens of W4A16; at the others the "
            f"two best lay {found.mean_margin:.2f} apart on average, {found.most_margin:.2f} at most",
            flush=True,
        )


if __name__ == "__main__":
    main()
