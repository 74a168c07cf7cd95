"""What a long run may end at, by short ones: a power law through final losses, and how little it is held.

    python -m benchmarks.studies.expect RACE.json TOKENS [ARM] [key=value …]

Takes the rows of one arm of `python -m benchmarks time-to-loss` at several budgets, each with
its schedule fitted to it, and puts `loss = floor + a·tokens^−b` through them. Every floor whose curve misses no row by
more than seeds differ is as good as another: the answer is the range they give, and it is an estimate.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SEEDS_DIFFER = 0.03  # half of what lies between the lowest and the highest of three seeds
FEWEST = 3  # budgets: two fit any floor
STEP = 0.05  # from floor to floor
LEAST = 1.7  # no floor lies below: Hoffmann et al. (2022) found 1.69 for text, of tokens that are about as long


def points(result: dict[str, Any], arm: str, words: list[str]) -> list[tuple[float, float]]:
    """Tokens and final loss, the fewest tokens first."""
    rows = [row for row in result["rows"] if row["arm"] == arm and "error" not in row]
    found = [row for row in rows if set(words) <= set(row["overrides"])]
    if len({tuple(row["overrides"]) for row in found}) > 1:
        sys.exit("these rows are of several settings. Name the words that only one of them has.")
    return sorted((float(row["tokens"]), float(row["final_loss"])) for row in found)


def line(floor: float, known: list[tuple[float, float]]) -> tuple[float, float]:
    """Slope and height of log(loss − floor) over log(tokens), by least squares."""
    pairs = [(math.log(tokens), math.log(loss - floor)) for tokens, loss in known]
    x = sum(x for x, _ in pairs) / len(pairs)
    y = sum(y for _, y in pairs) / len(pairs)
    slope = sum((a - x) * (b - y) for a, b in pairs) / sum((a - x) ** 2 for a, _ in pairs)
    return slope, y - slope * x


def curves(known: list[tuple[float, float]]) -> Iterator[tuple[float, float, float]]:
    """Floor, slope and height of each that passes all points closely enough."""
    lowest = min(loss for _, loss in known)
    for number in range(int((lowest - LEAST) / STEP)):
        floor = LEAST + number * STEP
        slope, height = line(floor, known)
        missed = max(abs(floor + math.exp(height + slope * math.log(tokens)) - loss) for tokens, loss in known)
        if missed <= SEEDS_DIFFER:
            yield floor, slope, height


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit("usage: python -m benchmarks.studies.expect RACE.json TOKENS [ARM] [key=value …]")
    file, tokens, *rest = sys.argv[1:]
    arm, words = next((word for word in rest if "=" not in word), "pretrain-350m"), [w for w in rest if "=" in w]
    try:
        known, far = points(json.loads(Path(file).read_text(encoding="utf-8")), arm, words), math.log(float(tokens))
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"{error}: name a file of `python -m benchmarks time-to-loss --out`, and tokens above 0, as 1e9.")
    if len({tokens for tokens, _ in known}) < FEWEST:
        sys.exit(f"{arm} has rows at {len(known)} budgets there; a power law with a floor needs three or more.")
    print("  ".join(f"{tokens / 1e6:.1f}M → {loss:.3f}" for tokens, loss in known))
    found = [(floor + math.exp(height + slope * far), floor, -slope) for floor, slope, height in curves(known)]
    if not found:
        sys.exit("no power law passes these rows closely enough.")
    for loss, floor, power in (min(found), max(found)):
        print(f"{loss:.2f} after {float(tokens) / 1e9:.2f}B tokens: floor {floor:.2f}, power {power:.2f}")


if __name__ == "__main__":
    main()
