"""Make a second training and validation split from the same tokens, to check settings tuned on the first split.

    python -m benchmarks.studies.other_text SOURCE OUT

SOURCE/train.bin holds GPT-2 tokens, with 50256 before each document. The first third is dropped, the last documents
(about 700,000 tokens) become OUT/val.bin, and the rest becomes OUT/train.bin.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from benchmarks.studies.runs import run_main

END = 50256
HELD_OUT = 700_000  # tokens, at least


def document_before(tokens: np.ndarray, position: int) -> int:
    """Return the start of the document that contains `position`."""
    starts = np.flatnonzero(tokens[: position + 1] == END)
    if not starts.size:
        sys.exit(f"There is no token {END} before position {position}. SOURCE/train.bin must hold GPT-2 tokens.")
    return int(starts[-1])


def split(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the training and the validation tokens."""
    if len(tokens) < 3 * HELD_OUT:
        sys.exit(f"{len(tokens):,} tokens are too few to hold {HELD_OUT:,} out.")
    last = document_before(tokens, len(tokens) - HELD_OUT)
    return tokens[document_before(tokens, len(tokens) // 3) : last], tokens[last:]


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: python -m benchmarks.studies.other_text SOURCE OUT")
    source, out = Path(sys.argv[1]) / "train.bin", Path(sys.argv[2])
    if not source.is_file():
        sys.exit(f"{source} does not exist.")
    if out.exists():
        sys.exit(f"{out} already exists. Choose another folder.")
    train, val = split(np.fromfile(source, dtype=np.uint16))
    out.mkdir(parents=True)
    train.tofile(out / "train.bin")
    val.tofile(out / "val.bin")
    print(f"{out}: {len(train):,} training and {len(val):,} validation tokens")


if __name__ == "__main__":
    run_main(main)
