"""Results as pictures: SVG whose letters are paths, so that it looks the same on every machine."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from redline.units import format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
from benchmarks.time_to_loss import ADAMW, BASELINE, best_entries, is_control

if TYPE_CHECKING:
    from matplotlib.figure import Figure


INK, FAINT, GRID, ACCENT, SECOND, CARD = "#1d1b1a", "#6d6763", "#e7e3df", "#c8281f", "#8fa6bd", "#ffffff"
RC: Any = {
    "svg.fonttype": "path",
    "svg.hashsalt": "redline",  # the same result gives the same file
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": FAINT,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}


def headed(canvas: Figure, result: dict[str, Any], title: str) -> None:
    """Write the title above, and the date and versions below."""
    git, versions = result.get("git") or {}, result.get("versions") or {}
    commit = str(git.get("commit") or "")[:7] + (" with uncommitted changes" if git.get("dirty") else "")
    words = [result.get("date"), f"torch {versions['torch']}" if "torch" in versions else "", f"commit {commit}"]
    canvas.suptitle(title, x=0.02, ha="left", size=13.5, weight="bold")
    foot = " · ".join(str(word) for word in words[: 3 if commit else 2] if word)
    canvas.supxlabel(foot, x=0.985, ha="right", size=8.5, color=FAINT)


_COLOURS = {BASELINE: SECOND, "pretrain-350m": INK, ADAMW: "#3d7a5a", "speedrun-50m": ACCENT}
_ABOVE = 2.2  # how far the axis reaches above the target, in units of the distance from the target to the lowest loss


def draw_time_to_loss(canvas: Figure, result: dict[str, Any]) -> None:
    """Draw a panel for each table, with each arm at its best overrides; without a baseline, all curves in one panel."""
    rows = {row["name"]: row for row in result["rows"]}
    tables = result["comparison"]
    canvas.set_size_inches(max(9.0, 6.2 * len(tables)), 5.6)
    panels = canvas.subplots(1, max(1, len(tables)), squeeze=False)[0]
    several = len({table["data"]["fingerprint"] for table in tables}) > 1
    for ax, table in zip(panels, tables, strict=False):
        text = f", text of {format_count(table['data']['train_tokens'])} tokens" if several else ""
        _draw_table(ax, table, rows, f"{table['budget_s']:g} s{text}")
    if not tables:
        for row in rows.values():
            _draw_curve(panels[0], row, _colour(row["arm"]), row["arm"])
    for ax in panels:
        ax.set_xlabel("seconds of training")
        ax.set_ylabel("validation loss")
        ax.grid(visible=True)
        ax.set_xlim(left=0)
        ax.legend(frameon=False, loc="upper left", bbox_to_anchor=(0.0, -0.16), fontsize=9)  # below: it hides no curve
    headed(canvas, result, f"Time to loss on one {result['machine']['name']}")


def _draw_table(ax: Axes, table: dict[str, Any], rows: dict[str, Row], budget: str) -> None:
    target, lowest = table["baseline"]["final_loss"], table["baseline"]["final_loss"]
    controls = [entry for entry in table["entries"] if is_control(entry["arm"], entry["overrides"])]
    for entry in (*best_entries(table), *controls):
        colour, lowest = _colour(entry["arm"]), min(lowest, entry["final_loss"])
        for number, name in enumerate(entry["names"]):
            label = None if number else _label(entry, rows[name])
            _draw_curve(ax, rows[name], colour, label, dashed=entry in controls)
        if entry["passes_s"] is not None and entry["arm"] != BASELINE:
            ax.plot(entry["passes_s"], target, "o", color=colour, markersize=7, zorder=5)
            ax.annotate(
                f"{entry['passes_s']:.0f} s",
                (entry["passes_s"], target),
                xytext=(4, 6),
                textcoords="offset points",
                color=colour,
                weight="bold",
            )
    ax.axhline(target, color=FAINT, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
    ax.set_ylim(lowest - 0.1, target + max(1.0, _ABOVE * (target - lowest)))
    ax.set_title(f"{budget}: {BASELINE} ends at {target:.3f}", loc="left", size=10.5, weight="bold")


def _draw_curve(ax: Axes, row: Row, colour: str, label: str | None, *, dashed: bool = False) -> None:
    known = [point for point in row["evaluations"] if point["loss"] is not None]
    seconds, losses = ([point[key] for point in known] for key in ("seconds", "loss"))
    ax.plot(seconds, losses, "--o" if dashed else "-o", color=colour, linewidth=1.6, markersize=2.8, label=label)


def _label(entry: dict[str, Any], row: Row) -> str:
    """Return the arm with its size, seeds and time: a smaller model and a single seed must be visible."""
    total = (row["lock"].get("parameters") or {}).get("total")
    seeds = "one seed" if len(entry["seeds"]) == 1 else f"{len(entry['seeds'])} seeds"
    about = ", ".join([*([format_count(total)] if total else []), seeds])
    ratio = entry["ratio"]
    if is_control(entry["arm"], entry["overrides"]):
        return f"control, {entry['arm']}'s loop ({about}): " + _time_share(ratio)
    if entry["arm"] == BASELINE:
        return f"{entry['arm']} ({about}): {entry['seconds']:.0f} s"
    return f"{entry['arm']} ({about}): " + _time_share(ratio)


def _time_share(ratio: float | None) -> str:
    return "does not pass" if ratio is None else f"{ratio:.2f} of its time"


def _colour(arm: str) -> str:
    return _COLOURS.get(arm, FAINT)


Row = dict[str, Any]

_BANDS = ((0.10, "#f3f1ee"), (0.05, "#e4ebe4"))  # the wide band first: the other is drawn over it
_LABEL = 48  # letters of a row's label
_REACH = 0.14  # largest error on the axis
_NAMES = {
    "redline": "redline",
    "redline-fp8": "redline, fp8",
    "plain": "torch.compile alone",
    "transformers": "transformers' Llama",
    "hf+peft+bitsandbytes": "HF + PEFT + bitsandbytes",
    "hf+peft+bitsandbytes+liger": "the same + Liger",
    "hf+peft+bitsandbytes+liger, nothing recomputed": "+ Liger, nothing recomputed",
    "hf+peft+bitsandbytes+liger, row by row": "+ Liger, row by row",
}


def draw(result: dict[str, Any]) -> str | None:
    """Return the picture of a result; None if its benchmark has none, or no row has a figure."""
    drawn: Callable[[Figure, dict[str, Any]], None] | None = _PICTURES.get(str(result["benchmark"]))
    rows = [row for row in result["rows"] if "error" not in row]
    if drawn is None or not rows:
        return None
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(RC):
        canvas = Figure(layout=ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.1), facecolor=CARD)
        drawn(canvas, {**result, "rows": rows})
        out = io.StringIO()
        canvas.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _draw_throughput(canvas: Figure, result: dict[str, Any]) -> None:
    rows: list[Row] = result["rows"]
    canvas.set_size_inches(9.0, 1.5 + 0.6 * len(rows))
    ax = canvas.subplots()
    most = max(row["tokens_per_s"] for row in rows)
    for place, row in enumerate(rows):
        ours = str(row["name"]).startswith("redline")
        ax.barh(place, row["tokens_per_s"], height=0.62, color=ACCENT if ours else SECOND)
        ax.text(
            row["tokens_per_s"] + 0.012 * most,
            place,
            _beside(row),
            va="center",
            color=ACCENT if ours else INK,
            weight="bold" if ours else "normal",
        )
    reach = _draw_limits(ax, rows, most)
    ax.set_yticks(range(len(rows)), [_named(row) for row in rows])
    ax.set_ylim(len(rows) - 0.45, -0.55)
    room = 1.85 if any("times_plain" in row for row in rows) else 1.42  # for the text beside the longest bar
    ax.set_xlim(0, max(room * most, 1.02 * reach))
    ax.xaxis.set_major_formatter(lambda value, _: format_count(value))
    ax.grid(visible=True, axis="x")
    ax.spines["left"].set_visible(False)
    has_mfu = any(row.get("mfu") is not None for row in rows)
    ax.set_xlabel("tokens per second" + ("; MFU is of the dense bf16 peak, also in fp8" if has_mfu else ""))
    headed(canvas, result, f"{result.get('recipe', 'training')} on one {result['machine']['name']}")


def _beside(row: Row) -> str:
    share = "" if row.get("mfu") is None else f"  ·  {row['mfu']:.1%} MFU"
    ratio = row.get("redline_is")
    slower = "" if not ratio or str(row["name"]).startswith("redline") else f"  ·  redline is {ratio:.2f}×"
    times = f"  ·  {row['times_plain']:.2f}× plain" if row.get("times_plain") else ""
    return f"{row['tokens_per_s']:,.0f}{share}{slower}{times}"


def _named(row: Row) -> str:
    """Return the label of a bar; that of fp8 has the share of its own limit, because MFU is of the bf16 peak."""
    name, limit = _NAMES.get(str(row["name"]), str(row["name"])), row.get("ceiling_tokens_per_s")
    is_fp8 = row.get("precision") == "fp8" and limit
    return f"{name}\n{row['tokens_per_s'] / limit:.0%} of the fp8 limit" if is_fp8 else name


def _draw_limits(ax: Axes, rows: Sequence[Row], most: float) -> float:
    """Draw the ceiling of each precision that is not far beyond the bars; return the highest one drawn."""
    limits = {str(row["precision"]): row["ceiling_tokens_per_s"] for row in rows if row.get("ceiling_tokens_per_s")}
    near = {precision: limit for precision, limit in limits.items() if limit < 2.3 * most}
    for precision, limit in near.items():
        ax.axvline(limit, color=FAINT, linewidth=1.2, linestyle=(0, (4, 3)))
        ax.text(
            limit - 0.01 * most,
            len(rows) - 0.5,
            f"the {precision} limit: {format_count(round(limit, -3))} ",
            ha="right",
            va="bottom",
            color=FAINT,
            size=9,
        )
    return max(near.values(), default=0.0)


def _draw_plan_accuracy(canvas: Figure, result: dict[str, Any]) -> None:
    rows: list[Row] = result["rows"]
    canvas.set_size_inches(10.8, 1.8 + 0.3 * len(rows))
    left, right = canvas.subplots(1, 2, sharey=True)
    _draw_errors(left, rows, "memory_gib", 0.05, "{:.1f}".format)
    _draw_errors(right, rows, "tokens_per_s", 0.10, lambda rate: f"{rate / 1e3:,.4g}k")
    for ax, title in ((left, "memory, GiB"), (right, "tokens/s")):
        ax.set_title(title, loc="left", size=10.5, weight="bold")
        ax.set_title("planned → measured", loc="right", size=9, color=FAINT)
        ax.set_xlabel("planned ÷ measured − 1", loc="left")
    left.set_yticks(range(len(rows)), [_short(row) for row in rows])
    left.set_ylim(len(rows) - 0.4, -0.6)
    is_fitted = any(row.get("planned_before") for row in rows)
    about = ": after fitting (full) and before (hollow)" if is_fitted else ""
    headed(canvas, result, f"The plan against real steps on one {result['machine']['name']}{about}")


def _draw_errors(ax: Axes, rows: Sequence[Row], key: str, most: float, show: Callable[[float], str]) -> None:
    """Draw a dot for each case at the error of its plan, red beyond `most`, and both figures at the right.

    A hollow dot is the error of the plan before its constants were fitted to the case, where the result has it.
    """
    for width, colour in _BANDS:
        ax.axvspan(-width, width, color=colour, zorder=0, linewidth=0)
    ax.axvline(0, color=FAINT, linewidth=0.8)
    for place, row in enumerate(rows):
        if (before := _error({**row, "planned": row.get("planned_before") or {}}, key)) is not None:
            _draw_error(ax, place, before, FAINT, hollow=True)
        if (error := _error(row, key)) is not None:
            _draw_error(ax, place, error, ACCENT if abs(error) > most else INK)
        values = " → ".join(
            "–" if row[side].get(key) is None else show(row[side][key]) for side in ("planned", "measured")
        )
        ax.text(_REACH + 0.19, place, values, ha="right", va="center", size=8.5, color=FAINT)
    ax.set_xlim(-_REACH - 0.01, _REACH + 0.19)
    ax.set_xticks([-0.1, -0.05, 0, 0.05, 0.1], ["−10", "−5", "0", "+5", "+10 %"])
    ax.spines["left"].set_visible(False)
    ax.spines["bottom"].set_visible(False)


def _draw_error(ax: Axes, place: int, error: float, colour: str, *, hollow: bool = False) -> None:
    """Draw an error; one beyond the axis is drawn at its end, with its value."""
    fill = {"markerfacecolor": "none", "markeredgewidth": 1.0} if hollow else {"markeredgewidth": 0}
    if abs(error) <= _REACH:
        ax.plot(error, place, "o", color=colour, markersize=5.5, **fill)
        return
    ax.plot(_REACH if error > 0 else -_REACH, place, ">" if error > 0 else "<", color=colour, markersize=6, **fill)
    side = "right" if error > 0 else "left"
    near = (_REACH - 0.008) * (1 if error > 0 else -1)
    ax.text(near, place - (0.3 if hollow else 0.0), f"{error:+.0%}", ha=side, va="center", size=8.5, color=colour)


def _error(row: Row, key: str) -> float | None:
    """Return the relative error of the plan; older results have only the two values."""
    planned, measured = row["planned"].get(key), row["measured"].get(key)
    return planned / measured - 1 if planned and measured else None


def _short(row: Row) -> str:
    text = str(row.get("name") or row["case"])
    for section in ("pretrain-", "train.", "data.", "model."):
        text = text.replace(section, "")
    return text if len(text) <= _LABEL else text[: _LABEL - 1] + "…"


def _draw_laptop(canvas: Figure, result: dict[str, Any]) -> None:
    """Draw the curve of each arm's first seed."""
    canvas.set_size_inches(9.0, 5.2)
    ax = canvas.subplots()
    first = {row["arm"]: row for row in reversed(result["rows"])}
    for colour, entry in zip((ACCENT, INK, SECOND, FAINT, "#3b7dd8"), result["comparison"], strict=False):
        points = [point for point in first[entry["arm"]]["evaluations"] if point["loss"] is not None]
        label = f"{entry['arm']}: {points[-1]['loss']:.2f} at {entry['tokens_per_s']:,.0f} tokens/s"
        ax.plot([p["seconds"] for p in points], [p["loss"] for p in points], color=colour, label=label, linewidth=1.8)
    ax.set_xlabel("seconds of training, compiling included")
    ax.set_ylabel("validation loss")
    ax.grid(visible=True)
    ax.set_xlim(left=0)
    ax.legend(frameon=False)
    headed(canvas, result, f"The same text, cores and time on one {result['machine']['name']}")


_PICTURES = {
    "laptop": _draw_laptop,
    "throughput": _draw_throughput,
    "finetune": _draw_throughput,
    "plan-accuracy": _draw_plan_accuracy,
    "plan-accuracy-held-out": _draw_plan_accuracy,
    "time-to-loss": draw_time_to_loss,
}
