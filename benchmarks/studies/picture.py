"""Plot committed results: tokens per second as bars, or the loss curves of `time-to-loss`.

usage: python -m benchmarks.studies.picture [--allow-dirty] OUT.svg RESULT.json [RESULT.json …]

RESULT.json is a file of `redline bench throughput --out` or of pretrain_350m.py in this folder, or a single file of
`python -m benchmarks time-to-loss --out`, from which the text with the most budgets is plotted. Results that were
measured with uncommitted changes are refused, except those that are committed here already, and marked.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.pictures import draw
from benchmarks.record import read_result
from benchmarks.time_to_loss import compare, with_current_names
from redline.errors import UsageError
from redline.hardware.specs import spec_of


def rows_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    return list(result["rows"]) if "rows" in result else [_row_of_pretrain_350m(result)]


def _row_of_pretrain_350m(result: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a run of pretrain_350m.py; its upper limit follows from its lock."""
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
    """Return the date, machine, versions and commit of a result."""
    lock = result.get("lock") or {}
    if "created" in lock:
        lock = {"date": time.strftime("%Y-%m-%d", time.gmtime(lock["created"])), **lock}
    shared = {key: result.get(key) or lock.get(key) for key in ("date", "machine", "versions", "git")}
    return {"benchmark": "throughput", "recipe": result.get("recipe") or lock.get("recipe_name"), **shared}


def on_one_text(race: dict[str, Any]) -> dict[str, Any]:
    """Keep the tables of one text: a table of another text would look like one more budget."""
    rows = with_current_names(race["rows"])
    tables = compare(rows)
    texts = [table["data"]["fingerprint"] for table in tables]
    most = max(texts, key=texts.count, default=None)
    return {**race, "rows": rows, "comparison": [table for table in tables if table["data"]["fingerprint"] == most]}


def plot_results(results: list[dict[str, Any]]) -> str | None:
    """Return the SVG, or None if the results hold nothing to plot."""
    names = {about(result)["machine"]["name"] for result in results}
    if len(names) > 1:
        sys.exit(f"The results are of several machines ({', '.join(sorted(names))}). Use one machine per picture.")
    races = [result for result in results if result.get("benchmark") == "time-to-loss"]
    if races and len(results) > 1:
        sys.exit("A time-to-loss result has curves, other results have bars. Plot it on its own.")
    if races:
        return draw(on_one_text(races[0]))
    return draw({**about(results[0]), "rows": [row for result in results for row in rows_of(result)]})


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "--allow-dirty"]
    if len(words) < 2:
        sys.exit(f"usage:{(__doc__ or '').partition('usage:')[2].splitlines()[0]}")
    try:
        results = [read_result(Path(name), allow_dirty=len(words) < len(sys.argv) - 1) for name in words[1:]]
    except UsageError as error:
        sys.exit(error.message())
    except (OSError, ValueError) as error:
        sys.exit(f"Cannot read a result: {error}. RESULT.json is a file that `redline bench throughput --out` wrote.")
    try:
        svg = plot_results(results)
    except (KeyError, TypeError, AttributeError):
        sys.exit(
            "A result lacks some keys. RESULT.json is a file that `redline bench throughput` or `time-to-loss` wrote."
        )
    if svg is None:
        sys.exit("These results hold no figures to plot.")
    Path(words[0]).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
