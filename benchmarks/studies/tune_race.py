"""Tune learning rates and batch sizes for `python -m benchmarks time-to-loss`, with a fixed number of tokens per trial.

    python -m benchmarks.studies.tune_race OUT.json TOKENS_DIR [--at-once 3] [--share 1] [NAME …]
    python -m benchmarks.studies.tune_race OUT.json TOKENS_DIR --parts | --adamw

Several trials share the card, so that one compiles while another trains: the losses are valid, the times are not. The
tokens of a trial are its budget in seconds times the throughput measured by `redline bench throughput` or an earlier
time-to-loss run, or estimated by the plan. Trials that OUT.json already holds are not repeated. Without a GPU the
models are tiny, which only tests the script.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from benchmarks.studies.runs import evaluations, read_existing, run_training
from benchmarks.time_to_loss import ADAMW, BASELINE, EVALUATIONS, RECIPES, words_for
from redline.bench.child import ChildError, ask
from redline.bench.setting import UNDISTURBED, with_defaults

LENGTH = 1024  # tokens of a sequence
LIMIT_S = 900
NO_OTHER_STOP = (*(f"train.{key}=null" for key in ("tokens", "epochs", "hours", "target_loss")), "eval.patience=null")
DECAYED = ("train.schedule=wsd", "train.min_lr_ratio=0.0", "train.decay_fraction=0.6")
NORMUON = ("train.optimizer=normuon", "train.precision=fp8", "model.init=zero", *DECAYED)


@dataclass(frozen=True)
class Trial:
    arm: str
    tokens: int  # processed within its time budget
    batch: int
    words: tuple[str, ...]

    def steps(self, share: float) -> int:
        return max(1, round(share * self.tokens / (self.batch * LENGTH)))


def pretrain(muon_lr: str, lr: str, batch: int, *more: str, thousands: int = 280, seconds: int = 40) -> Trial:
    """Return a trial of `seconds` (a third of two minutes by default) at `thousands` × 1000 tokens per second."""
    words = (*NORMUON, f"train.muon_lr={muon_lr}", f"train.lr={lr}", *more)
    return Trial("pretrain-350m", 1000 * thousands * seconds, batch, words)


# The settings of `speedrun-50m` at the time of its first trials.
FIRST_SPEEDRUN = (
    *("model.mlp=relu2", "model.tied=false", "model.embedding_std=0.02", "model.value_embeddings=1"),
    *("train.betas=[0.9,0.95]", "train.weight_decay=0.1"),
)


def speedrun(muon_lr: str, lr: str, batch: int, layers: int, d_model: int, *more: str, thousands: int) -> Trial:
    """Return a trial of a fifth of two minutes at `thousands` × 1000 tokens per second, with heads of 128 channels."""
    shape = (f"model.layers={layers}", f"model.d_model={d_model}")
    heads = (f"model.heads={d_model // 128}", f"model.d_ff={4 * d_model}")
    words = (f"train.muon_lr={muon_lr}", f"train.lr={lr}", *shape, *heads, *FIRST_SPEEDRUN, *more)
    return Trial("speedrun-50m", 24_000 * thousands, batch, words)


def baseline(lr: str, batch: int, *more: str, thousands: int) -> Trial:
    """Return a trial of two minutes of GPT-2 medium in nanoGPT's style."""
    return Trial(BASELINE, 120_000 * thousands, batch, (f"train.lr={lr}", *more))


def adamw(lr: str, batch: int, *more: str, thousands: int = 190, seconds: int = 30) -> Trial:
    """Return a trial of 30 seconds of `pretrain-350m` with AdamW in bf16, the arm that decides."""
    return Trial(ADAMW, 1000 * thousands * seconds, batch, (f"train.lr={lr}", *more))


