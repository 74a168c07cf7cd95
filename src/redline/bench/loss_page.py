"""Time to loss in words: for the page, and for the console."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redline.bench.arms import BASELINE, is_control
from redline.bench.curve import OFF_BUDGET
from redline.bench.passing import ANCHORS_DIFFER, best_entries
from redline.units import format_count

Row = dict[str, Any]
Entry = dict[str, Any]

_NOT_KNOWN = "–"


def sections(result: dict[str, Any]) -> list[str]:
    """The tables with what they mean, then every row."""
    parts = [part for table in result["comparison"] for part in _section(table)]
    if not result["comparison"]:
        parts = [f"There is no row of `{BASELINE}` yet to compare with."]
    return [*parts, "## Every run", _runs(result["rows"])]


def _section(table: dict[str, Any]) -> list[str]:
    head = ("", "final loss", "against the baseline", "passes after", "of its time", "corrected", "seeds", "tok/s")
    baseline = table["baseline"]
    first = [
        f"**{_titled(baseline, table)}**",
        _loss(baseline),
        "",
        f"{baseline['seconds']:.1f} s",
        "1",
        "",
        *_run_by(baseline),
    ]
    rows = [first, *(_cells(entry, table) for entry in table["entries"])]
    return [
        f"## {table['budget_s']:g} s of training",
        f"{_about(table)} {_tried(table)}",
        _markdown_table(head, rows),
        *(["\n".join(f"- {line}" for line in notes)] if (notes := _notes(table)) else []),
    ]


def _about(table: dict[str, Any]) -> str:
    data, sequences = table["data"], table["eval_sequences"]
    return (
        f"{format_count(data['train_tokens'])} training tokens ({data['tokenizer']}, fingerprint "
        f"{data['fingerprint'][:12]}); validation loss on the same {sequences:,} sequences of {table['seq_len']:,} "
        "tokens for all; seconds are of training alone."
    )


def _tried(table: dict[str, Any]) -> str:
    counts = [
        f"{arm} {', '.join(f'{number} at {budget} s' for budget, number in sorted(at.items(), key=_by_budget))}"
        for arm, at in table["trials"].items()
    ]
    return f"Overrides tried: {'; '.join(counts)}."


def _by_budget(item: tuple[str, int]) -> float:
    return float(item[0])


def _cells(entry: Entry, table: dict[str, Any]) -> list[str]:
    ratios = (entry["ratio"], entry["ratio_corrected"])
    return [
        _titled(entry, table),
        _loss(entry),
        f"{entry['loss_difference']:+.4f}",
        _passes(entry),
        *(_NOT_KNOWN if ratio is None else f"{ratio:.3f}" for ratio in ratios),
        *_run_by(entry),
    ]


def _titled(entry: Entry, table: dict[str, Any]) -> str:
    """The arm and what sets it apart."""
    within = "" if entry["budget_s"] == table["budget_s"] else f", fitted to {entry['budget_s']:g} s"
    if abs(entry["seconds"] / entry["budget_s"] - 1) > OFF_BUDGET:
        within += f", trained {entry['seconds']:.1f} s"
    return " ".join([f"{entry['arm']}{within}", *(f"`{word}`" for word in entry["overrides"])])


def _run_by(entry: Entry) -> list[str]:
    return [f"{len(entry['seeds'])}", f"{entry['tokens_per_s']:,.0f}"]


def _loss(entry: Entry) -> str:
    return _spread(entry["final_loss"], entry["final_loss_spread"], "{:.4f}")


def _passes(entry: Entry) -> str:
    if entry["passes_s"] is not None:
        return _spread(entry["passes_s"], entry["passes_s_spread"], "{:.1f}") + " s"
    some, seeds = entry["passed_seeds"], len(entry["seeds"]) + entry["lost_seeds"]
    return f"only {some} of {seeds} seeds" if some else "never"


def _spread(mean: float, spread: float | None, form: str) -> str:
    """Half of what lies between the lowest and the highest seed."""
    return form.format(mean) + (f" ± {form.format(spread / 2)}" if spread else "")


def _notes(table: dict[str, Any]) -> list[str]:
    return [*_lost_notes(table), *_untuned_notes(table), *_anchor_notes(table)]


def _lost_notes(table: dict[str, Any]) -> list[str]:
    """Seeds that diverged or failed: whoever has one does not pass."""
    return [
        f"{' '.join([entry['arm'], *entry['overrides']])}: {entry['lost_seeds']} of its seeds have no curve."
        for entry in table["entries"]
        if entry["lost_seeds"]
    ]


def _untuned_notes(table: dict[str, Any]) -> list[str]:
    """A baseline that does as well in less time was not tuned at this one."""
    shorter = [entry for entry in table["entries"] if entry["budget_s"] < table["budget_s"]]
    sooner = [e for e in shorter if e["arm"] == BASELINE and not is_control(e["arm"], e["overrides"])]
    return [
        f"{_titled(entry, table)} passes, too, after {_passes(entry)}: the baseline is not at its best at this budget."
        for entry in sooner
    ]


def _anchor_notes(table: dict[str, Any]) -> list[str]:
    """Where the card itself was faster or slower than when the baseline ran."""
    differ = [entry for entry in table["entries"] if abs(entry["anchor_difference"] or 0.0) > ANCHORS_DIFFER]
    return [
        f"{' '.join([entry['arm'], *entry['overrides']])}: the card's anchor step took "
        f"{entry['anchor_difference']:+.1%} against the baseline's call; the corrected ratio allows for it."
        for entry in differ
    ]


def _runs(rows: Sequence[Row]) -> str:
    head = (
        *("run", "final loss", "steps", "trained s", "ms a step (fitted with)", "tok/s", "epochs"),
        *("warm-up s, not counted", "GiB", "anchor ms"),
    )
    return _markdown_table(head, [_run(row) for row in rows])


def _run(row: Row) -> list[str]:
    if "error" in row:
        return [row["name"], "no figure", *[""] * 8]
    return [
        row["name"],
        f"{row['final_loss']:.4f}",
        f"{row['steps']:,}",
        f"{row['seconds']:.1f}",
        f"{row['step_ms']:.1f} ({row['anchor_step_ms']:.1f})",
        f"{row['tokens_per_s']:,.0f}",
        _NOT_KNOWN if row["epochs"] is None else f"{row['epochs']:.2f}",
        f"{row['warmup_s']:.1f}",
        _NOT_KNOWN if row["memory_gib"] is None else f"{row['memory_gib']:.1f}",
        _NOT_KNOWN if row["card_anchor_ms"] is None else f"{row['card_anchor_ms']:.1f}",
    ]


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def lines(result: dict[str, Any]) -> list[str]:
    """For the console: every run, then each arm at its best."""
    told = [_run_line(row) for row in result["rows"]]
    return [*told, *(line for table in result["comparison"] for line in ["", *_table_lines(table)])]


def _run_line(row: Row) -> str:
    if "error" in row:
        return f"{row['name']}: no figure: {row['error']}"
    return (
        f"{row['name']}: {row['final_loss']:.4f} after {row['seconds']:.1f} s, {row['steps']:,} steps, "
        f"{row['tokens_per_s']:,.0f} tok/s; warm-up {row['warmup_s']:.1f} s is not counted"
    )


def _table_lines(table: dict[str, Any]) -> list[str]:
    """Each arm at its best, and the controls."""
    told = [f"{table['budget_s']:g} s of training. {_about(table)}", _tried(table)]
    controls = [entry for entry in table["entries"] if is_control(entry["arm"], entry["overrides"])]
    entries = [_entry_line(entry, table["baseline"]) for entry in (*best_entries(table), *controls)]
    return [*told, *entries, *_notes(table)]


def _entry_line(entry: Entry, baseline: Entry) -> str:
    if entry is baseline:
        said = f"in {entry['seconds']:.1f} s: the baseline"
    elif entry["ratio"] is None:
        said = f"passes that loss: {_passes(entry)}"
    else:
        said = f"passes that loss after {_passes(entry)}, {entry['ratio']:.3f} of its time"
        said += "" if entry["ratio_corrected"] is None else f" (corrected {entry['ratio_corrected']:.3f})"
    return "  ".join([f"{entry['arm']:14} {_loss(entry):>17}", said, *entry["overrides"]])
