"""Learns the pieces of tokenspeed/frontend/smoke_pieces.txt from this project's documents.

python scripts/make_smoke_pieces.py        # rarely: a change of the pieces changes the prompts of every smoke profile
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parent.parent
PIECES = 256
"""As many as the smallest set of special tokens leaves room for, and a few more."""


def main() -> None:
    texts = [path.read_text("utf-8") for path in sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=len(alphabet) + PIECES, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    lines = [" ".join(merge) for merge in merges]
    target = ROOT / "tokenspeed" / "frontend" / "smoke_pieces.txt"
    target.write_text("\n".join(lines) + "\n", "utf-8")
    print(f"{target}: {len(lines)} pieces")


if __name__ == "__main__":
    main()
