"""Compare measured steps with today's plan: a table on stdout, and a picture.

    python -m benchmarks.studies.plan_table [--allow-dirty] OUT.svg RESULT.json[:key=value] …

RESULT.json is a file of `python -m benchmarks plan-accuracy --out` on an H200; `:key=value` adds a choice that the file
does not record. The last column has the errors of the plan as it was when the row was measured, before any constant
was fitted to it. Results that were measured with uncommitted changes are refused, except those committed here already.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.pictures import draw
from benchmarks.record import read_result
from redline.errors import UsageError
from redline.hardware.machine import Machine
from redline.recipe.load import load
from redline.recipe.resolve import DataFacts, resolve

H200 = Machine("cuda", "NVIDIA H200", 150_109_880_320, 16, (9, 0), fast_bf16=True)


# Keys that a recipe has changed since its rows were measured.
_AS_MEASURED = {"quickstart": ("train.muon_steps=5",)}


def with_new_plan(row: dict[str, Any], more: list[str]) -> dict[str, Any]:
    """Return the row with today's plan and its errors."""
    name, *overrides = str(row["case"]).split()
    recipe = load(name, [*_AS_MEASURED.get(name, ()), *overrides, *more]).recipe
    facts = DataFacts(50257 if recipe.data.tokenizer == "gpt2" else 4096, 3_700_000, 190_000, "", "", "")
    plan = resolve(recipe, H200, facts).plan_event()
    planned = {"memory_gib": plan["memory_gib"]["peak"], "tokens_per_s": plan["throughput"]["tokens_per_s"]}
    errors = {f"{key}_error": value / row["measured"][key] - 1 for key, value in planned.items()}
    compiled = {"name": f"{row['case']} (compiled)"} if "model.kernels=torch" in more else {}
    return {**row, **compiled, "planned": planned, **errors, "planned_before": row.get("planned") or {}}


def table_line(row: dict[str, Any]) -> str:
    planned, measured = row["planned"], row["measured"]
    memory = f"{planned['memory_gib']:.1f} → {measured['memory_gib']:.1f} GiB ({row['memory_gib_error']:+.1%})"
    speed = f"{planned['tokens_per_s'] / 1e3:.0f}k → {measured['tokens_per_s'] / 1e3:.0f}k"
    before = ", ".join(error_before(row, key) for key in ("memory_gib", "tokens_per_s"))
    return f"| `{row['case']}` | {memory} | {speed} ({row['tokens_per_s_error']:+.1%}) | {before} |"


def error_before(row: dict[str, Any], key: str) -> str:
    """Return the error of the plan that was made before the row was measured; a dash if the file does not hold it."""
    planned, measured = row["planned_before"].get(key), row["measured"].get(key)
    return f"{planned / measured - 1:+.1%}" if planned and measured else "–"


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "--allow-dirty"]
    if len(words) < 2:
        sys.exit("usage: python -m benchmarks.studies.plan_table [--allow-dirty] OUT.svg RESULT.json[:key=value] …")
    rows, last = [], {}
    for word in words[1:]:
        name, _, more = word.partition(":")
        try:
            last = read_result(Path(name), allow_dirty=len(words) < len(sys.argv) - 1)
        except UsageError as error:
            sys.exit(error.message())
        rows += [with_new_plan(row, more.split() if more else []) for row in last["rows"] if "measured" in row]
    print("\n".join(map(table_line, rows)))
    picture = draw({**last, "benchmark": "plan-accuracy", "rows": rows})
    assert picture is not None, "none of the rows was measured"
    Path(words[0]).write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
