"""Extrapolate the final loss of a long run from short runs by a power law, with the range that fits the data.

    python -m benchmarks.studies.expect [--allow-dirty] RACE.json TOKENS [ARM] [key=value …]

Read the rows of one arm of `python -m benchmarks time-to-loss` at several budgets, each trained with a schedule that
ends with its budget, and fit `loss = floor + a·tokens^−b`. Many floors fit: keep each one whose curve is within the
noise between seeds of every row, and print the range of their predictions. It is an estimate.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.record import read_result
from benchmarks.time_to_loss import with_current_names
from redline.errors import UsageError
from redline.recipe.load import current_name

SEED_NOISE = 0.03  # nats: half the range of three seeds
MIN_BUDGETS = 3  # two points fit any floor
FLOOR_STEP = 0.05
MIN_FLOOR = 1.7  # Hoffmann et al. (2022) found 1.69 for text, with tokens of about the same length


def points(result: dict[str, Any], arm: str, words: list[str]) -> list[tuple[float, float]]:
    """Return (tokens, final loss) of each row that has these overrides, by tokens."""
    named = with_current_names(result["rows"])
    rows = [row for row in named if row["arm"] == current_name(arm) and "error" not in row]
    rows = [row for row in rows if set(words) <= set(row["overrides"])]
    if len({tuple(row["overrides"]) for row in rows}) > 1:
        sys.exit("These rows have several settings. Add key=value words that only one setting has.")
    return sorted((float(row["tokens"]), float(row["final_loss"])) for row in rows)


def fit_line(floor: float, known: list[tuple[float, float]]) -> tuple[float, float]:
    """Return slope and intercept of log(loss − floor) over log(tokens), by least squares."""
    pairs = [(math.log(tokens), math.log(loss - floor)) for tokens, loss in known]
    x = sum(x for x, _ in pairs) / len(pairs)
    y = sum(y for _, y in pairs) / len(pairs)
    slope = sum((a - x) * (b - y) for a, b in pairs) / sum((a - x) ** 2 for a, _ in pairs)
    return slope, y - slope * x


def curves(known: list[tuple[float, float]]) -> Iterator[tuple[float, float, float]]:
    """Yield floor, slope and intercept of each curve that is close enough to all points."""
    lowest = min(loss for _, loss in known)
    for number in range(int((lowest - MIN_FLOOR) / FLOOR_STEP)):
        floor = MIN_FLOOR + number * FLOOR_STEP
        slope, intercept = fit_line(floor, known)
        error = max(abs(floor + math.exp(intercept + slope * math.log(tokens)) - loss) for tokens, loss in known)
        if error <= SEED_NOISE:
            yield floor, slope, intercept


def main() -> None:
    given = [word for word in sys.argv[1:] if word != "--allow-dirty"]
    if len(given) < 2:
        sys.exit("usage: python -m benchmarks.studies.expect [--allow-dirty] RACE.json TOKENS [ARM] [key=value …]")
    file, tokens, *rest = given
    arm, words = next((word for word in rest if "=" not in word), "pretrain-350m"), [w for w in rest if "=" in w]
    try:
        known = points(read_result(Path(file), allow_dirty=len(given) < len(sys.argv) - 1), arm, words)
        log_tokens = math.log(float(tokens))
    except UsageError as error:
        sys.exit(error.message())
    except (OSError, ValueError, KeyError) as error:
        sys.exit(
            f"{error}. RACE.json is a file of `python -m benchmarks time-to-loss --out`; TOKENS is above 0, like 1e9."
        )
    budgets = len({tokens for tokens, _ in known})
    if budgets < MIN_BUDGETS:
        sys.exit(f"{file} has {arm} at {budgets} budgets. A power law with a floor needs {MIN_BUDGETS} or more.")
    print("  ".join(f"{tokens / 1e6:.1f}M → {loss:.3f}" for tokens, loss in known))
    fits = [(floor + math.exp(b + slope * log_tokens), floor, -slope) for floor, slope, b in curves(known)]
    if not fits:
        sys.exit("No power law is close enough to these rows.")
    for loss, floor, power in (min(fits), max(fits)):
        print(f"{loss:.2f} after {float(tokens) / 1e9:.2f}B tokens: floor {floor:.2f}, power {power:.2f}")


if __name__ == "__main__":
    main()
