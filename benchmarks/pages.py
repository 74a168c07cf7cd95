"""Results as text: a Markdown page with the table and what it was measured with, and lines for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import laptop
from benchmarks.time_to_loss import ANCHORS_DIFFER, BASELINE, OFF_BUDGET, best_entries, is_control
from redline.units import format_count

Entry = dict[str, Any]

_NOT_KNOWN = "–"


def sections(result: dict[str, Any]) -> list[str]:
    """Return the Markdown of a time-to-loss result: its tables with notes, then every row."""
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
        f"{_about_time_to_loss(table)} {_tried(table)}",
        _markdown_table(head, rows),
        *(["\n".join(f"- {line}" for line in notes)] if (notes := _time_to_loss_notes(table)) else []),
    ]


def _about_time_to_loss(table: dict[str, Any]) -> str:
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
    """Return the arm with its overrides, and its budget or time where they differ from the table's."""
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
    """Return the mean ± half the distance between the lowest and the highest seed."""
    return form.format(mean) + (f" ± {form.format(spread / 2)}" if spread else "")


def _time_to_loss_notes(table: dict[str, Any]) -> list[str]:
    return [*_lost_notes(table), *_untuned_notes(table), *_anchor_notes(table)]


def _lost_notes(table: dict[str, Any]) -> list[str]:
    """Return a note for each entry with seeds that diverged or failed: such an entry does not pass."""
    return [
        f"{' '.join([entry['arm'], *entry['overrides']])}: {entry['lost_seeds']} of its seeds have no curve."
        for entry in table["entries"]
        if entry["lost_seeds"]
    ]


def _untuned_notes(table: dict[str, Any]) -> list[str]:
    """Return a note for each shorter baseline that passes too: the baseline was then not tuned for this budget."""
    shorter = [entry for entry in table["entries"] if entry["budget_s"] < table["budget_s"]]
    sooner = [e for e in shorter if e["arm"] == BASELINE and not is_control(e["arm"], e["overrides"])]
    return [
        f"{_titled(entry, table)} passes, too, after {_passes(entry)}: the baseline is not at its best at this budget."
        for entry in sooner
    ]


def _anchor_notes(table: dict[str, Any]) -> list[str]:
    """Return a note for each entry during which the GPU itself was faster or slower than for the baseline."""
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


def time_to_loss_lines(result: dict[str, Any]) -> list[str]:
    """Return the lines for a terminal: every run, then each arm at its best."""
    runs = [_run_line(row) for row in result["rows"]]
    return [*runs, *(line for table in result["comparison"] for line in ["", *_table_lines(table)])]


def _run_line(row: Row) -> str:
    if "error" in row:
        return f"{row['name']}: failed: {row['error']}"
    return (
        f"{row['name']}: {row['final_loss']:.4f} after {row['seconds']:.1f} s, {row['steps']:,} steps, "
        f"{row['tokens_per_s']:,.0f} tok/s; warm-up {row['warmup_s']:.1f} s is not counted"
    )


def _table_lines(table: dict[str, Any]) -> list[str]:
    """Return the lines of a table: each arm at its best, and the controls."""
    head = [f"{table['budget_s']:g} s of training. {_about_time_to_loss(table)}", _tried(table)]
    controls = [entry for entry in table["entries"] if is_control(entry["arm"], entry["overrides"])]
    entries = [_entry_line(entry, table["baseline"]) for entry in (*best_entries(table), *controls)]
    return [*head, *entries, *_time_to_loss_notes(table)]


def _entry_line(entry: Entry, baseline: Entry) -> str:
    if entry is baseline:
        text = f"in {entry['seconds']:.1f} s: the baseline"
    elif entry["ratio"] is None:
        text = f"passes that loss: {_passes(entry)}"
    else:
        text = f"passes that loss after {_passes(entry)}, {entry['ratio']:.3f} of its time"
        text += "" if entry["ratio_corrected"] is None else f" (corrected {entry['ratio_corrected']:.3f})"
    return "  ".join([f"{entry['arm']:14} {_loss(entry):>17}", text, *entry["overrides"]])


Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]


def markdown(result: dict[str, Any], picture: str | None = None) -> str:
    """Return the page of a result; `picture` is the name of a file beside it."""
    benchmark, machine = str(result["benchmark"]), result["machine"]
    parts = [
        f"# bench {benchmark}: {machine['name']}, {result['date']}",
        *([f"![{_caption(benchmark)}]({picture})"] if picture else []),
        *(_SECTIONS[benchmark](result) if benchmark in _SECTIONS else [_table(result["rows"], _COLUMNS[benchmark])]),
        *_notes(result["rows"]),
        "\n".join(["| measured with | |", "|---|---|", *(f"| {key} | {value} |" for key, value in _about(result))]),
    ]
    return "\n\n".join(parts) + "\n"


_SECTIONS: dict[str, Callable[[dict[str, Any]], list[str]]] = {"time-to-loss": sections, "laptop": laptop.sections}


