"""A result as a page: the table, and what it was measured with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from redline.bench.loss_page import sections

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]

_NOT_KNOWN = "–"


def markdown(result: dict[str, Any], picture: str | None = None) -> str:
    """`picture` is the name of a file beside the page."""
    benchmark, machine = str(result["benchmark"]), result["machine"]
    parts = [
        f"# redline bench {benchmark}: {machine['name']}, {result['date']}",
        *([f"![{_caption(benchmark)}]({picture})"] if picture else []),
        *(sections(result) if benchmark == "time-to-loss" else [_table(result["rows"], _COLUMNS[benchmark])]),
        *_notes(result["rows"]),
        "\n".join(["| measured with | |", "|---|---|", *(f"| {key} | {value} |" for key, value in _about(result))]),
    ]
    return "\n\n".join(parts) + "\n"


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
        return "not known: the code was no checkout"
    return f"`{git['commit']}`" + (", with changes of its own" if git.get("dirty") else "")


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """A row without figures has its reason below the table."""
    lines = [" | ".join(name for name, _ in columns), " | ".join("---" for _ in columns)]
    for row in rows:
        first, *others = (show for _, show in columns)
        cells = ["no figure", *[""] * (len(others) - 1)] if "error" in row else [show(row) for show in others]
        lines.append(" | ".join([first(row), *cells]))
    return "\n".join(f"| {line} |" for line in lines)


def lines(result: dict[str, Any]) -> list[str]:
    """The table for a terminal: columns under their names, a row without figures with its reason."""
    _, *columns = _COLUMNS[str(result["benchmark"])]
    names = ["", *(row["name"] for row in result["rows"])]
    cells = [[name for name, _ in columns]]
    cells += [[] if "error" in row else [show(row) for _, show in columns] for row in result["rows"]]
    wide = [max(len(line[place]) for line in cells if line) for place in range(len(columns))]
    reasons = ["", *(f"no figure: {_one_line(row['error'])}" if "error" in row else "" for row in result["rows"])]
    return [
        f"{name:{max(map(len, names))}}  "
        + (why or "  ".join(f"{cell:>{width}}" for cell, width in zip(line, wide, strict=True)))
        for name, line, why in zip(names, cells, reasons, strict=True)
    ]


def _notes(rows: Sequence[Row]) -> list[str]:
    """Why there is no figure, what else a figure depends on, and which rows are of another day or other code."""
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
    """Which matmuls, where that was chosen."""
    choices = row.get("choices") or (row.get("measured") or {}).get("choices") or {}
    listed = {choice["key"]: choice["value"] for choice in choices} if isinstance(choices, list) else choices
    return listed.get("train.fp8")


def _caption(benchmark: str) -> str:
    captions = {
        "throughput": "tokens per second",
        "finetune": "tokens per second",
        "plan-accuracy": "planned against measured",
        "time-to-loss": "validation loss over seconds of training",
    }
    return captions.get(benchmark, benchmark)


def _shown(key: str, form: str, scale: float = 1.0) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        value = row.get(key)
        return _NOT_KNOWN if value is None else form.format(scale * value)

    return show


def _forecast(key: str, form: str) -> Callable[[Row], str]:
    """What the plan said, and by how much it is off."""

    def show(row: Row) -> str:
        planned, error = (row.get("planned") or {}).get(key), row.get(f"{key}_error")
        return _NOT_KNOWN if planned is None else form.format(planned) + ("" if error is None else f" ({error:+.1%})")

    return show


def _compared(key: str, form: str, scale: float = 1.0) -> Callable[[Row], str]:
    """Planned → measured, and by how much the plan is off."""

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
