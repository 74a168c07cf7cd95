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
# said once for the whole table: what all rows of it have in common
_OF_THE_TABLE = ("data.", "eval.", "train.device")


def compare(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A table for each budget, text and way of evaluating that has a baseline; the shortest budget first."""
    tables = {table_of(row): None for row in rows if row["arm"] == BASELINE and "error" not in row}
    return [_table(key, rows) for key in sorted(tables)]


def table_of(row: Row) -> tuple[float, str, int, int]:
    """Losses are comparable within one of these."""
    recipe, data = row["lock"]["recipe"], row["lock"]["data"]
    return row["budget_s"], data["fingerprint"], recipe["data"]["seq_len"], recipe["eval"]["sequences"]


def _table(key: tuple[float, str, int, int], rows: Sequence[Row]) -> dict[str, Any]:
    budget, _, seq_len, sequences = key
    text = [row for row in rows if "lock" in row and table_of(row)[1:] == key[1:]]
    whole = [row for row in text if "error" not in row]
    trials = _by_trial([row for row in whole if row["budget_s"] == budget])
    baseline = min((t for t in trials if t[0]["arm"] == BASELINE), key=lambda trial: _mean(trial, "final_loss"))
    # a schedule fitted to less time may pass sooner; what does not pass then says nothing at this budget
    shorter = _by_trial([row for row in whole if row["budget_s"] < budget and row["arm"] != BASELINE])
    entries = [_entry(trial, baseline) for trial in trials if trial is not baseline]
    entries += [entry for trial in shorter if (entry := _entry(trial, baseline))["passes_s"] is not None]
    data = baseline[0]["lock"]["data"]
    return {
        "budget_s": budget,
        "data": {name: data[name] for name in ("fingerprint", "train_tokens", "val_tokens", "tokenizer")},
        "seq_len": seq_len,
        "eval_sequences": min(sequences, -(-(data["val_tokens"] - 1) // seq_len)),
        "trials": _counted(text),
        "baseline": _entry(baseline, baseline),
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


def _entry(trial: Sequence[Row], baseline: Sequence[Row]) -> Entry:
    """A trial with all its seeds: means, and spreads from the lowest to the highest."""
    target, seconds, anchor = _mean(baseline, "final_loss"), _mean(baseline, "seconds"), _anchor(baseline)
    crossed = [seconds_to(target, row["evaluations"]) for row in trial]
    passed = [when for when in crossed if when is not None]
    passes = statistics.fmean(passed) if len(passed) == len(trial) else None  # every seed has to
    own, first = _anchor(trial), trial[0]
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
        "ratio": ratio,
        "card_anchor_ms": own,
        "anchor_difference": own / anchor - 1 if own and anchor else None,
        "ratio_corrected": ratio * anchor / own if ratio is not None and own and anchor else None,
    }


def _by_trial(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that differ in the seed alone, together."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault((row["arm"], row["budget_s"], *_own_words(row)), []).append(row)
    return list(found.values())


def _own_words(row: Row) -> list[str]:
    """What sets its trial apart within a table; where the text lies does not."""
    return [word for word in row["overrides"] if not key_of(word).startswith(_OF_THE_TABLE)]


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
