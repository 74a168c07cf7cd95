"""When each arm passes the loss that the baseline ends with."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from redline.bench.arms import BASELINE, OF_THE_TEXT, in_order, is_control
from redline.bench.curve import seconds_to
from redline.bench.setting import key_of

Row = dict[str, Any]
Entry = dict[str, Any]

ANCHORS_DIFFER = 0.03
# what a table's own key tells of all its rows
_OF_THE_TABLE = {*OF_THE_TEXT, "data.seq_len", "data.pack", "data.shuffle", "eval.sequences", "train.device"}
Key = tuple[float, str, int, int, bool, bool]


class _Trial(NamedTuple):
    """Rows that differ in the seed alone, and how many more have no curve: they diverged, or failed."""

    rows: list[Row]
    lost: int

    @property
    def first(self) -> Row:
        return self.rows[0]


def compare(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A table for each budget, text and way of evaluating that has a baseline; the shortest budget first."""
    able = [row for row in rows if row["arm"] == BASELINE and "error" not in row]
    # where every trial has a shape that was asked for, that is the race's
    tables = {table_of(row): None for row in [row for row in able if not _is_control(row)] or able}
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
    failed = [row for row in rows if "lock" not in row]  # before anything was known of their text
    trials = _by_trial([row for row in (*failed, *text) if row["budget_s"] <= budget])
    whole = [trial for trial in trials if trial.first["budget_s"] == budget]
    baselines = [trial for trial in whole if trial.first["arm"] == BASELINE and not trial.lost]
    if not baselines:
        return None
    baselines = [trial for trial in baselines if not _is_control(trial.first)] or baselines
    baseline = min(baselines, key=lambda trial: _mean(trial.rows, "final_loss"))
    entries = [_entry(trial, baseline.rows) for trial in whole if trial is not baseline]
    # a schedule fitted to less time may pass sooner; what does not pass then says nothing at this budget
    shorter = [_entry(trial, baseline.rows) for trial in trials if trial.first["budget_s"] < budget]
    entries += [entry for entry in shorter if entry["passes_s"] is not None]
    data = baseline.first["lock"]["data"]
    return {
        "budget_s": budget,
        "data": {name: data[name] for name in ("fingerprint", "train_tokens", "val_tokens", "tokenizer")},
        "seq_len": seq_len,
        "eval_sequences": min(sequences, -(-(data["val_tokens"] - 1) // seq_len)),
        "trials": _counted(text),
        "baseline": _entry(baseline, baseline.rows),
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


def _entry(found: _Trial, baseline: Sequence[Row]) -> Entry:
    """A trial with all its seeds: means, and spreads from the lowest to the highest. One that was lost did not pass."""
    trial = found.rows
    target, seconds, anchor = _mean(baseline, "final_loss"), _mean(baseline, "seconds"), _anchor(baseline)
    crossed = [seconds_to(target, row["evaluations"]) for row in trial]
    passed = [when for when in crossed if when is not None]
    passes = statistics.fmean(passed) if len(passed) == len(trial) and not found.lost else None  # every seed has to
    own, first = _anchor(trial), found.first
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
        "lost_seeds": found.lost,
        "ratio": ratio,
        "card_anchor_ms": own,
        "anchor_difference": own / anchor - 1 if own and anchor else None,
        "ratio_corrected": ratio * anchor / own if ratio is not None and own and anchor else None,
    }


def _by_trial(rows: Sequence[Row]) -> list[_Trial]:
    """Those with a curve for one seed at least; of several rows of a seed the last counts."""
    found: dict[tuple[Any, ...], dict[int, Row]] = {}
    for row in rows:
        found.setdefault((row["arm"], row["budget_s"], *in_order(_own_words(row))), {})[row["seed"]] = row
    curves = {key: [row for row in seeds.values() if "error" not in row] for key, seeds in found.items()}
    return [_Trial(some, len(found[key]) - len(some)) for key, some in curves.items() if some]


def _is_control(row: Row) -> bool:
    return is_control(row["arm"], row["overrides"])


def _own_words(row: Row) -> list[str]:
    """What sets its trial apart within a table; where the text lies does not."""
    return [word for word in row["overrides"] if key_of(word) not in _OF_THE_TABLE]


def _counted(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """How often each arm was tried at each budget: who diverged was tried, too. A seed more is no trial more, nor
    is a control."""
    counted = [row for row in rows if not _is_control(row)]
    tried = dict.fromkeys((row["arm"], f"{row['budget_s']:g}", in_order(_own_words(row))) for row in counted)
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
