"""Every measured figure on one page, and the table of README: python -m benchmarks.figures [--check]

FIGURES below says what each figure is and how it follows from a result file; the text of a figure is always computed
from the file. The page is docs/figures.md. README's table stands between the two markers and shows the figures of
README_ROWS. `--check` writes nothing and exits with 1 if a page is out of date.

Whether the code changed since a figure was measured needs the history of the repository. It is worked out when the
pages are written and stored in docs/figures.md; `--check` and the tests take it from there.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.staleness import UNKNOWN, changes_since, first_commit

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE, README = ROOT / "docs" / "figures.md", ROOT / "README.md"
BEGIN = "<!-- measured: written by `python -m benchmarks.figures` -->"
END = "<!-- measured: end -->"

# ----------------------------------------------------------------------------------------------------
# What each kind of result depends on, and how it is measured again.

_STEP = ("models/decoder.py", "models/fused.py", "kernels", "training/step.py", "training/optim.py")
_FP8 = ("models/float8.py", *_STEP)
_PLAN = ("planning/memory.py", "planning/speed.py", "planning/flops.py", "recipe/forecast.py")
_LATENT, _DIFFUSION, _TUNED = ("jobs/latent_prefix", *_STEP), ("jobs/diffusion", *_STEP), ("jobs/finetune", *_FP8)


@dataclass(frozen=True)
class Kind:
    """Results whose file names begin alike: the command that measures them, and the modules of redline they run."""

    begins: str
    command: str
    depends: tuple[str, ...]


# The longest beginning that fits a file decides. A result that names its modules itself (`depends`) comes first.
KINDS = [
    Kind("throughput-", "redline bench throughput", _FP8),
    Kind("throughput-bd3lm-", "redline bench throughput owt-bd3lm", _DIFFUSION),
    Kind("throughput-hdp-", "python -m benchmarks throughput gsm8k-hdp", _DIFFUSION),
    Kind("pretrain-350m-", "python -m benchmarks.studies.pretrain_350m TOKENS_DIR OUT.json", _STEP),
    Kind("curves-", "python -m benchmarks.studies.curves OUT.json TOKENS_DIR NAME", _FP8),
    Kind("race-", "python -m benchmarks time-to-loss data.source=TOKENS_DIR", _FP8),
    Kind("race-tuning-", "python -m benchmarks.studies.tune_race OUT.json TOKENS_DIR", _FP8),
    Kind("steps-normuon-", "redline train pretrain-350m train.optimizer=normuon train.precision=fp8", _FP8),
    Kind("step-350m-", "redline profile pretrain-350m", _STEP),
    Kind("profile-350m-", "redline profile pretrain-350m", _STEP),
    Kind("plan-", "python -m benchmarks plan-accuracy", _PLAN),
    Kind("plan-small-", "python -m benchmarks time-to-loss data.source=TOKENS_DIR", _PLAN),
    Kind("memory-hdp-", "python -m benchmarks plan-accuracy gsm8k-hdp", _PLAN),
    Kind("startup-", "redline bench startup", ("bench/startup.py", "models/fused_trial.py", "hardware/trials.py")),
    Kind("finetune-", "python -m benchmarks finetune", _TUNED),
    Kind("finetune-profile-", "python -m benchmarks.studies.finetune_profile OUT.json CONTENDER", _TUNED),
    Kind("qlora-smollm2-", "redline train qlora-smollm2", _TUNED),
    Kind("latent-", "python -m benchmarks latent", _LATENT),
    Kind("latent-problems-", "benchmarks/suite.sh OUT wire", _LATENT),
    Kind("latent-squad-", "python -m benchmarks.studies.latent_squad OUT.json SQUAD.json MODEL", _LATENT),
    Kind("latent-toy-", "python -m benchmarks.studies.latent_toy OUT.json", _LATENT),
    Kind("bounds-", "python -m benchmarks.studies.bounds OUT.json TOKENS_DIR", _DIFFUSION),
    Kind("from-base-", "python -m benchmarks.studies.from_base OUT.json BASE SOURCE", _DIFFUSION),
    Kind("problems-", "benchmarks/suite.sh OUT problems", _DIFFUSION),
    Kind("gsm8k-hdp-", "MINUTES=5 benchmarks/suite.sh OUT gsm8k", _DIFFUSION),
    Kind("cpu-step-", "python -m benchmarks.studies.cpu_step OUT.json CHECKOUT --peer", _STEP),
    Kind(
        "cpu-jobs-", "python -m benchmarks.studies.cpu_jobs OUT.json BEFORE AFTER --gsm8k FILE --squad FILE", _DIFFUSION
    ),
    Kind("latent-facts-", "python -m benchmarks.studies.latent_facts OUT.json FOLDER", _LATENT),
    Kind("legibility-", "python -m benchmarks.studies.legibility OUT.json RUN [RUN …]", _STEP),
    Kind("quickstart-trials-", "redline train quickstart", _STEP),
    Kind("parts-", "python -m benchmarks.studies.parts OUT.json SOURCE", _STEP),
    Kind(
        "prepare-", "python -m benchmarks.studies.prepare", ("data/prepare.py", "data/tokenizer.py", "data/tokens.py")
    ),
    Kind("generation-", "python -m benchmarks.studies.generation FOLDER OUT.json", ("models/generate.py", *_STEP[:3])),
    Kind("ddp-", "python -m benchmarks.studies.ddp OUT.json", ("training/parallel.py",)),
    Kind("gguf-", "python -m benchmarks.studies.gguf OUT.json", ("export",)),
    Kind("leaving-", "python scripts/leaving.py", ("training", "launch")),
    Kind("laptop-", "python -m benchmarks laptop", _STEP),
    Kind("kills-", "pytest tests/faults/test_killed_processes.py -m soak", ("training", "launch/processes.py")),
    Kind("mirror-s3-", "pytest tests/faults/test_mirror_s3.py -m soak", ("training/mirror.py", "remote.py")),
    Kind("seeds-", "python -m benchmarks.studies.seeds FOLDER TOKENS_DIR WAY", _STEP),
    Kind("band-", "python -m benchmarks.studies.curves OUT.json TOKENS_DIR NAME", _STEP),
    Kind("edge-of-stability-", "python -m benchmarks.studies.curves OUT.json TOKENS_DIR NAME", _FP8),
    Kind("muon-350m-", "python -m benchmarks.studies.muon OUT.json", ("kernels/muon.py", "kernels/triton/muon.py")),
    Kind(
        "which-fp8-", "python -m benchmarks.studies.which_fp8 OUT.json TOKENS_DIR", ("kernels/float8_choice.py", *_FP8)
    ),
    Kind("rates-", "python -m benchmarks.studies.rates OUT.json", ()),
    Kind("energy-", "python -m benchmarks.studies.energy OUT.json", ("kernels",)),
]


def kind_of(name: str) -> Kind:
    """Return the kind of a result file."""
    return max((kind for kind in KINDS if name.startswith(kind.begins)), key=lambda kind: len(kind.begins))


# ----------------------------------------------------------------------------------------------------
# The figures.


@dataclass(frozen=True)
class Figure:
    """A measured figure: `show` computes its text from the result file."""

    id: str
    what: str
    against: str
    file: str
    show: Callable[[Any], str]


@cache
def read(file: str) -> Any:
    return json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))


def _row(result: Any, name: str) -> Any:
    return next(row for row in result["rows"] if row["name"] == name)


def _field(row: str, key: str, form: str, scale: float = 1.0) -> Callable[[Any], str]:
    """Show a field of the row with this name."""
    return lambda result: form.format(scale * _row(result, row)[key])


def _top(key: str, form: str, scale: float = 1.0) -> Callable[[Any], str]:
    return lambda result: form.format(scale * result[key])


def _last_loss(*keys: str) -> Callable[[Any], str]:
    """Show the last validation loss under each key, the first key first."""

    def show(result: Any) -> str:
        return " and ".join(f"{result[key]['evaluations'][-1]['loss']:.4f}" for key in keys)

    return show


def _speed(row: str = "redline") -> Callable[[Any], str]:
    """Show tokens/s and the share of the bf16 peak."""

    def show(result: Any) -> str:
        found = _row(result, row)
        return f"{found['tokens_per_s']:,.0f} tokens/s, {100 * found['mfu']:.1f} % MFU"

    return show


def _whole_speed(result: Any) -> str:
    return f"{result['tokens_per_s']:,.0f} tokens/s, {100 * result['mfu']:.1f} % MFU"


def _rate(row: str) -> Callable[[Any], str]:
    return _field(row, "tokens_per_s", "{:,.0f} tokens/s")


def _newest_checkout(result: Any) -> str:
    """Show the speed of the last of the compared checkouts."""
    row = [row for row in result["rows"] if row["name"].startswith("redline at")][-1]
    return f"{row['tokens_per_s']:,.0f} tokens/s"


def _times(key: str, one: str, other: str) -> Callable[[Any], str]:
    """Show the field of one row over that of another."""
    return lambda result: f"{_row(result, one)[key] / _row(result, other)[key]:.2f}×"


def _curve_speed(precision: str) -> Callable[[Any], str]:
    return lambda r: f"{fmean(r[f'{precision}-seed-{seed}']['tokens_per_s'] for seed in (1337, 1)):,.0f} tokens/s"


def _later_losses(result: Any) -> str:
    pairs = [[result[f"{way}-seed-{seed}"]["evaluations"][-1]["loss"] for way in ("fp8", "bf16")] for seed in (1337, 1)]
    return " and ".join(f"{fp8 - bf16:+.3f}" for fp8, bf16 in pairs)


def _race(table: int, arm: str, budget: float, overrides: int | None = None) -> Callable[[Any], str]:
    """Show when an arm passes the baseline's final loss, and that share of the baseline's time."""

    def show(result: Any) -> str:
        found = next(e for e in result["comparison"][table]["entries"] if (e["arm"], e["budget_s"]) == (arm, budget))
        seeds = len(found["seeds"])
        ratio = found["ratio_corrected"] or found["ratio"]
        return f"after {found['passes_s']:.1f} s, {ratio:.3f} of its time ({seeds} seed{'s' if seeds > 1 else ''})"

    return show


def _baseline(table: int) -> Callable[[Any], str]:
    def show(result: Any) -> str:
        found = result["comparison"][table]["baseline"]
        return f"loss {found['final_loss']:.3f} after {found['seconds']:.0f} s, {found['tokens_per_s']:,.0f} tokens/s"

    return show


def _caches(key: str) -> Callable[[Any], str]:
    return lambda result: " and ".join(f"{_row(result, name)[key]:.1f} s" for name in ("cold", "warm"))


def _errors(result: Any) -> str:
    """Show the worst error of the plan, memory and speed, over the configurations of a file."""
    rows = [row for row in result["rows"] if (row.get("planned") or {}).get("memory_gib") and "measured" in row]
    worst = []
    for key in ("memory_gib", "tokens_per_s"):
        pairs = [(row["planned"].get(key), row["measured"].get(key)) for row in rows]
        worst.append(max((p / m - 1 for p, m in pairs if p and m), key=abs))
    return f"memory {worst[0]:+.1%}, tokens/s {worst[1]:+.1%} at worst, {len(rows)} configurations"


def _passes(*arms: str) -> Callable[[Any], str]:
    """Show the share of each arm's time after which redline passes its final loss."""

    def show(result: Any) -> str:
        entries = {entry["arm"]: entry for entry in result["comparison"]}
        return " and ".join(f"{entries[arm]['of_its_time']:.2f}" for arm in arms) + " of its time"

    return show


