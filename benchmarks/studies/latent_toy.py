"""Which losses keep the latents of different texts distinct: a latent prefix trained in several ways on toy data.

    python -m benchmarks.studies.latent_toy OUT.json [NAME …]     trains these arms, or all, and adds them to OUT.json

A text names three things with their colours and asks for the colour of one. A decoder of half a million weights is
trained on such texts (`redline train`, `redline export`) and then frozen. Each arm trains a prefix of 8 latents through
it, and `redline eval` asks 100 questions about held-out texts.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.studies.runs import redline

THINGS = ("stone", "river", "king", "light", "token", "block", "mask", "line", "step", "train")
COLOURS = ("red", "blue", "green", "grey", "black", "white")
NAMED = 3
BASE = (
    *("quickstart", "data.tokenizer=train:512", "data.seq_len=64", "model.size=null", "model.layers=4"),
    *("model.d_model=96", "model.heads=4", "train.hours=null", "train.epochs=null", "train.steps=700"),
    *("train.global_batch=32", "train.lr=6e-3", "eval.every=700", "checkpoint.every=700"),
)
PREFIX: dict[str, Any] = {
    "objective": "latent_prefix",
    "latent_prefix": {"d_z": 64, "slots": 8, "layers": 2, "heads": 4, "bytes": 128},
    "train": {"global_batch": 32, "lr": 2e-3, "min_lr_ratio": 0.02, "weight_decay": 0.0, "warmup_steps": 5},
    "data": {"seq_len": 32, "val_fraction": 0.05},
    "eval": {"every": 50, "sequences": 128},
    "checkpoint": {"every": 1000, "best": False},
}
ARMS = {
    "ce": ("latent_prefix.kd_weight=0", "latent_prefix.focus=0", "train.steps=200"),
    "ce, focus": ("latent_prefix.kd_weight=0", "train.steps=200"),
    "ce, kd": ("latent_prefix.focus=0", "train.steps=200"),
    "ce, kd, focus": ("train.steps=200",),
    "ce, kd, focus, words, match": (
        "latent_prefix.words_weight=0.3",
        "latent_prefix.match_weight=1",
        "train.steps=200",
    ),
    "ce, kd, focus: 600 steps": ("train.steps=600",),
}
SMALL = ("train.device=cpu", "train.precision=fp32", "train.compile=false", "eval.samples=0", "monitor.log_every=10")


def make_row(rng: random.Random) -> dict[str, str]:
    things, colours = rng.sample(THINGS, NAMED), rng.sample(COLOURS, NAMED)
    asked = rng.randrange(NAMED)
    context = " ".join(f"The {thing} is {colour}." for thing, colour in zip(things, colours, strict=True))
    return {"question": f"Which colour has the {things[asked]}?", "context": context, "answer": colours[asked]}


def write_data(folder: Path) -> None:
    rng = random.Random(7)
    template = "Question: {question}\nContext: {context}\nAnswer: {answer}"
    write(folder / "texts.jsonl", [{"text": template.format(**make_row(rng))} for _ in range(20000)])
    rows = [make_row(rng) for _ in range(6000)]
    write(folder / "rows.jsonl", list({json.dumps(row): row for row in rows}.values()))


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_base(folder: Path) -> dict[str, Any]:
    start = time.monotonic()
    redline("train", *BASE, *SMALL, f"data.source={folder / 'texts.jsonl'}", "--run", str(folder / "base-run"))
    redline("export", str(folder / "base-run"), "--out", str(folder / "base"))
    recipe = {**PREFIX, "model": {"base": str(folder / "base")}}
    recipe["data"] = {**PREFIX["data"], "source": str(folder / "rows.jsonl")}
    (folder / "prefix.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    return {"words": [*BASE, *SMALL], "seconds": time.monotonic() - start, **last_loss(folder / "base-run")}


def last_loss(run: Path) -> dict[str, Any]:
    return {"loss": next(e["loss"] for e in reversed(events(run)) if e["type"] == "eval")}


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]


def train(name: str, folder: Path) -> dict[str, Any]:
    start, run = time.monotonic(), folder / f"run-{list(ARMS).index(name)}"
    redline("train", str(folder / "prefix.yaml"), *SMALL, *ARMS[name], "--run", str(run))
    output = redline("eval", str(run), "--answers", "f1", "--questions", "100", "--json")
    keys = ("step", "loss", "other_nll_0", "latent_cosine", "first_top1_0")
    curve = [{key: event[key] for key in keys} for event in events(run) if event["type"] == "eval"]
    lock = json.loads((run / "lock.json").read_text(encoding="utf-8"))
    result = {"overrides": ARMS[name], "seconds": time.monotonic() - start, "curve": curve, "lock": lock}
    return {**result, "answers": json.loads(output.splitlines()[-1])}


def main() -> None:
    _, *words = sys.argv
    if not words or (unknown := [name for name in words[1:] if name not in ARMS]):
        reason = f"There is no arm {unknown[0]!r}. " if words else ""
        sys.exit(f"{reason}usage: python -m benchmarks.studies.latent_toy OUT.json [NAME …]; arms: {', '.join(ARMS)}")
    out = Path(words[0])
    record = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"arms": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder)
        record["base"] = make_base(folder)
        for arm in words[1:] or ARMS:
            record["arms"][arm] = train(arm, folder)
            out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
