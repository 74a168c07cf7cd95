"""`quickstart` beside what others would train on this CPU with the same text, cores and minutes.

Each arm trains for the same time. The table says when redline passes the final loss of each peer, and divides that gain
into speed (tokens per second) and learning (tokens until that loss).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from redline.bench.child import ChildError, TrainedRun, ask, train
from redline.bench.record import Row
from redline.errors import UsageError
from redline.units import format_seconds

OURS, OUR_ADAMW = "redline", "redline-adamw"
WINDOWS = 128  # held-out sequences of a point of the curve; the final loss is over all of them
# The words that won each peer's trials (docs/decisions/0030-cpu-steps.md).
_NANOGPT = ("train.lr=4e-3", "train.schedule=wsd", "train.decay_fraction=0.4", "train.min_lr_ratio=0.0")
# A warm-up of 100 steps: at 1e-2 it took AdamW from 3.47 to 2.89 in the trials.
_WARMUP = "train.warmup_steps=100"
_ADAMW = ("train.lr=3e-3", _WARMUP, "train.schedule=wsd", "train.decay_fraction=0.4", "train.min_lr_ratio=0.0")
_OUR_ADAMW = ("train.optimizer=adamw", "train.lr=3e-3", _WARMUP, "train.betas=[0.9,0.95]")
ARMS: dict[str, tuple[str, tuple[str, ...]]] = {
    OURS: ("`redline train quickstart`", ()),
    "nanogpt": ("nanoGPT's loop, GPT-2 of the same depth and width, tuned AdamW, bf16 autocast", _NANOGPT),
    "nanogpt-compiled": ("the same, compiled; the budget includes compiling", (*_NANOGPT, "train.compile=true")),
    "adamw": (
        "redline's architecture (transformers' Qwen3) in a plain torch loop, tuned AdamW, bf16 autocast",
        _ADAMW,
    ),
    "trainer": ("the same model in transformers' Trainer, bf16", ("train.lr=3e-3",)),
    OUR_ADAMW: (
        "`redline train quickstart` with tuned AdamW: the same step, so only the optimizer differs",
        _OUR_ADAMW,
    ),
}
FIRST_SEED = 1337
LIMIT_S = 1800.0
BUSY = 0.15  # share of the CPU's time from which the table says that the machine was busy


def busy_share(seconds: float = 1.0) -> float:
    """Return the share of the time that the cores work while this process waits; 0 where the system does not tell.

    The load average would still count the arm that has just ended.
    """
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    first = _ticks(stat)
    time.sleep(seconds)
    idle, total = (after - before for before, after in zip(first, _ticks(stat), strict=True))
    return 1.0 - idle / total if total else 0.0


def _ticks(stat: Path) -> tuple[int, int]:
    """Return how long the cores have been idle, and all of their time."""
    fields = [int(field) for field in stat.read_text(encoding="ascii").splitlines()[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)


def choose_arms(only: str | None) -> list[str]:
    """Return the arms to train: redline's always, because the others are compared with it."""
    names = list(ARMS) if only is None else [OURS, *(name for name in only.split(",") if name != OURS)]
    if unknown := [name for name in names if name not in ARMS]:
        raise UsageError(f"there is no arm {unknown[0]!r}.", where="--only", fix=f"Choose from {', '.join(ARMS)}.")
    return names