def _memory_errors(result: Any) -> str:
    errors = [row["memory_gib_error"] for row in result["rows"] if row.get("memory_gib_error") is not None]
    return f"{max(errors, key=abs):+.1%} at worst, {len(errors)} configurations"


def _trial_losses(*names: str) -> Callable[[Any], str]:
    return lambda result: " and ".join(f"{result[name]['loss']:.3f}" for name in names)


def _arm_losses(*names: str) -> Callable[[Any], str]:
    return lambda result: " and ".join(f"{result['arms'][name]['loss']:.3f}" for name in names)


def _bounds(key: str, *arms: str) -> Callable[[Any], str]:
    """Show the mean over seeds of the bound on −log p, for each arm."""

    def show(result: Any) -> str:
        rows = result["rows"] if isinstance(result, dict) else result
        means = [fmean(row["bound"] for row in rows if row[key] == arm) for arm in arms]
        return " and ".join(f"{mean:.3f}" for mean in means)

    return show


def _share(where: tuple[str, ...], *keys: str, key: str = "exact_match") -> Callable[[Any], str]:
    """Show a share for each of these conditions."""

    def show(result: Any) -> str:
        for part in where:
            result = result[part]
        return " and ".join(f"{100 * result[name][key]:.1f} %" for name in keys)

    return show


