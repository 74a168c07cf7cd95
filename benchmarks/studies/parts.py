"""Effect of each part of a model or optimizer on the loss of a small model on a CPU: a first test before using a GPU.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.parts OUT.json SOURCE [NAME …]

SOURCE is text or prepared tokens (`redline prepare TEXT --out SOURCE --tokenizer train:4096`). Each arm trains on
614,400 tokens, 300 steps of 16 × 128, in about three minutes of one core. Arms that OUT.json already holds are not
trained again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.studies.runs import evaluations, run_training
from redline.bench.child import ChildError

COMMON = (
    *("data.tokenizer=train:4096", "data.seq_len=128", "data.workers=1"),
    *("model.layers=4", "model.d_model=192", "model.heads=4", "model.d_ff=512"),
    *("train.tokens=null", "train.steps=300", "train.global_batch=16", "train.warmup_steps=5", "train.schedule=wsd"),
    *("train.min_lr_ratio=0.0", "train.device=cpu", "train.precision=fp32", "train.compile=false"),
    *("eval.every=150", "eval.sequences=128", "eval.samples=0", "checkpoint.every=100000", "checkpoint.best=false"),
)
NORMUON = ("train.optimizer=normuon", "train.muon_lr=0.02", "train.lr=6e-3")
BASE = (*NORMUON, "model.qk_norm=true", "model.init=zero")
MANY = (*BASE, "model.mlp=relu2", "model.d_ff=768", "model.heads=2", "model.value_embeddings=1")
# The guides' architecture (SwiGLU, a tied head, no QK norm) in many small steps, as `pretrain-350m` runs in
# `python -m benchmarks time-to-loss`.
GUIDES = (
    *("train.steps=600", "train.global_batch=8", "train.warmup_steps=30", "train.decay_fraction=0.6", "eval.every=300"),
    *("train.optimizer=normuon", "train.muon_lr=0.02", "train.lr=3e-3", "model.init=zero", "model.embedding_std=0.005"),
)
AROUND_THE_GUIDES: dict[str, tuple[str, ...]] = {
    "": (),
    "seed 1": ("train.seed=1",),
    "rate 6e-3": ("train.lr=6e-3",),
    "rate 1.2e-2": ("train.lr=1.2e-2",),
    "muon 0.01": ("train.muon_lr=0.01",),
    "muon 0.04": ("train.muon_lr=0.04",),
    "falling from the start": ("train.decay_fraction=1.0",),
    "no decay": ("train.weight_decay=0",),
    "momentum 0.9": ("train.muon_momentum=0.9",),
    "momentum rising": ("train.muon_momentum_warmup=200",),
    "embedding 0.02": ("model.embedding_std=0.02",),
    "half the batch": ("train.steps=1200", "train.global_batch=4", "eval.every=600"),
    "rate 1.2e-2, seed 1": ("train.lr=1.2e-2", "train.seed=1"),
    "rate 2.4e-2": ("train.lr=2.4e-2",),
    "rate 4.8e-2": ("train.lr=4.8e-2",),
    "rate 1.2e-2, muon 0.01": ("train.lr=1.2e-2", "train.muon_lr=0.01"),
    "rate 1.2e-2, embedding 0.02": ("train.lr=1.2e-2", "model.embedding_std=0.02"),
    "rate 1.2e-2, momentum 0.9": ("train.lr=1.2e-2", "train.muon_momentum=0.9"),
    "rate 1.2e-2, betas 0.8": ("train.lr=1.2e-2", "train.betas=[0.8,0.95]"),
    "rate 1.2e-2, falling over 0.4": ("train.lr=1.2e-2", "train.decay_fraction=0.4"),
    "rate 1.2e-2, scalars 3e-3": ("train.lr=1.2e-2", "train.scalar_lr=3e-3"),
    "rate 1.2e-2, no clipping": ("train.lr=1.2e-2", "train.clip=null"),
}
# The settings of the 350M run of `time-to-loss` that followed from these, and variations of them.
RACE = (*GUIDES, "train.lr=1.2e-2", "train.muon_lr=0.01", "train.muon_momentum=0.9")
AROUND_THE_RACE: dict[str, tuple[str, ...]] = {
    "": (),
    "seed 1": ("train.seed=1",),
    "scalars 3.6e-2": ("train.scalar_lr=3.6e-2",),
    "clipped at 0.3": ("train.clip=0.3",),
    "betas 0.8": ("train.betas=[0.8,0.95]",),
    "betas 0.9, 0.99": ("train.betas=[0.9,0.99]",),
    "betas 0.9, 0.99, seed 1": ("train.betas=[0.9,0.99]", "train.seed=1"),
    "betas 0.9, 0.998": ("train.betas=[0.9,0.998]",),
    "betas 0.8, 0.99": ("train.betas=[0.8,0.99]",),
    "betas 0.9, 0.99, rate 2.4e-2": ("train.betas=[0.9,0.99]", "train.lr=2.4e-2"),
    "betas 0.9, 0.99, rate 6e-3": ("train.betas=[0.9,0.99]", "train.lr=6e-3"),
    "betas 0.9, 0.99, rows 0.99": ("train.betas=[0.9,0.99]", "train.muon_beta2=0.99"),
    "momentum 0.8": ("train.muon_momentum=0.8",),
    "cautious": ("train.cautious=true",),
    "decay 0.3": ("train.weight_decay=0.3",),
    "hardly a warm-up": ("train.warmup_steps=5",),
    "falling over 0.8": ("train.decay_fraction=0.8",),
    "rate 2.4e-2": ("train.lr=2.4e-2",),
    **{
        f"betas 0.8, 0.99, {name}": ("train.betas=[0.8,0.99]", *words)
        for name, words in {
            "seed 1": ("train.seed=1",),
            "no decay": ("train.weight_decay=0",),
            "eps 1e-12": ("train.eps=1e-12",),
            "muon 0.014": ("train.muon_lr=0.014",),
            "rate 2.4e-2": ("train.lr=2.4e-2",),
            "embedding 0.02": ("model.embedding_std=0.02",),
            "momentum 0.85": ("train.muon_momentum=0.85",),
            "falling over 0.7": ("train.decay_fraction=0.7",),
            "clipped at 0.3": ("train.clip=0.3",),
        }.items()
    },
    "betas 0.7, 0.99": ("train.betas=[0.7,0.99]",),
    "betas 0.8, 0.998": ("train.betas=[0.8,0.998]",),
    "betas 0.7, 0.998, no decay": ("train.betas=[0.7,0.998]", "train.weight_decay=0"),
    "betas 0.7, 0.998, no decay, seed 1": ("train.betas=[0.7,0.998]", "train.weight_decay=0", "train.seed=1"),
    **{
        f"betas 0.7, 0.998, no decay, {steps} steps{', seed 1' if seed else ''}": (
            *("train.betas=[0.7,0.998]", "train.weight_decay=0", f"train.muon_steps={steps}"),
            *(("train.seed=1",) if seed else ()),
        )
        for steps in (4, 3)
        for seed in (0, 1)
    },
}
# `speedrun-50m` as shipped, and whether its projections and those of RACE gain from zero initialisation.
SPEEDRUN = (
    *(*GUIDES, "train.lr=6e-3", "train.betas=[0.7,0.998]", "train.weight_decay=0"),
    *("model.qk_norm=true", "model.heads=2"),
)
LONGER_MEMORY = AROUND_THE_RACE["betas 0.7, 0.998, no decay"]
BEGINNINGS = {
    f"{name}{', GPT-2 initialisation' if init == 'gpt2' else ''}{', seed 1' if seed else ''}": (
        *(*words, f"model.init={init}"),
        *(("train.seed=1",) if seed else ()),
    )
    for name, words in {"speedrun": SPEEDRUN, "beginning of the race": (*RACE, *LONGER_MEMORY)}.items()
    for init in ("zero", "gpt2")
    for seed in (0, 1)
}
ARMS: dict[str, tuple[str, ...]] = {
    **{f"adamw {lr}": (f"train.lr={lr}",) for lr in ("1.5e-3", "3e-3", "6e-3")},
    "muon": ("train.optimizer=muon", *NORMUON[1:]),
    "normuon": NORMUON,
    "normuon, QK norm": (*NORMUON, "model.qk_norm=true"),
    "base": BASE,
    "base, seed 1": (*BASE, "train.seed=1"),
    "base, squared ReLU": (*BASE, "model.mlp=relu2", "model.d_ff=768"),
    "base, 2 heads": (*BASE, "model.heads=2"),
    "base, 2 value embeddings": (*BASE, "model.value_embeddings=2"),
    "base, x0": (*BASE, "model.skips=x0"),
    "base, unet": (*BASE, "model.skips=unet"),
    "base, untied": (*BASE, "model.tied=false"),
    "base, untied, softcap 15": (*BASE, "model.tied=false", "model.softcap=15"),
    "base, muon 0.04": (*BASE, "train.muon_lr=0.04"),
    "base, muon 0.01": (*BASE, "train.muon_lr=0.01"),
    "base, muon 0.01, seed 1": (*BASE, "train.muon_lr=0.01", "train.seed=1"),
    "base, embedding 1.0": (*BASE, "model.embedding_std=1.0"),
    "base, cautious": (*BASE, "train.cautious=true"),
    "base, no decay": (*BASE, "train.weight_decay=0"),
    "many": MANY,
    "many, seed 1": (*MANY, "train.seed=1"),
    "many, rate 3e-3": (*MANY, "train.lr=3e-3"),
    "many, rate 1.2e-2": (*MANY, "train.lr=1.2e-2"),
    "many, rate 1.2e-2, muon 0.01": (*MANY, "train.lr=1.2e-2", "train.muon_lr=0.01"),
    "many, falling from the start": (*MANY, "train.decay_fraction=1.0"),
    "many, betas 0.9, 0.99": (*MANY, "train.betas=[0.9,0.99]"),
    "many, rate 1.2e-2, betas 0.9, 0.99": (*MANY, "train.lr=1.2e-2", "train.betas=[0.9,0.99]"),
    **{f"guides{', ' if name else ''}{name}": (*GUIDES, *words) for name, words in AROUND_THE_GUIDES.items()},
    **{f"race{', ' if name else ''}{name}": (*RACE, *words) for name, words in AROUND_THE_RACE.items()},
    **BEGINNINGS,
}


def train(source: str, words: tuple[str, ...]) -> dict[str, Any]:
    try:
        last = evaluations(run_training(["pretrain-350m", *COMMON, *words, f"data.source={source}"]))[-1]
    except ChildError as error:
        sys.exit(str(error))
    return {"words": list(words), "source": source, "loss": round(last["loss"], 4), "tokens": last["tokens"]}


def read(out: Path) -> dict[str, Any]:
    try:
        record = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"arms": {}}
    except ValueError:
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("arms"), dict):
        sys.exit(f"{out} is not a result of this study. Choose another OUT.json, or remove the file.")
    return record


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit("usage: python -m benchmarks.studies.parts OUT.json SOURCE [NAME …]")
    out, source, names = Path(sys.argv[1]), sys.argv[2], sys.argv[3:] or list(ARMS)
    if unknown := [name for name in names if name not in ARMS]:
        sys.exit(f"There is no arm {unknown[0]!r}. Choose from: {'; '.join(ARMS)}")
    record = read(out)
    for name in names:
        known = record["arms"].get(name, {})
        if (known.get("words"), known.get("source")) != (list(ARMS[name]), source):
            record["arms"][name] = train(source, ARMS[name])
            out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"{record['arms'][name]['loss']:.4f}  {name}", flush=True)


if __name__ == "__main__":
    main()