def run_laptop(arms: Sequence[str], seeds: Sequence[int], seconds: float, known: Sequence[Row]) -> Iterator[Row]:
    """Train each arm once per seed, redline first: its model's depth and width are those of the peers.

    Arms of `known` rows are not trained again.
    """
    done = {row["name"]: row for row in known if "error" not in row and row["budget_s"] == seconds}
    shape: dict[str, Any] = next((row["recipe"] for row in done.values() if row["arm"] == OURS), {})
    for seed in seeds:
        for arm in arms:
            name = f"{arm} · seed {seed}"
            if name in done:
                continue
            busy = busy_share()
            warnings = [f"the machine was busy ({busy:.0%} of its time) when this arm began"] if busy > BUSY else []
            row: Row = {"name": name, "arm": arm, "seed": seed, "about": ARMS[arm][0], "budget_s": seconds}
            try:
                if arm == OURS:
                    figures = _redline(seed, seconds)
                    shape = figures["recipe"]
                elif arm == OUR_ADAMW:
                    figures = _redline(seed, seconds, [*_shape(shape["model"], shape["model"]["d_ff"]), *ARMS[arm][1]])
                else:
                    figures = _peer(arm, seed, seconds, shape)
            except ChildError as error:
                yield row | {"error": str(error), "warnings": warnings}
                continue
            yield row | figures | {"warnings": warnings}


def _redline(seed: int, seconds: float, more: Sequence[str] = ()) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        words = [
            "quickstart",
            f"train.hours={seconds:g}s",
            f"train.seed={seed}",
            "train.device=cpu",
            f"eval.sequences={WINDOWS}",
            "eval.every=120",
            "eval.samples=0",
            "monitor.log_every=5",
            *more,
        ]
        run = train(words, Path(folder) / "run", limit_s=LIMIT_S)
        final = _evaluate(Path(folder) / "run")
    return _figures(run) | final | {"recipe": run.lock["recipe"]}


def _evaluate(run: Path) -> dict[str, Any]:
    """Return the loss and the bits per byte over all held-out text."""
    from redline.api import open_run

    measured = open_run(run).evaluate()
    return {"final_loss": measured["loss"], "bits_per_byte": measured["bits_per_byte"]}


def _figures(run: TrainedRun) -> dict[str, Any]:
    """Return the curve of redline's run, on its own clock, which includes evaluations and saves."""
    steps = {event["step"]: event for event in run.of_type("step")}
    curve = []
    for event in run.of_type("eval"):
        at = steps.get(event["step"])
        if event["step"] == 0 or at is not None:
            seconds = 0.0 if at is None else 3600 * at["hours"]
            curve.append({"step": event["step"], "tokens": at["tokens"] if at else 0, "seconds": round(seconds, 3)})
            curve[-1]["loss"] = event["loss"]
    last = run.of_type("step")[-1]
    return {
        "steps": last["step"],
        "tokens": last["tokens"],
        "seconds": round(3600 * last["hours"], 2),
        "tokens_per_s": last["tokens"] / (3600 * last["hours"]),
        "warmup_s": 0.0,
        "evaluations": curve,
        "parameters": run.lock["parameters"]["total"],
        "git": run.lock["git"],
    }


def _shape(model: dict[str, Any], d_ff: int) -> list[str]:
    own = {key: model[key] for key in ("layers", "d_model", "heads")}
    return [f"model.{key}={value}" for key, value in {**own, "d_ff": d_ff}.items()]


def _peer(arm: str, seed: int, seconds: float, ours: dict[str, Any]) -> dict[str, Any]:
    model, data, batch = ours["model"], ours["data"], ours["train"]["global_batch"]
    ff = 4 * model["d_model"] if arm.startswith("nanogpt") else model["d_ff"]
    words = [
        f"data.source={data['source']}",
        f"data.tokenizer={data['tokenizer']}",
        f"data.seq_len={data['seq_len']}",
        *_shape(model, ff),
        f"train.global_batch={batch}",
        f"train.micro_batch={batch}",
        f"train.seed={seed}",
        "train.device=cpu",
        f"train.precision={ours['train']['precision']}",
        "train.compile=false",
        f"eval.sequences={WINDOWS}",
        *ARMS[arm][1],
    ]
    with tempfile.TemporaryDirectory() as folder:
        request = {"arm": arm, "words": words, "seconds": seconds, "folder": folder}
        return ask("benchmarks.peers.laptop", request, LIMIT_S) | {"words": words}


