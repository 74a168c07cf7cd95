"""Draws committed results as one picture of tokens per second, or a race as curves of its loss.

usage: python -m benchmarks.studies.picture OUT.svg RESULT.json [RESULT.json …]

A result is one of `redline bench throughput --out`, or of pretrain_350m.py beside it; or a single one of `redline bench
time-to-loss --out`, of which the text with the most budgets is shown.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.pictures import draw
from redline.hardware.specs import spec_of


def rows_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    return list(result["rows"]) if "rows" in result else [_two_minutes(result)]


def _two_minutes(result: dict[str, Any]) -> dict[str, Any]:
    """The row of a run of pretrain_350m.py; its limit follows from its lock."""
    lock = result["lock"]
    precision, card = lock["recipe"]["train"]["precision"], spec_of(lock["machine"]["name"])
    peak = card.bf16 if card and precision == "bf16" else None
    return {
        "name": "redline",
        **{key: result[key] for key in ("tokens_per_s", "mfu")},
        "precision": precision,
        "ceiling_tokens_per_s": peak / lock["flops_per_token"]["causal"] if peak else None,
    }


def about(result: dict[str, Any]) -> dict[str, Any]:
    """What the first result says of the machine and the code."""
    lock = result.get("lock") or {}
    if "created" in lock:
        lock = {"date": time.strftime("%Y-%m-%d", time.gmtime(lock["created"])), **lock}
    shared = {key: result.get(key) or lock.get(key) for key in ("date", "machine", "versions", "git")}
    return {"benchmark": "throughput", "recipe": result.get("recipe") or lock.get("recipe_name"), **shared}


def on_one_text(race: dict[str, Any]) -> dict[str, Any]:
    """Its budgets side by side; another text would be a panel that looks like one more budget."""
    texts = [table["data"]["fingerprint"] for table in race["comparison"]]
    most = max(texts, key=texts.count, default=None)
    return {**race, "comparison": [table for table in race["comparison"] if table["data"]["fingerprint"] == most]}


def drawn(results: list[dict[str, Any]]) -> str | None:
    names = {about(result)["machine"]["name"] for result in results}
    if len(names) > 1:
        sys.exit(f"one machine a picture, not {' and '.join(sorted(names))}")
    races = [result for result in results if result.get("benchmark") == "time-to-loss"]
    if races and len(results) > 1:
        sys.exit("a race is drawn alone: it has curves, and the others have bars")
    if races:
        return draw(on_one_text(races[0]))
    return draw({**about(results[0]), "rows": [row for result in results for row in rows_of(result)]})


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(f"usage:{(__doc__ or '').partition('usage:')[2].splitlines()[0]}")
    try:
        results = [json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[2:]]
    except (OSError, ValueError) as error:
        sys.exit(f"a result cannot be read: {error}. Name files that `redline bench throughput --out` wrote.")
    try:
        svg = drawn(results)
    except (KeyError, TypeError, AttributeError):
        sys.exit("a result is not whole. Name what `redline bench throughput` or `time-to-loss` wrote with --out.")
    if svg is None:
        sys.exit("there is no figure to draw in these results")
    Path(sys.argv[1]).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