def _seed_losses(result: Any) -> str:
    """Show the mean last loss of fused blocks above that of compiled ones, over seeds."""
    ways = {way["way"]: way["losses"] for way in result["ways"]}
    fused, compiled = ways["fused"], ways["compiled, cuDNN"]
    return f"{fmean(fused[seed][-1] - compiled[seed][-1] for seed in fused):+.4f} ({len(fused)} seeds)"


def _band(result: Any) -> str:
    return " and ".join(f"{result[name]['losses'][-1]:.3f}" for name in ("fused", "reference", "reference-2"))


def _greedy(quant: str) -> Callable[[Any], str]:
    def show(result: Any) -> str:
        rows = [row for row in result["rows"] if row["quant"] == quant]
        return f"{sum(row['greedy_equal'] for row in rows)} of {sum(row['prompts'] for row in rows)} prompts"

    return show


def _generated(precision: str, case: str) -> Callable[[Any], str]:
    def show(result: Any) -> str:
        row = next(row for row in result["rows"] if (row["precision"], row["case"]) == (precision, case))
        ours, theirs = row["tokens_per_s"]["redline"], row["tokens_per_s"]["transformers"]
        return f"{ours:.1f} and {theirs:.1f} tokens/s, {row['rate_ratio']:.2f}×"

    return show


def _restart(result: Any) -> str:
    medians = [each["median"] for each in result["seconds_until_training_again"].values()]
    return f"{result['kills']} kills, {result['commits_lost']} commits lost, {min(medians):.0f} to {max(medians):.0f} s"


def _steady(row: str) -> Callable[[Any], str]:
    """Show the median rate of a row's log lines from the fifth on."""
    return lambda r: f"{_median([step['tokens_per_s'] for step in _row(r, row)['steps'][4:]]):,.0f} tokens/s"


def _median(values: list[float]) -> float:
    values = sorted(values)
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2


def _prepared(place: int) -> Callable[[Any], str]:
    def show(result: Any) -> str:
        row = result["results"][place]
        return f"{row['mb_per_s']:.1f} MB/s, {row['peak_rss_mib']} MiB at the peak"

    return show


_FUSED, _TEXTBOOK = "redline", "textbook, one pass"
_THROUGHPUT, _RACE = "throughput-350m-h200-20261116", "race-h200-20261118"
_CURVES, _EDGE = "curves-fp8-warmup-200-350m-h200-20261115", "curves-fp8-350m-h200-20261115"
_HDP, _QLORA, _LATENTS = "throughput-hdp-h200-20261116", "finetune-8b-fused-h200-20261116", "latent-h200-20261116"
_LIGER = "hf+peft+bitsandbytes+liger, nothing recomputed"
_NANOGPT = "nanoGPT's GPT-2 medium with tuned AdamW"
_350M = "`pretrain-350m`, 128 × 1024 tokens a step"