# The trials of the arm with AdamW: nine, as many as the baseline and the arm with NorMuon had on a GPU. They include
# what helped those two: a small batch, a long warm-up, other betas without decay, a schedule that falls at the end.
_OTHER_BETAS = ("train.betas=[0.7,0.998]", "train.weight_decay=0")
ADAMW_TRIALS: dict[str, Trial] = {
    "adamw 6e-4 16": adamw("6e-4", 16),
    "adamw 6e-4 16, a fifth of it warming up": adamw("6e-4", 16, "train.warmup_steps=70"),
    "adamw 1e-3 16, a fifth of it warming up": adamw("1e-3", 16, "train.warmup_steps=70"),
    "adamw 2e-3 16, a fifth of it warming up": adamw("2e-3", 16, "train.warmup_steps=70"),
    "adamw 1e-3 16, falling over the last 0.6": adamw("1e-3", 16, "train.warmup_steps=70", *DECAYED),
    "adamw 1e-3 16, betas 0.9 0.99": adamw("1e-3", 16, "train.warmup_steps=70", "train.betas=[0.9,0.99]", *DECAYED),
    "adamw 1e-3 16, betas 0.7 0.998, no decay": adamw("1e-3", 16, "train.warmup_steps=70", *_OTHER_BETAS, *DECAYED),
    "adamw 1e-3 16, small embeddings": adamw(
        "1e-3", 16, "train.warmup_steps=70", "model.init=zero", "model.embedding_std=0.005", *_OTHER_BETAS, *DECAYED
    ),
    "adamw 1e-3 8, falling over the last 0.6": adamw("1e-3", 8, "train.warmup_steps=140", *DECAYED, thousands=170),
}
# What the second betas, the decay and the schedule of the other arms are worth to the baseline.
BASELINE_TRIALS: dict[str, Trial] = {
    "nanogpt 6e-4 16, falling over the last 0.6": baseline(
        "6e-4", 16, "train.warmup_steps=280", "train.schedule=wsd", "train.decay_fraction=0.6", thousands=192
    ),
    "nanogpt 6e-4 16, betas 0.9 0.99": baseline(
        "6e-4", 16, "train.warmup_steps=280", "train.betas=[0.9,0.99]", thousands=192
    ),
    "nanogpt 6e-4 16, betas 0.7 0.998, no decay": baseline(
        "6e-4", 16, "train.warmup_steps=280", *_OTHER_BETAS, thousands=192
    ),
}
TRIALS: dict[str, Trial] = {
    **ADAMW_TRIALS,
    **BASELINE_TRIALS,
    "nanogpt 6e-4 16, a fifth of it warming up": baseline("6e-4", 16, "train.warmup_steps=280", thousands=192),
    "nanogpt 1e-3 16, a fifth of it warming up": baseline("1e-3", 16, "train.warmup_steps=280", thousands=192),
    "nanogpt 4e-4 8": baseline("4e-4", 8, thousands=176),
    "nanogpt 6e-4 12": baseline("6e-4", 12, thousands=186),
    "nanogpt 6e-4 12, a fifth of it warming up": baseline("6e-4", 12, "train.warmup_steps=370", thousands=186),
    **{
        f"pretrain 0.01 1.2e-2 16, momentum 0.9, betas 0.7 0.998, no decay, {seconds} s": pretrain(
            *("0.01", "1.2e-2", 16, "model.embedding_std=0.005", "train.graph=true", "train.muon_momentum=0.9"),
            *("train.betas=[0.7,0.998]", "train.weight_decay=0"),
            thousands=210,
            seconds=seconds,
        )
        for seconds in (24, 96)
    },
    # The rate of 1.2e-2 is too high for the first hundred steps: try lower rates and longer warm-ups.
    **{
        f"pretrain 0.01 {lr} 16, momentum 0.9, betas 0.7 0.998, no decay, 25 s, {warmup} steps of warm-up": pretrain(
            *("0.01", lr, 16, "model.embedding_std=0.005", "train.graph=true", "train.muon_momentum=0.9"),
            *("train.betas=[0.7,0.998]", "train.weight_decay=0", f"train.warmup_steps={warmup}"),
            thousands=210,
            seconds=25,
        )
        for lr, warmup in (("3e-3", 20), ("6e-3", 20), ("6e-3", 60), ("1.2e-2", 120))
    },
    "pretrain 0.02 3e-3 32": pretrain("0.02", "3e-3", 32),
    "pretrain 0.01 3e-3 32": pretrain("0.01", "3e-3", 32),
    "pretrain 0.02 3e-3 16": pretrain("0.02", "3e-3", 16),
    "pretrain 0.02 3e-3 16, small embeddings": pretrain(
        "0.02", "3e-3", 16, "model.embedding_std=0.005", "train.graph=true", thousands=225
    ),
    **{
        f"pretrain {muon} {lr} 16, a fifth of 8 minutes": pretrain(
            *(muon, lr, 16, "model.embedding_std=0.005", "train.graph=true"), thousands=216, seconds=96
        )
        for muon, lr in (("0.02", "3e-3"), ("0.02", "1.2e-2"), ("0.01", "1.2e-2"), ("0.02", "2.4e-2"))
    },
    **{
        f"pretrain 0.01 1.2e-2 16, momentum 0.9, betas {first} {second}, a fifth of 8 minutes": pretrain(
            *("0.01", "1.2e-2", 16, "model.embedding_std=0.005", "train.graph=true", "train.muon_momentum=0.9"),
            f"train.betas=[{first},{second}]",
            thousands=210,
            seconds=96,
        )
        for first, second in ((0.9, 0.95), (0.9, 0.99), (0.8, 0.99))
    },
    "pretrain 0.02 3e-3 8": pretrain("0.02", "3e-3", 8, "train.graph=true", thousands=190),
    "speedrun 12 × 768": speedrun("0.02", "6e-3", 32, 12, 768, thousands=700),
    "speedrun 8 × 768": speedrun("0.02", "6e-3", 32, 8, 768, thousands=900),
    "speedrun 8 × 512": speedrun("0.02", "6e-3", 32, 8, 512, thousands=1300),
    "speedrun 8 × 512, 16": speedrun("0.02", "6e-3", 16, 8, 512, thousands=1000),
    "speedrun 8 × 512, 1.2e-2": speedrun("0.02", "1.2e-2", 32, 8, 512, thousands=1200),
}


