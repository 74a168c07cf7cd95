"""A second text out of the same tokens, to see whether what was tuned on one validation split holds on another.

    python -m benchmarks.studies.other_text SOURCE OUT

SOURCE/train.bin holds GPT-2 tokens, each document after its 50256. Its first third is left away, its last documents
(some 700,000 tokens) become OUT/val.bin, and what is between OUT/train.bin.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from benchmarks.studies.runs import said

END = 50256
HELD_OUT = 700_000  # tokens, at least


def document_before(tokens: np.ndarray, position: int) -> int:
    """Where the document begins that `position` is in."""
    found = np.flatnonzero(tokens[: position + 1] == END)
    if not found.size:
        sys.exit("No document begins there: is this a train.bin of GPT-2 tokens?")
    return int(found[-1])


def split(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Training and validation tokens."""
    if len(tokens) < 3 * HELD_OUT:
        sys.exit(f"{len(tokens):,} tokens are too few to hold {HELD_OUT:,} out.")
    last = document_before(tokens, len(tokens) - HELD_OUT)
    return tokens[document_before(tokens, len(tokens) // 3) : last], tokens[last:]


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: python -m benchmarks.studies.other_text SOURCE OUT")
    source, out = Path(sys.argv[1]) / "train.bin", Path(sys.argv[2])
    if not source.is_file():
        sys.exit(f"{source} is not there.")
    if out.exists():
        sys.exit(f"{out} is there already. Choose another folder.")
    train, val = split(np.fromfile(source, dtype=np.uint16))
    out.mkdir(parents=True)
    train.tofile(out / "train.bin")
    val.tofile(out / "val.bin")
    print(f"{out}: {len(train):,} training and {len(val):,} validation tokens")


if __name__ == "__main__":
    said(main)