SECTIONS: dict[str, list[Figure]] = {
    "Pretraining: speed": [
        Figure("bf16", f"{_350M}, bf16", "the bf16 peak", _THROUGHPUT, _speed()),
        Figure("fp8", "the same, fp8", "the bf16 peak", _THROUGHPUT, _speed("redline-fp8")),
        Figure("bf16-compiled", "bf16 over the same loop by `torch.compile` alone", "the same call", _THROUGHPUT,
               _times("tokens_per_s", "redline", "plain")),
        Figure("bf16-transformers", "bf16 over transformers' Llama, compiled", "the same call", _THROUGHPUT,
               _times("tokens_per_s", "redline", "transformers")),
        Figure("fp8-transformers", "fp8 over transformers' Llama, compiled", "the same call", _THROUGHPUT,
               _times("tokens_per_s", "redline-fp8", "transformers")),
        Figure("packed", "`pretrain-350m`, packed rows, bf16", "the bf16 peak", "throughput-350m-packed-h200-20261116",
               _speed()),
        Figure("real-compiled", "two minutes of real text, compiled blocks", "the bf16 peak",
               "pretrain-350m-h200-20261115", _whole_speed),
        Figure("real-fused", "54 steps of real text, fused blocks", "the bf16 peak",
               "pretrain-350m-fused-h200-20261115", _whole_speed),
        Figure("data-wait", "waiting for data", "a step of 606 ms", "pretrain-350m-fused-h200-20261115",
               _top("data_wait_ms", "{:.2f} ms")),
        Figure("curves-bf16", "400 steps of real text, bf16, two seeds", "", _CURVES, _curve_speed("bf16")),
        Figure("curves-fp8", "400 steps of real text, fp8, two seeds", "", _CURVES, _curve_speed("fp8")),
        Figure("normuon-torch", "NorMuon in fp8, 32 × 1024 tokens a step, Muon's pass by torch", "",
               "steps-normuon-h200-20261116", _steady("pretrain-350m, Muon's passes by torch")),
        Figure("normuon-triton", "the same, Muon's pass by Triton", "", "steps-normuon-h200-20261116",
               _steady("pretrain-350m, Muon's passes by Triton")),
        Figure("profile", "matmuls of a step, compiled blocks", "all kernels of the step",
               "profile-350m-h200-20261115",
               lambda r: f"{r['classes_ms']['matmul']:.0f} of {sum(r['classes_ms'].values()):.0f} ms"),
        Figure("step-torch", "a profiled step, compiled blocks", "", "step-350m-torch-h200-20261115",
               lambda r: f"{r['step_ms']:.0f} ms, {r['joules_per_step']} J"),
        Figure("step-fused", "a profiled step, fused blocks", "", "step-350m-fused-h200-20261115",
               lambda r: f"{r['step_ms']:.0f} ms, {r['joules_per_step']} J"),
    ],
    "Pretraining: learning": [
        Figure("fp8-loss", "validation loss of fp8 above bf16 after 52M tokens, two seeds", "bf16, same seed", _CURVES,
               _later_losses),
        Figure("fp8-edge", "validation loss with a warm-up of 60 steps, fp8 and bf16, one seed", "each other", _EDGE,
               _last_loss("fp8-seed-1337-logits-gradient-mended", "bf16-seed-1337")),
        Figure("edge-arms", "training loss after 80 steps at the edge of stability, fp8 and bf16", "each other",
               "edge-of-stability-350m-h200-20261115",
               lambda r: " and ".join(f"{r['arms'][arm]['losses'][-1]:.3f}" for arm in ("fp8, headroom 2", "bf16"))),
        Figure("race-baseline", "where nanoGPT's loop ends two minutes", "", _RACE, _baseline(0)),
        Figure("race-350m", "`pretrain-350m` passes that loss", _NANOGPT, _RACE, _race(0, "pretrain-350m", 24)),
        Figure("race-50m", "`speedrun-50m` passes that loss", _NANOGPT, _RACE, _race(0, "speedrun-350m", 6)),
        Figure("race-control", "the control, nanoGPT's untuned loop with 51.5M parameters, passes it", _NANOGPT, _RACE,
               _race(0, "nanogpt", 40)),
        Figure("race-350m-8m", "`pretrain-350m` passes what nanoGPT's loop ends eight minutes with", _NANOGPT, _RACE,
               _race(2, "pretrain-350m", 82)),
        Figure("race-50m-8m", "`speedrun-50m` passes it", _NANOGPT, _RACE, _race(2, "speedrun-350m", 24)),
        Figure("race-350m-text", "`pretrain-350m` on a second text", _NANOGPT, _RACE, _race(1, "pretrain-350m", 24)),
        Figure("race-50m-text", "`speedrun-50m` on a second text", _NANOGPT, _RACE, _race(1, "speedrun-350m", 6)),
        Figure("race-adamw", "`pretrain-350m` with AdamW in bf16, one minute, one seed", "", "race-adamw-h200-20261119",
               lambda r: f"loss {r['rows'][0]['final_loss']:.3f} after {r['rows'][0]['tokens'] / 1e6:.1f}M tokens"),
        Figure("tune-16", "trial: 342 steps of 32 and 684 of 16 sequences", "each other", "race-tuning-h200-20261116",
               _trial_losses("pretrain 0.02 3e-3 32", "pretrain 0.02 3e-3 16")),
        Figure("tune-parts", "trial: the recipe with Muon and with all parts", "each other",
               "race-tuning-h200-20261118", _trial_losses("part: Muon", "part: all")),
        Figure("tune-adamw", "trial: AdamW at 6e-4, a fifth of it warming up", "without: the second",
               "race-tuning-adamw-h200-20261119",
               _trial_losses("adamw 6e-4 16, a fifth of it warming up", "adamw 6e-4 16")),
        Figure("parts-muon", "a decoder of 2.6M weights: NorMuon and AdamW", "each other", "parts-cpu-20261116",
               _arm_losses("normuon", "adamw 1.5e-3")),
        Figure("parts-betas", "the same: betas 0.7 and 0.998 without decay, and the recipe before", "each other",
               "parts-cpu-20261117", _arm_losses("race, betas 0.7, 0.998, no decay", "race")),
        Figure("parts-init", "the same on another text: GPT-2's and the recipe's initialisation", "each other",
               "parts-cpu-20261118", _arm_losses("speedrun, GPT-2 initialisation", "speedrun")),
        Figure("seeds-350m", "training loss of fused above compiled blocks after 200 steps, 350M", "the same seed",
               "seeds-350m-h200-20261116", _seed_losses),
        Figure("seeds-12x768", "the same, 12 layers of 768", "the same seed", "seeds-12x768-h200-20261116",
               _seed_losses),
        Figure("band", "training loss after 150 steps: fused, and compiled blocks twice", "each other",
               "band-350m-h200-20261116", _band),
        Figure("band-calm", "the same after 200 steps with a calmer rate", "each other",
               "band-calm-350m-h200-20261116", _band),
    ],
    "Plan against measurement": [
        Figure("plan-before", "the plan as it was, before fitting: compiled blocks", "measured steps",
               "plan-h200-20261115", _errors),
        Figure("plan-fused-before", "the plan as it was, before fitting: fused blocks", "measured steps",
               "plan-fused-h200-20261115", _errors),
        Figure("plan-fused", "the plan as it was on the next day", "measured steps", "plan-fused-h200-20261116",
               _errors),
        Figure("plan-cpu", "the plan on a CPU, ten configurations, most of them fitted to on another machine",
               "measured steps", "plan-cpu-20261120", _errors),
        Figure("plan-cpu-held-out", "the plan on a CPU, six held-out configurations", "measured steps",
               "plan-held-out-cpu-20261120", _errors),
        Figure("plan-cpu-avx2-cases", "the ten without AVX-512", "measured steps", "plan-avx2-cpu-20261120", _errors),
        Figure("plan-cpu-avx2", "the six without AVX-512", "measured steps", "plan-held-out-avx2-cpu-20261120",
               _errors),
        Figure("plan-hdp", "planned memory of `gsm8k-hdp`", "measured", "memory-hdp-h200-20261116", _memory_errors),
        Figure("plan-small", "small batches in fp8, `pretrain-350m` at 32 × 1024", "",
               "plan-small-h200-20261116", lambda r: f"{r['rows'][0]['measured']['tokens_per_s']:,.0f} tokens/s"),
        Figure("plan-speedrun", "`speedrun-50m`, 32 × 1024", "", "plan-small-h200-20261118",
               lambda r: f"{r['rows'][1]['measured']['tokens_per_s']:,.0f} tokens/s"),
    ],
    "Start-up": [
        Figure("startup", "from the command to the first step: caches empty and warm", "",
               "startup-350m-h200-20261119", _caches("to_first_step_s")),
        Figure("startup-fp8", "the same in fp8", "", "startup-350m-fp8-h200-20261119", _caches("to_first_step_s")),
        Figure("startup-before", "the same three days before, bf16", "", "startup-350m-h200-20261116",
               _caches("to_first_step_s")),
        Figure("startup-fp8-before", "the same three days before, fp8", "", "startup-350m-fp8-h200-20261116",
               _caches("to_first_step_s")),
    ],
    "Fine-tuning": [
        Figure("qlora", "QLoRA at an 8B shape, 4 × 4096 tokens, bf16", "", _QLORA, _rate("redline qlora")),
        Figure("qlora-times", "the same", "transformers, PEFT, bitsandbytes and Liger at their best", _QLORA,
               _field("redline qlora", "times_best", "{:.2f}×")),
        Figure("qlora-peers", "the best of transformers, PEFT, bitsandbytes and Liger", "", _QLORA, _rate(_LIGER)),
        Figure("qlora-fp8", "QLoRA with the frozen base's products in fp8", "", _QLORA, _rate("redline qlora fp8")),
        Figure("qlora-fp8-loss", "loss after 11 steps on random tokens, fp8 and bf16", "each other", _QLORA,
               lambda r: " and ".join(
                   f"{_row(r, name)['last_loss']:.2f}" for name in ("redline qlora fp8", "redline qlora"))),
        Figure("lora", "LoRA at the same shape, bf16, fused blocks", "", "finetune-lora-fused-h200-20261116",
               _rate("redline lora")),
        Figure("lora-compiled", "LoRA, compiled blocks", "", "finetune-8b-h200-20261116", _rate("redline lora")),
        Figure("qlora-packed", "QLoRA, packed documents, the last of the profiled runs in bf16", "",
               "finetune-profile-h200-20261116", lambda r: f"{r['runs'][3]['tokens_per_s']:,.0f} tokens/s"),
        Figure("qlora-real", "`qlora-smollm2`, validation loss after 200 steps, bf16 and fp8", "each other",
               "qlora-smollm2-h200-20261116", _last_loss("bf16", "fp8")),
    ],
    "Diffusion": [
        Figure("bd3lm", "`owt-bd3lm` (124M, blocks of 16), bf16, tokens of data", "the bf16 peak",
               "throughput-bd3lm-h200-20261116", _rate("redline")),
        Figure("bd3lm-fp8", "the same in fp8", "", "throughput-bd3lm-fp8-h200-20261116",
               lambda r: f"{r['rows'][0]['tokens_per_s']:,.0f} tokens/s"),
        Figure("hdp", "`gsm8k-hdp`, 512 tokens, bf16, tokens of data", "", _HDP, _rate("redline")),
        Figure("hdp-times", "the same", "torch's attention with a dense mask, compiled", _HDP,
               _times("tokens_per_s", "redline", "masked")),
        Figure("bounds", "bound of −log p: blocks of 4, masked diffusion, autoregressive (three seeds)", "each other",
               "bounds-h200-20261116", _bounds("arm", "4", "mdlm", "ar")),
        Figure("from-base", "bound of −log p from an autoregressive base and from scratch (two seeds)", "each other",
               "from-base-cpu-20261119",
               lambda r: " and ".join(
                   f"{fmean(_row(r, f'{arm}, seed {s}')['bound'] for s in (1, 2)):.3f}"
                   for arm in ("base, shift", "scratch"))),
        Figure("problems", "easy word problems, held out, after 3 minutes: blocks and plans", "",
               "problems-h200-20261116",
               lambda r: " and ".join(
                   f"{r[name]['answers']['right']:.0f} of {r[name]['answers']['questions']:.0f}"
                   for name in ("problems-bd3lm", "problems-hdp"))),
        Figure("gsm8k", "GSM8K after five minutes on a shared card", "", "gsm8k-hdp-h200-20261116",
               lambda r: f"{r['answers']['right']:.0f} of {r['answers']['questions']:.0f} right"),
    ],
    "Latent prefix": [
        Figure("latent", "through two frozen models (1B, 1.5B)", "", _LATENTS,
               _field("redline", "texts_per_s", "{:,.0f} texts/s")),
        Figure("latent-times", "the same, the teacher's pass not counted", "the textbook loop with one pass", _LATENTS,
               _times("texts_per_s", _FUSED, _TEXTBOOK)),
        Figure("latent-problems",
               "held-out word problems answered from 16 latents (int4), the text, its first 16 tokens", "each other",
               "latent-problems-h200-20261116", _share(("conditions",), "latent int4", "text", "budget")),
        Figure("latent-squad", "SQuAD, articles held out: from latents and from the text", "each other",
               "latent-squad-h200-20261116", _share(("answers", "models", "0", "conditions"), "latent", "text")),
        Figure("latent-facts",
               "held-out facts answered from the text, 16 latents, its first 16 tokens, another text's latents",
               "each other", "latent-facts-cpu-20261120",
               _share(("ask", "models", "0", "conditions"), "text", "latent", "budget", "other")),
        Figure("latent-toy", "toy: loss after 600 steps with a text's own latents and another's", "each other",
               "latent-toy-cpu-20261115",
               lambda r: " and ".join(
                   f"{r['arms']['ce, kd, focus: 600 steps']['curve'][-1][key]:.2f}"
                   for key in ("loss", "other_nll_0"))),
    ],
    "On a CPU": [
        Figure("cpu-step", "the step of `quickstart` at size `2m`", "", "cpu-step-20261119", _newest_checkout),
        Figure("cpu-nanogpt", "nanoGPT's loop at the same depth and width, eager and compiled", "",
               "cpu-step-20261119",
               lambda r: " and ".join(
                   f"{_row(r, name)['tokens_per_s']:,.0f}" for name in ("nanoGPT, eager", "nanoGPT, compiled"))
               + " tokens/s"),
        Figure("quickstart", "`quickstart`'s model after its steps, best trial; on a GPU, so only the loss counts", "",
               "quickstart-trials-h200-20261119", lambda r: f"loss {min(row['final_loss'] for row in r['rows']):.3f}"),
        Figure("cpu-jobs", "the step of `problems-bd3lm` at two commits, the later one second", "each other",
               "cpu-jobs-20261119",
               lambda r: " and ".join(f"{_row(r, 'problems-bd3lm')[when]['tokens_per_s']:,.0f}"
                                      for when in ("before", "after")) + " tokens/s"),
        Figure("laptop", "two minutes of `quickstart`: bits per byte over all held-out text", "", "laptop-cpu-20261120",
               lambda r: f"{_row(r, 'redline · seed 1337')['bits_per_byte']:.3f}"),
        Figure("laptop-nanogpt", "the same: until it passes the loss that nanoGPT's loop ends with, eager and compiled",
               "tuned AdamW; two seeds eager, one compiled", "laptop-cpu-20261120",
               _passes("nanogpt", "nanogpt-compiled")),
        Figure("laptop-adamw", "the same: a plain torch loop with its architecture, and its own step, both with AdamW",
               "one seed, and two", "laptop-cpu-20261120", _passes("adamw", "redline-adamw")),
        Figure("legibility", "samples of `quickstart` after two minutes that Python's parser accepts, at two commits",
               "each other, each with its recipe's sampling", "legibility-cpu-20261119",
               lambda r: " and ".join(str(row["accepted"]) for row in r["rows"]) + " of 200"),
        Figure("prepare", "text to GPT-2 tokens, 1 GB, two processes", "", "prepare-cpu-20261117", _prepared(0)),
        Figure("prepare-before", "text to bytes, 100 MB, two processes", "", "prepare-cpu-20261115", _prepared(0)),
        Figure("generation", "SmolLM2-135M, one prompt of 512 tokens, fp32", "transformers' `generate`",
               "generation-20261119", _generated("fp32", "one prompt of 512 tokens")),
        Figure("generation-8", "the same, 8 prompts of 24 to 136 tokens", "transformers' `generate`",
               "generation-20261119", _generated("fp32", "8 prompts of 24 to 136 tokens")),
        Figure("gguf-f16", "GGUF in f16: greedy texts equal to the run's", "llama.cpp", "gguf-cpu-20261119",
               _greedy("f16")),
        Figure("gguf-q8", "GGUF in q8_0: greedy texts equal to the run's", "llama.cpp", "gguf-cpu-20261119",
               _greedy("q8_0")),
        Figure("gguf-texts", "SmolLM2 as GGUF in f16, continuing texts: greedy texts equal to the run's", "llama.cpp",
               "gguf-texts-cpu-20261119", _greedy("f16")),
        Figure("ddp", "backward passes of a step with DDP on two gloo ranks, one micro-batch",
               "torch's `DistributedDataParallel`", "ddp-cpu-20261119",
               lambda r: "{redline:.0f} ms, torch {torch:.0f} ms".format(**r["rows"][0]["milliseconds"])),
        Figure("leaving", "runs of 2 or 4 gloo ranks beside a busy core that did not end in order (four modes)", "",
               "leaving-cpu-20261119",
               lambda r: f"{sum(len(m['failed']) for m in r['modes'].values())} of "
                         f"{sum(m['runs'] for m in r['modes'].values())}"),
        Figure("kills", "SIGKILL of a rank, torchrun or supervisor: until training again (medians)", "",
               "kills-cpu-20261119", _restart),
        Figure("kills-fsdp", "the same with `parallel.mode=fsdp`, beside the test suite", "", "kills-fsdp-cpu-20261120",
               _restart),
        Figure("mirror-s3", "copies to an S3 server that breaks one request in ten, compared after they were fetched",
               "", "mirror-s3-cpu-20261119",
               lambda r: "{copies_fetched_and_compared} copies, {lost} lost, {half} incomplete".format(**r["faults"])),
    ],
    "Kernels": [
        Figure("muon", "one Muon update of 350M parameters, by Triton and by torch", "each other",
               "muon-350m-h200-20261116",
               lambda r: " and ".join(f"{r['update_ms'][f'update, by {by}']:.1f} ms" for by in ("Triton", "torch"))),
        Figure("which-fp8", "a small step of the race, all matmuls in fp8", "", "which-fp8-h200-20261118",
               lambda r: f"{r['race-350m']['steps']['qkv out up down head']['step_ms']:.1f} ms"),
        Figure("rates", "matmuls of a layer of width 1024, bf16", "a peak of 989 TFLOP/s", "rates-h200-20261115",
               lambda r: f"{r['matmul_bf16_tflops']['1024']['layer_tflops']:.0f} TFLOP/s"),
        Figure("copy", "copying in the GPU's memory", "", "rates-h200-20261115", _top("copy_gb_s", "{:,.0f} GB/s")),
        Figure("energy", "the qkv matmul kept up, bf16", "", "energy-h200-20261115",
               lambda r: "{tflops:.0f} TFLOP/s at {mhz} MHz".format(**r["kernels"]["qkv forward"])),
    ],
}  # fmt: skip
FIGURES = {figure.id: figure for figures in SECTIONS.values() for figure in figures}
# The figures of README, each with words that stand for themselves; "" takes those of the figure.
README_ROWS = {
    "bf16": "pretraining 350M parameters (`pretrain-350m`), 128 × 1024 tokens a step, bf16",
    "fp8": "the same in fp8",
    "bf16-transformers": "the same in bf16, beside transformers' Llama, compiled",
    "fp8-loss": "",
    "race-350m": "until the loss at which tuned nanoGPT ends two minutes",
    "qlora-times": "QLoRA at an 8B shape, bf16",
    "hdp-times": "diffusion with plans on GSM8K (`gsm8k-hdp`), bf16",
    "startup": "",
    "cpu-step": "",
    "cpu-nanogpt": "",
}

