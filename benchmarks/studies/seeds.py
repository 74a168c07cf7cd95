"""Compare the final losses of two ways of computing blocks over many seeds.

    python -m benchmarks.studies.seeds FOLDER TOKENS_DIR WAY [key=value …]     trains a small model with each seed
    python -m benchmarks.studies.seeds FOLDER                                  compares all ways with the first

The loss of a single run is noisy, so the difference between two runs says little. Here every seed (weights and order of
data) gives a pair of runs, and the mean difference over the pairs has a standard error. The ways are those of
`gradients.py`.
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
from benchmarks.studies.runs import run_main
from redline.bench.setting import TINY
from redline.data.corpus import load_text
from redline.recipe.load import load
from redline.recipe.lock import git_state, versions
from redline.runs.monitor import SilentView
from redline.training.step import step_batch
from redline.training.trial import trainer_without_run

SEEDS = range(1, 11)
STEPS, LAST = 200, 50
SMALL = ("model.layers=12", "model.d_model=768", "model.heads=12", "model.d_ff=2048")


def losses(words: tuple[str, ...], steps: int) -> list[float]:
    data = load_text(load("pretrain-350m", list(words)).recipe)
    job = objective(words, data)
    values = []
    with trainer_without_run(job.resolved, job, SilentView()) as trainer:
        trainer.build()
        for step in range(steps):
            batch = step_batch(job, batches(job, step, job.resolved.batch.micro))
            values.append(trainer.train_step(step, batch, min(1.0, (step + 1) / WARMUP)).loss)
    return [round(loss, 5) for loss in torch.stack(values).tolist()]


def train(out: Path, source: str, way: str, overrides: list[str]) -> None:
    gpu = torch.cuda.is_available()
    ways = WAYS if gpu else ON_A_CPU
    if way not in ways:
        sys.exit(f"There is no way {way!r}. Choose from: {'; '.join(ways)}")
    common = (
        *(SMALL if gpu else (*TINY, f"train.global_batch={BATCH}")),
        f"data.source={source}",
        *overrides,
        *ways[way],
    )
    record: dict[str, Any] = {"way": way, "words": list(common), "versions": versions(), "git": git_state()}
    record["losses"] = {}
    record["device"] = torch.cuda.get_device_name() if gpu else "cpu"
    for seed in SEEDS if gpu else range(1, 3):
        record["losses"][seed] = losses((*common, f"train.seed={seed}"), STEPS if gpu else 10)
        out.write_text(json.dumps(record) + "\n", encoding="utf-8")
        print(f"{way}, seed {seed}: {statistics.fmean(record['losses'][seed][-LAST:]):.4f}", flush=True)


def compare(folder: Path) -> None:
    """Print the mean difference between runs of the same seed, with its standard error."""
    files = sorted(folder.glob("way-*.json"))
    ways = {record["way"]: record["losses"] for record in (json.loads(file.read_text()) for file in files)}
    if len(ways) < 2:
        sys.exit(f"{folder} holds the results of {len(ways)} ways. Train at least two.")
    first = next(name for name in (*WAYS, *ON_A_CPU) if name in ways)
    for way, curves in ways.items():
        pairs = [(curve[-LAST:], ways[first][seed][-LAST:]) for seed, curve in curves.items() if seed in ways[first]]
        gaps = [statistics.fmean(losses) - statistics.fmean(reference) for losses, reference in pairs]
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
    source, way, *overrides = rest
    name = "".join(letter if letter.isalnum() else "-" for letter in way)
    train(Path(folder) / f"way-{name}.json", source, way, overrides)


if __name__ == "__main__":
    run_main(main)