def compare(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return for each peer, averaged over the seeds, when redline passes its final loss, and what the gain is made of.

    The losses compared are points of the curves, on the same windows for all.
    """
    from statistics import fmean

    ours = {row["seed"]: row for row in rows if row["arm"] == OURS and "error" not in row}
    entries = []
    for arm in ARMS:
        peers = [row for row in rows if row["arm"] == arm and "error" not in row and row["seed"] in ours]
        if not peers:
            continue
        passed = [_passing(ours[row["seed"]], row) for row in peers]
        entry: dict[str, Any] = {
            "arm": arm,
            "seeds": len(peers),
            **{key: fmean(row[key] for row in peers) for key in ("tokens_per_s", "warmup_s", "final_loss")},
            "bits_per_byte": fmean(row["bits_per_byte"] for row in peers),
        }
        if arm != OURS and all(passed):
            found = [one for one in passed if one]
            entry |= {key: fmean(one[key] for one in found) for key in found[0]}
        entries.append(entry)
    return entries


def _passing(ours: Row, peer: Row) -> dict[str, float] | None:
    """Return when redline passes the peer's final loss: its seconds, and its gain as speed times learning."""
    last = peer["evaluations"][-1]
    before = None
    for now in ours["evaluations"]:
        if now["loss"] <= last["loss"]:
            share = 0.0 if before is None else (before["loss"] - last["loss"]) / (before["loss"] - now["loss"])
            start = before or now
            seconds = start["seconds"] + share * (now["seconds"] - start["seconds"])
            tokens = start["tokens"] + share * (now["tokens"] - start["tokens"])
            return {
                "passes_s": seconds,
                "of_its_time": seconds / last["seconds"],
                "by_learning": last["tokens"] / max(1.0, tokens),
                "by_speed": (tokens / seconds) / (last["tokens"] / last["seconds"]),
            }
        before = now
    return None


COLUMNS = (
    "",
    "tokens/s",
    "warm-up",
    "final loss",
    "bits per byte",
    "redline passes it",
    "of its time",
    "by learning",
    "by speed",
)


def cells(entry: dict[str, Any]) -> list[str]:
    own = [
        entry["arm"],
        f"{entry['tokens_per_s']:,.0f}",
        f"{entry['warmup_s']:.0f} s",
        f"{entry['final_loss']:.3f}",
        f"{entry['bits_per_byte']:.3f}",
    ]
    if entry["arm"] == OURS:
        return [*own, "", "", "", ""]
    if "passes_s" not in entry:
        return [*own, "never", "", "", ""]
    ratios = (f"{entry[key]:.2f}" for key in ("of_its_time", "by_learning", "by_speed"))
    return [*own, f"after {format_seconds(entry['passes_s'])}", *ratios]


def lines(result: dict[str, Any]) -> list[str]:
    """Return the table for a terminal."""
    table = [list(COLUMNS), *(cells(entry) for entry in result["comparison"])]
    widths = [max(len(row[column]) for row in table) for column in range(len(COLUMNS))]
    text = []
    for first, *rest in table:
        padded = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        text.append("  ".join([first.ljust(widths[0]), *padded]))
    skipped = [f"{row['name']} was skipped: {row['error']}" for row in result["rows"] if "error" in row]
    return [*text, *skipped, CAVEAT]


CAVEAT = "The seconds are those of this machine; the ratios carry over to others."


def sections(result: dict[str, Any]) -> list[str]:
    """Return the Markdown of a result: what each arm is, and the table."""
    rule = ["---"] * len(COLUMNS)
    table = [list(COLUMNS), rule, *(cells(entry) for entry in result["comparison"])]
    arms = [f"- `{entry['arm']}`: {ARMS[entry['arm']][0]}" for entry in result["comparison"]]
    return ["\n".join(arms), "\n".join(f"| {' | '.join(row)} |" for row in table), CAVEAT]