# ----------------------------------------------------------------------------------------------------
# What a result file says about itself.


def commit_of(result: Any) -> str | None:
    """Return the commit of the code that was measured, from the result, its rows or their locks."""
    for holder in _holders(result):
        git = holder.get("git")
        commit = git.get("commit") if isinstance(git, dict) else git or holder.get("code")
        if isinstance(commit, str) and re.fullmatch("[0-9a-f]{7,40}", commit):
            return commit
    return None


def hardware_of(name: str) -> str:
    """Return what a result was measured on, for example "NVIDIA H200" or "AMD EPYC, 2 cores"."""
    for holder in _holders(read(name)):
        machine = holder.get("machine")
        if isinstance(machine, dict) and machine.get("name"):
            cores = f", {machine['cores']} cores" if machine.get("device") == "cpu" and machine.get("cores") else ""
            return f"{machine['name']}{cores}"
        if holder.get("gpu"):
            return str(holder["gpu"])
    return "NVIDIA H200" if "-h200-" in name else "2 CPU cores"


def date_of(name: str) -> str:
    digits = name.rpartition("-")[2]
    return f"{digits[:4]}-{digits[4:6]}-{digits[6:]}"


def _holders(node: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of a result that may describe it, the outermost first."""
    if isinstance(node, dict):
        yield node
        if isinstance(node.get("lock"), dict):
            yield node["lock"]
        parts = [value for key, value in node.items() if key != "lock" and isinstance(value, dict | list)]
        for part in parts:
            yield from _holders(part)
    elif isinstance(node, list):
        for part in node[:3]:
            yield from _holders(part)


def depends_of(name: str) -> tuple[str, ...]:
    """Return the modules that a result depends on: its own list, or that of its kind."""
    result = read(name)
    own = result.get("depends") if isinstance(result, dict) else None
    return tuple(own) if own else kind_of(name).depends


def code_since(name: str) -> str:
    """Return whether the modules of a result changed since it was measured, by the history of this repository."""
    if not depends_of(name):
        return "runs none"
    commit = commit_of(read(name)) or first_commit(RESULTS / f"{name}.json")
    return changes_since(commit, depends_of(name))


# ----------------------------------------------------------------------------------------------------
# The pages.


INTRODUCTION = """\
# Measured figures

Generated by `python -m benchmarks.figures` from `benchmarks/results/`; do not edit. Each figure is computed from the
JSON file named beside it. How figures are defined: [numbers.md](numbers.md). How they were measured, with the details
of each: [benchmarks](../benchmarks/README.md). What remains to be measured: [gpu-todo.md](gpu-todo.md).

"code since" is the share of the functions, methods and constants in the modules that a figure depends on which have
changed since it was measured, without moves, renames, comments and type annotations. A changed module is not a slower
one, but its figure has not been measured again. The last table has the modules and the counts."""
FIGURES_HEAD = "| what | against | figure | code since | result |\n|---|---|---|---|---|"
FILES_HEAD = "| result | date | measured on | code since | modules | command |\n|---|---|---|---|---|---|"
README_HEAD = "| what | against | figure | measured on | result of |\n|---|---|---|---|---|"


def page(since: Mapping[str, str]) -> str:
    """Return docs/figures.md; `since` holds what is known of the code since each result."""
    parts = [INTRODUCTION]
    for title, figures in SECTIONS.items():
        rows = [_figure_row(figure, since) for figure in figures]
        parts += [f"## {title}", "\n".join([FIGURES_HEAD, *rows])]
    names = [figure.file for figure in FIGURES.values()]
    files = [_file_row(name, since) for name in sorted(dict.fromkeys(names))]
    parts += ["## Results", "\n".join([FILES_HEAD, *files])]
    return "\n\n".join(parts) + "\n"


def _figure_row(figure: Figure, since: Mapping[str, str]) -> str:
    state = _short(since.get(figure.file, UNKNOWN))
    cells = (figure.what, figure.against, f"**{_shown(figure)}**", state, _link(figure.file, "../"))
    return f"| {' | '.join(cells)} |"


def _short(state: str) -> str:
    """Return the share of changed definitions instead of their number."""
    counts = re.fullmatch(r"changed: (\d+) of (\d+) definitions", state)
    return f"{100 * int(counts[1]) / int(counts[2]):.0f} % changed" if counts else state


def _file_row(name: str, since: Mapping[str, str]) -> str:
    modules = ", ".join(f"`{module}`" for module in depends_of(name)) or "–"
    state = since.get(name, UNKNOWN)
    cells = (_link(name, "../"), date_of(name), hardware_of(name), state, modules, f"`{kind_of(name).command}`")
    return f"| {' | '.join(cells)} |"


def _shown(figure: Figure) -> str:
    return figure.show(read(figure.file)).replace("%", " %").replace("  %", " %")


def _link(name: str, root: str) -> str:
    return f"[{name}]({root}benchmarks/results/{name}.json)"


def readme_table() -> str:
    """Return the table of README: the figures of README_ROWS."""
    rows = []
    for name, what in README_ROWS.items():
        figure = FIGURES[name]
        link = f"[{date_of(figure.file)}](benchmarks/results/{figure.file}.json)"
        cells = (what or figure.what, figure.against, _shown(figure), hardware_of(figure.file), link)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([README_HEAD, *rows])


def with_table(readme: str) -> str:
    """Return README with a new table between its markers; unchanged if it has none."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{BEGIN}\n{readme_table()}\n{END}{after}" if begin and end else readme


def stored_since(text: str) -> dict[str, str]:
    """Return what docs/figures.md holds of the code since each result."""
    table = text.rpartition(FILES_HEAD)[2]
    found = (re.match(r"\| \[([^]]+)\]\([^)]*\) \| [^|]* \| [^|]* \| ([^|]*) \|", line) for line in table.splitlines())
    return {match[1]: match[2] for match in found if match}


def generated_files(since: Mapping[str, str]) -> dict[Path, str]:
    return {PAGE: page(since), README: with_table(README.read_text(encoding="utf-8"))}


def main() -> int:
    check = "--check" in sys.argv[1:]
    written = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    since = stored_since(written)
    if not check:
        fresh = {figure.file: code_since(figure.file) for figure in FIGURES.values()}
        # Without the history nothing new is known: what was found out with it stays.
        since = {name: since.get(name, state) if state == UNKNOWN else state for name, state in fresh.items()}
    files = generated_files(since)
    stale = [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if check:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date. Run `python -m benchmarks.figures`.")
        return 1 if stale else 0
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    print(f"{len(stale)} of {len(files)} files changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