# The effect of each part on `speedrun-50m` in a tenth of two minutes. Each trial differs from the first in this alone.
PARTS: dict[str, tuple[str, ...]] = {
    "all": (),
    "all, seed 1338": ("train.seed=1338",),
    "no QK norm": ("model.qk_norm=false",),
    "a value embedding": ("model.value_embeddings=1",),
    "squared ReLU": ("model.mlp=relu2", "model.d_ff=2048"),
    "heads of 64": ("model.heads=8",),
    "GPT-2's initialisation": ("model.init=gpt2",),
    "an untied head": ("model.tied=false", "model.embedding_std=0.02"),
    "softcap 15": ("model.softcap=15",),
    "x0 skips": ("model.skips=x0",),
    "U-net skips": ("model.skips=unet",),
    "Muon": ("train.optimizer=muon",),
    "AdamW": ("train.optimizer=adamw", "train.lr=2e-3"),
    "decay": ("train.weight_decay=0.1",),
    "cautious decay": ("train.weight_decay=0.1", "train.cautious=true"),
    "bf16": ("train.precision=bf16",),
    "a cosine": ("train.schedule=cosine",),
    "momentum rising": ("train.muon_momentum_warmup=100",),
    "four quintics": ("train.muon_steps=4",),
    "Muon's rate 0.04": ("train.muon_lr=0.04",),
    "Muon's rate 0.01": ("train.muon_lr=0.01",),
    "the rest's rate 1.2e-2": ("train.lr=1.2e-2",),
    "betas 0.9 and 0.95": ("train.betas=[0.9,0.95]",),
}
TRIALS |= {f"part: {name}": Trial("speedrun-50m", 14_400_000, 32, words) for name, words in PARTS.items()}


def settings_of(trial: Trial, source: str, share: float) -> dict[str, Any]:
    """Return the settings that identify a row. Its name does not: an earlier version may have used it differently."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    words = words_for(trial.arm, [*trial.words, f"train.global_batch={trial.batch}", f"data.source={source}"], device)
    return {"words": words, "steps": trial.steps(share)}


CurveAndLock = tuple[list[dict[str, Any]], dict[str, Any]]


def train_baseline(words: list[str], steps: int) -> CurveAndLock:
    """Train nanoGPT's baseline. It takes a time budget, so ask for `steps` seconds at one second per step."""
    answer = ask("benchmarks.peers.nanogpt", {"words": words, "budget_s": steps, "step_ms": 1e3}, LIMIT_S)
    return [{key: point[key] for key in ("step", "tokens", "loss")} for point in answer["evaluations"]], answer["lock"]


def train_redline(arm: str, words: list[str], steps: int) -> CurveAndLock:
    stop = (f"train.steps={steps}", f"eval.every={max(1, steps // EVALUATIONS)}")
    usual = with_defaults([f"train.warmup_steps={max(1, steps // 20)}"], words)
    run = run_training([RECIPES[arm], *UNDISTURBED, *usual, *NO_OTHER_STOP, *stop], LIMIT_S)
    return evaluations(run), run.lock


def run_trial(trial: Trial, words: list[str], steps: int) -> dict[str, Any]:
    try:
        if trial.arm == BASELINE:
            curve, lock = train_baseline(words, steps)
        else:
            curve, lock = train_redline(trial.arm, words, steps)
    except ChildError as error:
        return {"error": str(error)}  # has no settings, so the next call repeats the trial
    return {"loss": curve[-1]["loss"], "evaluations": curve, "words": words, "steps": steps, "lock": lock}


def main() -> None:
    parser = argparse.ArgumentParser(description="Tuning trials for time-to-loss.")
    parser.add_argument("out", type=Path)
    parser.add_argument("source")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--parts", action="store_true", help="run the trials that remove or add one part")
    parser.add_argument("--adamw", action="store_true", help="run the trials of AdamW in bf16, and its baseline's")
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument(
        "--share", type=float, default=1.0, help="train on this share of each trial's tokens, to test the script"
    )
    options = parser.parse_intermixed_args()
    if unknown := [name for name in options.names if name not in TRIALS]:
        sys.exit(f"There is no trial {unknown[0]!r}. Choose from: {'; '.join(TRIALS)}")
    rows = read_existing(options.out, {})
    adamw_alone = [*ADAMW_TRIALS, *BASELINE_TRIALS] if options.adamw else []
    chosen = options.names or adamw_alone or [name for name in TRIALS if name.startswith("part: ") == options.parts]
    settings = {name: settings_of(TRIALS[name], options.source, options.share) for name in chosen}
    finished = [name for name, row in rows.items() if name in settings and settings[name].items() <= row.items()]
    rows_lock = Lock()

    def run_and_store(name: str) -> None:
        row = run_trial(TRIALS[name], **settings[name])
        with rows_lock:
            rows[name] = row
            options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            print(f"{name}: {row.get('loss', row.get('error'))}", flush=True)

    with ThreadPoolExecutor(max(1, options.at_once)) as pool:
        list(pool.map(run_and_store, [name for name in settings if name not in finished]))
    if any("error" in rows[name] for name in settings):
        sys.exit(1)  # each error is printed above


if __name__ == "__main__":
    main()
