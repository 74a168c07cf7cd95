"""When each arm passes the loss that the baseline ends with."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from redline.bench.arms import BASELINE, key_of
from redline.bench.curve import seconds_to

Row = dict[str, Any]
Entry = dict[str, Any]

ANCHORS_DIFFER = 0.03
# what a table's own key tells of all its rows
_OF_THE_TABLE = {
    *(f"data.{key}" for key in ("source", "tokenizer", "val_fraction", "text_key", "dedup", "seq_len")),
    *(f"data.{key}" for key in ("pack", "shuffle")),
    "eval.sequences",
    "train.device",
}
Key = tuple[float, str, int, int, bool, bool]
Lost = dict[tuple[Any, ...], int]


def compare(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A table for each budget, text and way of evaluating that has a baseline; the shortest budget first."""
    tables = {table_of(row): None for row in rows if row["arm"] == BASELINE and "error" not in row}
    return [table for key in sorted(tables) if (table := _table(key, rows)) is not None]


def table_of(row: Row) -> Key:
    """Losses are comparable, and learnt in the same order, within one of these."""
    recipe, facts = row["lock"]["recipe"], row["lock"]["data"]
    data = recipe["data"]
    evaluated = data["seq_len"], recipe["eval"]["sequences"]
    return row["budget_s"], facts["fingerprint"], *evaluated, data.get("pack", False), data.get("shuffle", True)


def _table(key: Key, rows: Sequence[Row]) -> dict[str, Any] | None:
    """None where no baseline has a curve for each of its seeds."""
    budget, _, seq_len, sequences, *_ = key
    text = [row for row in rows if "lock" in row and table_of(row)[1:] == key[1:]]
    lost = _lost(rows, key)
    trials = _by_trial([row for row in text if "error" not in row and row["budget_s"] <= budget])
    whole = [trial for trial in trials if trial[0]["budget_s"] == budget]
    baselines = [trial for trial in whole if trial[0]["arm"] == BASELINE and not lost.get(_trial_key(trial[0]))]
    if not baselines:
        return None
    baseline = min(baselines, key=lambda trial: _mean(trial, "final_loss"))
    entries = [_entry(trial, baseline, lost) for trial in whole if trial is not baseline]
    # a schedule fitted to less time may pass sooner; what does not pass then says nothing at this budget
    shorter = [_entry(trial, baseline, lost) for trial in trials if trial[0]["budget_s"] < budget]
    entries += [entry for entry in shorter if entry["passes_s"] is not None]
    data = baseline[0]["lock"]["data"]
    return {
        "budget_s": budget,
        "data": {name: data[name] for name in ("fingerprint", "train_tokens", "val_tokens", "tokenizer")},
        "seq_len": seq_len,
        "eval_sequences": min(sequences, -(-(data["val_tokens"] - 1) // seq_len)),
        "trials": _counted(text),
        "baseline": _entry(baseline, baseline, {}),
        "entries": sorted(entries, key=_rank),
    }


def best_entries(table: dict[str, Any]) -> list[Entry]:
    """Each arm's best, the baseline first."""
    best = {entry["arm"]: entry for entry in reversed(table["entries"]) if entry["arm"] != BASELINE}
    return [table["baseline"], *(best[arm] for arm in sorted(best))]


def _rank(entry: Entry) -> tuple[bool, float, float]:
    """Who passes sooner; of those who do not, who ends lower."""
    passes = entry["passes_s"]
    return passes is None, passes or 0.0, entry["final_loss"]


def _entry(trial: Sequence[Row], baseline: Sequence[Row], lost: Lost) -> Entry:
    """A trial with all its seeds: means, and spreads from the lowest to the highest. One that was lost did not pass."""
    target, seconds, anchor = _mean(baseline, "final_loss"), _mean(baseline, "seconds"), _anchor(baseline)
    crossed = [seconds_to(target, row["evaluations"]) for row in trial]
    passed = [when for when in crossed if when is not None]
    own, first = _anchor(trial), trial[0]
    without_curve = lost.get(_trial_key(first), 0)
    every = len(passed) == len(trial) and not without_curve
    passes = statistics.fmean(passed) if every else None
    ratio = passes / seconds if passes is not None else None
    return {
        "arm": first["arm"],
        "overrides": _own_words(first),
        "budget_s": first["budget_s"],
        "seeds": [row["seed"] for row in trial],
        "names": [row["name"] for row in trial],
        "final_loss": _mean(trial, "final_loss"),
        "final_loss_spread": _spread(row["final_loss"] for row in trial),
        "loss_difference": _mean(trial, "final_loss") - target,
        "seconds": _mean(trial, "seconds"),
        "tokens_per_s": _mean(trial, "tokens_per_s"),
        "passes_s": passes,
        "passes_s_spread": _spread(passed) if passes is not None else None,
        "passed_seeds": len(passed),
        "lost_seeds": without_curve,
        "ratio": ratio,
        "card_anchor_ms": own,
        "anchor_difference": own / anchor - 1 if own and anchor else None,
        "ratio_corrected": ratio * anchor / own if ratio is not None and own and anchor else None,
    }


def _by_trial(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that differ in the seed alone, together; of the same seed the last."""
    found: dict[tuple[Any, ...], dict[int, Row]] = {}
    for row in rows:
        found.setdefault(_trial_key(row), {})[row["seed"]] = row
    return [list(seeds.values()) for seeds in found.values()]


def _trial_key(row: Row) -> tuple[Any, ...]:
    return row["arm"], row["budget_s"], *_own_words(row)


def _lost(rows: Sequence[Row], key: Key) -> Lost:
    """How many seeds of each trial have no curve: they diverged, or failed before anything was known of their text."""
    found: dict[tuple[Any, ...], set[int]] = {}
    for row in rows:
        if "error" in row and ("lock" not in row or table_of(row)[1:] == key[1:]):
            found.setdefault(_trial_key(row), set()).add(row.get("seed", 0))
    return {trial: len(seeds) for trial, seeds in found.items()}


def _own_words(row: Row) -> list[str]:
    """What sets its trial apart within a table; where the text lies does not."""
    return [word for word in row.get("overrides", ()) if key_of(word) not in _OF_THE_TABLE]


def _counted(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """How often each arm was tried at each budget: who diverged was tried, too. A seed more is no trial more."""
    tried = dict.fromkeys((row["arm"], f"{row['budget_s']:g}", tuple(_own_words(row))) for row in rows)
    counts: dict[str, dict[str, int]] = {}
    for arm, budget, _ in tried:
        of_arm = counts.setdefault(arm, {})
        of_arm[budget] = of_arm.get(budget, 0) + 1
    return counts


def _anchor(trial: Sequence[Row]) -> float | None:
    known = [row["card_anchor_ms"] for row in trial if row["card_anchor_ms"]]
    return statistics.fmean(known) if known else None


def _mean(trial: Sequence[Row], key: str) -> float:
    return statistics.fmean(row[key] for row in trial)


def _spread(values: Iterable[float]) -> float:
    found = list(values)
    return max(found) - min(found)
