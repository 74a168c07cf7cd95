"""Whether one way of computing blocks learns what another does, over many seeds.

    python -m benchmarks.studies.seeds FOLDER TOKENS_DIR WAY [key=value …]     trains a small model with each seed
    python -m benchmarks.studies.seeds FOLDER                                  compares what is there with the first way

One run's spikes fall where they fall, and a gap between two runs says little. Here every seed (weights and order of
data) gives a pair, and the mean of the pairs' gaps has an error that can be stated. A way is one of `gradients.py`.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.studies.gradients import BATCH, ON_A_CPU, WARMUP, WAYS, batches, objective
from benchmarks.studies.runs import said
from redline.bench.setting import TINY
from redline.data.corpus import load_text
from redline.recipe.load import load
from redline.recipe.lock import git_state, versions
from redline.training.step import step_batch
from redline.training.trial import SilentView, trainer_without_run

SEEDS = range(1, 11)
STEPS, LAST = 200, 50
SMALL = ("model.layers=12", "model.d_model=768", "model.heads=12", "model.d_ff=2048")


def losses(words: tuple[str, ...], steps: int) -> list[float]:
    data = load_text(load("pretrain-350m", list(words)).recipe)
    job = objective(words, data)
    found = []
    with trainer_without_run(job.resolved, job, SilentView()) as trainer:
        trainer.build()
        for step in range(steps):
            batch = step_batch(job, batches(job, step, job.resolved.batch.micro))
            found.append(trainer.train_step(step, batch, min(1.0, (step + 1) / WARMUP)).loss)
    return [round(loss, 5) for loss in torch.stack(found).tolist()]


def train(out: Path, source: str, way: str, given: list[str]) -> None:
    gpu = torch.cuda.is_available()
    ways = WAYS if gpu else ON_A_CPU
    if way not in ways:
        sys.exit(f"{way!r} is none of: {'; '.join(ways)}")
    common = (*(SMALL if gpu else (*TINY, f"train.global_batch={BATCH}")), f"data.source={source}", *given, *ways[way])
    kept: dict[str, Any] = {"way": way, "words": list(common), "versions": versions(), "git": git_state(), "losses": {}}
    kept["device"] = torch.cuda.get_device_name() if gpu else "cpu"
    for seed in SEEDS if gpu else range(1, 3):
        kept["losses"][seed] = losses((*common, f"train.seed={seed}"), STEPS if gpu else 10)
        out.write_text(json.dumps(kept) + "\n", encoding="utf-8")
        print(f"{way}, seed {seed}: {statistics.fmean(kept['losses'][seed][-LAST:]):.4f}", flush=True)


def compare(folder: Path) -> None:
    """Pairs of the same seed: the mean of their gaps, with its standard error."""
    files = sorted(folder.glob("way-*.json"))
    ways = {found["way"]: found["losses"] for found in (json.loads(file.read_text()) for file in files)}
    if len(ways) < 2:
        sys.exit(f"{folder} has fewer than two ways to compare.")
    first = next(name for name in (*WAYS, *ON_A_CPU) if name in ways)
    for way, curves in ways.items():
        pairs = [(curve[-LAST:], ways[first][seed][-LAST:]) for seed, curve in curves.items() if seed in ways[first]]
        gaps = [statistics.fmean(one) - statistics.fmean(other) for one, other in pairs]
        if way != first and len(gaps) > 1:
            error = statistics.stdev(gaps) / math.sqrt(len(gaps))
            print(f"{way} − {first}: {statistics.fmean(gaps):+.4f} ± {error:.4f} over {len(gaps)} seeds")


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: python -m benchmarks.studies.seeds FOLDER [TOKENS_DIR WAY [key=value …]]")
    folder, *rest = sys.argv[1:]
    if len(rest) < 2:
        compare(Path(folder))
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    source, way, *given = rest
    name = "".join(letter if letter.isalnum() else "-" for letter in way)
    train(Path(folder) / f"way-{name}.json", source, way, given)


if __name__ == "__main__":
    said(main)
