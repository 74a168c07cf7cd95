"""Learning rates and batches for `python -m benchmarks time-to-loss`: each trial trains on its budget's tokens.

    python -m benchmarks.studies.tune_race OUT.json TOKENS_DIR [--at-once 3] [--share 1] [NAME …]
    python -m benchmarks.studies.tune_race OUT.json TOKENS_DIR --parts

Several share the card, so that compiling hides behind training: seconds mean nothing here, losses do. The tokens of a
trial are its arm's seconds times what `redline bench throughput`, the plan or the race itself give for it. Trials in
OUT.json are not made again. Without a GPU the models are tiny: a look at the script.
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

from benchmarks.studies.runs import kept, looks, trained
from benchmarks.time_to_loss import BASELINE, EVALUATIONS, words_for
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
    tokens: int  # that fit into its budget
    batch: int
    words: tuple[str, ...]

    def steps(self, share: float) -> int:
        return max(1, round(share * self.tokens / (self.batch * LENGTH)))


def pretrain(muon_lr: str, lr: str, batch: int, *more: str, thousands: int = 280, seconds: int = 40) -> Trial:
    """A third of two minutes, or other seconds, at so many thousand tokens each."""
    words = (*NORMUON, f"train.muon_lr={muon_lr}", f"train.lr={lr}", *more)
    return Trial("pretrain-350m", 1000 * thousands * seconds, batch, words)


# What `speedrun-350m` was when its first trials were made.
AT_FIRST = (
    *("model.mlp=relu2", "model.tied=false", "model.embedding_std=0.02", "model.value_embeddings=1"),
    *("train.betas=[0.9,0.95]", "train.weight_decay=0.1"),
)


def speedrun(muon_lr: str, lr: str, batch: int, layers: int, d_model: int, *more: str, thousands: int) -> Trial:
    """A fifth of it, at so many thousand tokens a second, by the first of its shapes. Heads are 128 wide."""
    shape = (f"model.layers={layers}", f"model.d_model={d_model}")
    heads = (f"model.heads={d_model // 128}", f"model.d_ff={4 * d_model}")
    words = (f"train.muon_lr={muon_lr}", f"train.lr={lr}", *shape, *heads, *AT_FIRST, *more)
    return Trial("speedrun-350m", 24_000 * thousands, batch, words)


def baseline(lr: str, batch: int, *more: str, thousands: int) -> Trial:
    """Two minutes of GPT-2 medium in nanoGPT's style."""
    return Trial(BASELINE, 120_000 * thousands, batch, (f"train.lr={lr}", *more))


TRIALS: dict[str, Trial] = {
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
    # a rate that is too high for the first hundred steps: lower ones, and longer warm-ups
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


# What each part is worth to `speedrun-350m` in a tenth of two minutes. A trial differs from the first in this alone.
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
TRIALS |= {f"part: {name}": Trial("speedrun-350m", 14_400_000, 32, words) for name, words in PARTS.items()}


def asked_for(trial: Trial, source: str, share: float) -> dict[str, Any]:
    """What a row is known by: a name may have meant something else."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    words = words_for(trial.arm, [*trial.words, f"train.global_batch={trial.batch}", f"data.source={source}"], device)
    return {"words": words, "steps": trial.steps(share)}


Found = tuple[list[dict[str, Any]], dict[str, Any]]  # its evaluations, and the lock of its run


def by_the_baseline(words: list[str], steps: int) -> Found:
    """Its steps are those that fit into a budget: as many seconds as steps, of a second each."""
    found = ask("benchmarks.peers.nanogpt", {"words": words, "budget_s": steps, "step_ms": 1e3}, LIMIT_S)
    return [{key: point[key] for key in ("step", "tokens", "loss")} for point in found["evaluations"]], found["lock"]


def by_redline(arm: str, words: list[str], steps: int) -> Found:
    last = (f"train.steps={steps}", f"eval.every={max(1, steps // EVALUATIONS)}")
    usual = with_defaults([f"train.warmup_steps={max(1, steps // 20)}"], words)
    run = trained([arm, *UNDISTURBED, *usual, *NO_OTHER_STOP, *last], LIMIT_S)
    return looks(run), run.lock


def tried(trial: Trial, words: list[str], steps: int) -> dict[str, Any]:
    try:
        curve, lock = by_the_baseline(words, steps) if trial.arm == BASELINE else by_redline(trial.arm, words, steps)
    except ChildError as error:
        return {"error": str(error)}  # to be tried again
    return {"loss": curve[-1]["loss"], "evaluations": curve, "words": words, "steps": steps, "lock": lock}


def main() -> None:
    parser = argparse.ArgumentParser(description="Tuning trials of the race to a loss.")
    parser.add_argument("out", type=Path)
    parser.add_argument("source")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--parts", action="store_true", help="those that leave one part away, or add one")
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0, help="of each trial's tokens, for a look at the script")
    options = parser.parse_intermixed_args()
    if strange := [name for name in options.names if name not in TRIALS]:
        sys.exit(f"{strange[0]!r} is none of: {'; '.join(TRIALS)}")
    rows = kept(options.out, {})
    chosen = options.names or [name for name in TRIALS if name.startswith("part: ") == options.parts]
    asked = {name: asked_for(TRIALS[name], options.source, options.share) for name in chosen}
    known = [name for name, row in rows.items() if name in asked and asked[name].items() <= row.items()]
    keeping = Lock()

    def one(name: str) -> None:
        row = tried(TRIALS[name], **asked[name])
        with keeping:
            rows[name] = row
            options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            print(f"{name}: {row.get('loss', row.get('error'))}", flush=True)

    with ThreadPoolExecutor(max(1, options.at_once)) as pool:
        list(pool.map(one, [name for name in asked if name not in known]))
    if any("error" in rows[name] for name in asked):
        sys.exit(1)  # each has said why


if __name__ == "__main__":
    main()