def _about(result: dict[str, Any]) -> list[tuple[str, str]]:
    machine, git = result["machine"], result["git"]
    words = [result.get("recipe"), *(result.get("overrides") or [])]
    recipe = " ".join(str(word) for word in words if word)
    return [
        ("machine", f"{machine['name']}, {machine['memory_gib']} GiB, {machine['cores']} cores"),
        ("versions", _versions(result["versions"])),
        ("commit", _commit(git)),
        *([("recipe", f"`{recipe}`")] if recipe else []),
    ]


def _versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _commit(git: dict[str, Any]) -> str:
    if not git.get("commit"):
        return "unknown: the code is not in a Git checkout"
    return f"`{git['commit']}`" + (", with uncommitted changes" if git.get("dirty") else "")


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """Return a Markdown table; the reason of a row without figures is a note below it."""
    lines = [" | ".join(name for name, _ in columns), " | ".join("---" for _ in columns)]
    for row in rows:
        first, *others = (show for _, show in columns)
        cells = ["no figure", *[""] * (len(others) - 1)] if "error" in row else [show(row) for show in others]
        lines.append(" | ".join([first(row), *cells]))
    return "\n".join(f"| {line} |" for line in lines)


def lines(result: dict[str, Any]) -> list[str]:
    """Return the table for a terminal; a row without figures shows its reason."""
    _, *columns = _COLUMNS[str(result["benchmark"])]
    names = ["", *(row["name"] for row in result["rows"])]
    cells = [[name for name, _ in columns]]
    cells += [[] if "error" in row else [show(row) for _, show in columns] for row in result["rows"]]
    widths = [max(len(line[column]) for line in cells if line) for column in range(len(columns))]
    reasons = ["", *(f"failed: {_one_line(row['error'])}" if "error" in row else "" for row in result["rows"])]
    return [
        f"{name:{max(map(len, names))}}  "
        + (reason or "  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)))
        for name, line, reason in zip(names, cells, reasons, strict=True)
    ]


def _notes(rows: Sequence[Row]) -> list[str]:
    """Return the notes: why a figure is missing, what it depends on, and which rows are of another day or commit."""
    notes = [f"- {row['name']}: no figure. {_one_line(row['error'])}" for row in rows if "error" in row]
    notes += [f"- {row['name']}: {_one_line(text)}." for row in rows for text in row.get("warnings") or []]
    notes += [f"- {row['name']}: the best of the usual stack." for row in rows if row.get("best_of_theirs")]
    notes += [f"- {row['name']}: its fp8 matmuls are {text}." for row in rows if (text := _fp8(row))]
    notes += [
        f"- {row['name']}: measured on {row['from'].get('date')}, commit {_commit(row['from'].get('git') or {})}."
        for row in rows
        if "from" in row
    ]
    notes += [f"- {row['name']}: with {_versions(row['versions'])}." for row in rows if row.get("versions")]
    return ["\n".join(notes)] if notes else []


def _one_line(text: object) -> str:
    return " ".join(str(text).split())


def _fp8(row: Row) -> str | None:
    """Return which matmuls run in fp8, if that was chosen."""
    choices = row.get("choices") or (row.get("measured") or {}).get("choices") or {}
    listed = {choice["key"]: choice["value"] for choice in choices} if isinstance(choices, list) else choices
    return listed.get("train.fp8")


def _caption(benchmark: str) -> str:
    captions = {
        "throughput": "tokens per second",
        "finetune": "tokens per second",
        "plan-accuracy": "planned against measured",
        "plan-accuracy-held-out": "planned against measured, configurations that nothing was fitted to",
        "time-to-loss": "validation loss over seconds of training",
        "laptop": "validation loss over seconds of training",
    }
    return captions.get(benchmark, benchmark)


def _shown(key: str, form: str, scale: float = 1.0) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        value = row.get(key)
        return _NOT_KNOWN if value is None else form.format(scale * value)

    return show


def _forecast(key: str, form: str) -> Callable[[Row], str]:
    """Show a planned value and its relative error."""

    def show(row: Row) -> str:
        planned, error = (row.get("planned") or {}).get(key), row.get(f"{key}_error")
        return _NOT_KNOWN if planned is None else form.format(planned) + ("" if error is None else f" ({error:+.1%})")

    return show


def _compared(key: str, form: str, scale: float = 1.0) -> Callable[[Row], str]:
    """Show planned → measured, and the relative error."""

    def show(row: Row) -> str:
        planned, measured = (
            _NOT_KNOWN if row[side][key] is None else form.format(scale * row[side][key])
            for side in ("planned", "measured")
        )
        error = row.get(f"{key}_error")
        return f"{planned} → {measured}" + ("" if error is None else f" ({error:+.1%})")

    return show


def _blocks(row: Row) -> str:
    return "fused" if row.get("kernels") == "fused" else "compiled" if row["compiled"] else "not compiled"


_COLUMNS: dict[str, Sequence[Column]] = {
    "throughput": (
        ("", lambda row: f"{row['name']}: {row['what']}"),
        ("ran", lambda row: f"{row['precision']}, {_blocks(row)}"),
        ("tok/s", _shown("tokens_per_s", "{:,.0f}")),
        ("MFU", _shown("mfu", "{:.1%}")),
        ("ms a step", _shown("step_ms", "{:,.1f}")),
        ("GiB", _shown("memory_gib", "{:.1f}")),
        ("W", _shown("power_w", "{:.0f}")),
        ("J a step", _shown("joules_per_step", "{:.1f}")),
        ("mJ a token", _shown("joules_per_token", "{:.3f}", 1e3)),
        ("SM MHz", _shown("sm_clock_mhz", "{:,.0f}")),
        ("data wait", _shown("data_wait_share", "{:.2%}")),
        ("in kernels", _shown("kernel_share", "{:.1%}")),
        ("redline is", _shown("redline_is", "{:.2f}×")),
    ),
    "finetune": (
        ("", lambda row: f"{row['name']}: {row['what']}"),
        ("ran", lambda row: f"{row['precision']}, {_blocks(row)}"),
        ("recomputed", lambda row: str(row["recomputed"])),
        ("micro-batch", _shown("micro_batch", "{:.0f}")),
        ("a document", _shown("document_tokens", "{:,.0f}")),
        ("tok/s", _shown("tokens_per_s", "{:,.0f}")),
        ("planned", _forecast("tokens_per_s", "{:,.0f}")),
        ("ms a step", _shown("step_ms", "{:,.1f}")),
        ("GiB", _shown("memory_gib", "{:.1f}")),
        ("planned", _forecast("memory_gib", "{:.1f}")),
        ("MFU", _shown("mfu", "{:.1%}")),
        ("× plain", _shown("times_plain", "{:.2f}")),
        ("× their best", _shown("times_best", "{:.2f}")),
        ("first loss", _shown("first_loss", "{:.4f}")),
        ("last", _shown("last_loss", "{:.4f}")),  # the same gradients lead to the same one
    ),
    "latent": (
        ("", lambda row: f"{row['name']}: {row['what']}"),
        ("ran", lambda row: f"{row['precision']}, {_blocks(row)}"),
        ("micro-batch", _shown("micro_batch", "{:.0f}")),
        ("texts/s", _shown("texts_per_s", "{:,.1f}")),
        ("ms a step", _shown("step_ms", "{:,.1f}")),
        ("teacher, once", _shown("teacher_ms", "{:,.1f} ms")),
        ("GiB", _shown("memory_gib", "{:.1f}")),
        ("× textbook", _shown("times_textbook", "{:.2f}")),
        ("of one epoch", _shown("times_textbook_one_epoch", "{:.2f}")),
        ("first loss", _shown("first_loss", "{:.4f}")),
        ("last", _shown("last_loss", "{:.4f}")),  # the same gradients lead to the same one
        ("terms apart", _shown("terms_apart", "{:.1e}")),
    ),
    "plan-accuracy": (
        ("case", lambda row: f"{row['name']}<br>`{row['case']}`" if row["name"] != row["case"] else f"`{row['case']}`"),
        ("peak memory, GiB", _compared("memory_gib", "{:.1f}")),
        ("tok/s", _compared("tokens_per_s", "{:,.0f}")),
        ("ms a step", lambda row: f"{row['measured']['step_ms']:,.1f}"),
    ),
    "startup": (
        ("caches", lambda row: str(row["name"])),
        ("to the first step, s", _shown("to_first_step_s", "{:.1f}")),
        ("imports, data and model", _shown("imports_data_model_s", "{:.1f}")),
        ("warm-up", _shown("warmup_s", "{:.1f}")),
        ("evaluation and step", _shown("evaluation_and_step_s", "{:.1f}")),
    ),
}
_COLUMNS["plan-accuracy-held-out"] = _COLUMNS["plan-accuracy"]


def accuracy_line(row: dict[str, Any]) -> str:
    name = f"{row['name']:18}" + (f" {row['case']:76}" if row["case"] != row["name"] else "")
    if "error" in row:
        return f"{name} failed: {row['error']}"
    planned, measured = row["planned"], row["measured"]
    memory, rate = (
        "" if row[key] is None else f"({row[key]:+.1%})" for key in ("memory_gib_error", "tokens_per_s_error")
    )
    speed = f"{planned['tokens_per_s']:,.0f} → " if planned["tokens_per_s"] else ""
    memory_gib = measured["memory_gib"] or 0.0
    return (
        f"{name} {planned['memory_gib']:.1f} → {memory_gib:.1f} GiB {memory}   "
        f"{speed}{measured['tokens_per_s']:,.0f} tok/s {rate}"
    )
