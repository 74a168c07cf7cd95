"""Can LatentWire read, on a CPU? Train a reader of facts, then 16 latents in place of a paragraph, and ask both.

    python -m benchmarks.studies.latent_facts OUT.json FOLDER [PART …]   parts: reader, wire, ask; all if none is named

FOLDER keeps the runs, so that the parts may be run one by one. The questions are about facts that no training text has
(`facts:8:500@test`). The recipes are the shipped ones, `facts-reader` and `latentwire-facts`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.studies.runs import read_existing, redline

QUESTIONS = 500
READER, WIRE = "facts-reader", "latentwire-facts"
PARTS = ("reader", "wire", "ask")


def train_reader(folder: Path) -> dict[str, Any]:
    redline("train", READER, "--run", str(folder / "reader-run"))
    redline("export", str(folder / "reader-run"), "--out", str(folder / "reader"))
    return described(folder / "reader-run")


def train_wire(folder: Path) -> dict[str, Any]:
    redline("train", WIRE, f"model.base={folder / 'reader'}", "--run", str(folder / "wire-run"))
    return described(folder / "wire-run")


def ask(folder: Path) -> dict[str, Any]:
    data = f"facts:8:{QUESTIONS}@test"
    words = ("--data", data, "--answers", "f1", "--questions", str(QUESTIONS), "--tokens", "4", "--json")
    answers: dict[str, Any] = json.loads(redline("eval", str(folder / "wire-run"), *words).splitlines()[-1])
    return answers


def described(run: Path) -> dict[str, Any]:
    """Return the evaluations of a run, and its lock, which has the commit, seed and versions."""
    lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    kept = [event for event in events if event["type"] == "eval"]
    lock = json.loads((run / "lock.json").read_text(encoding="utf-8"))
    lock.pop("began_in", None)
    return {"events": kept, "lock": lock}


def main() -> None:
    if len(sys.argv) < 3 or (unknown := [part for part in sys.argv[3:] if part not in PARTS]):
        reason = f"There is no part {unknown[0]!r}. " if len(sys.argv) > 2 else ""
        sys.exit(f"{reason}usage: python -m benchmarks.studies.latent_facts OUT.json FOLDER [{' '.join(PARTS)}]")
    out, folder = Path(sys.argv[1]), Path(sys.argv[2])
    record = read_existing(out, {})
    for part in sys.argv[3:] or PARTS:
        record[part] = {"reader": train_reader, "wire": train_wire, "ask": ask}[part](folder)
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
