"""The guides' Python launchers: each flag means what the guide says, or prints what it means here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from redline.recipe.load import load
from redline.recipe.schema import Recipe

LAUNCHERS = ("train_h100", "train_h100_optimized")
TINY = ["model.layers=1", "model.d_model=32", "model.heads=2", "model.d_ff=64", "data.tokenizer=bytes"]
TINY += ["data.seq_len=32", "train.device=cpu"]
GUIDE_FLAGS = (
    *("--batch_size", "--gradient_accumulation_steps", "--gradient_accumulation", "--learning_rate", "--max_hours"),
    *("--use_fp8", "--fp8_backend", "--no_fp8", "--use_flash_attn", "--use_flash_attention", "--compile_model"),
    *("--mixed_precision", "--num_workers", "--pin_memory", "--persistent_workers"),
)


@pytest.fixture
def translate(module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return the arguments that a launcher passes to `redline`."""
    import sys

    def run(launcher: str, *words: str) -> list[str]:
        flags = module("guide_flags")
        monkeypatch.setitem(sys.modules, "guide_flags", flags)
        monkeypatch.setattr(flags, "main", lambda: None)
        defaults = {
            "train_h100": flags.Defaults(8, 16, 4e-4, 1.5, without_fp8=(16, 8)),
            "train_h100_optimized": flags.Defaults(None, None, 6e-4, 1.5, more=module("train_h100_optimized").SETTINGS),
        }[launcher]
        monkeypatch.setattr(sys, "argv", ["script", *words])
        flags.run("", defaults)
        return sys.argv[1:]

    return run


def recipe(words: list[str]) -> Recipe:
    verb, name, *rest = words
    assert (verb, name) == ("train", "pretrain-350m")
    return load(name, [word for word in rest if "=" in word]).recipe


def batch(loaded: Recipe) -> tuple[Any, Any, Any]:
    return loaded.train.micro_batch, loaded.train.accumulation, loaded.train.global_batch


@pytest.mark.parametrize("name", LAUNCHERS)
def test_help_names_every_flag_of_the_guides(script: Any, name: str) -> None:
    done = script(f"{name}.py", "--help")
    assert done.returncode == 0, done.stderr
    assert [flag for flag in GUIDE_FLAGS if flag not in done.stdout] == []
    assert "key=value" in done.stdout


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_dry_run_from_anywhere(script: Any, name: str, corpus: Path) -> None:
    done = script(f"{name}.py", "--use_fp8", "--pin_memory", "--dry-run", f"data.source={corpus}", *TINY)
    assert done.returncode == 0, done.stderr
    first = done.stderr.splitlines()
    assert "always on" in first[0]
    assert "fp8 is off" in done.stderr, "there are no units for it here, and it says so"
    assert any(line.startswith("target loss: ") and "tokenizer" in line for line in first)
    assert any(line.startswith("redline train pretrain-350m train.") for line in first), "the translation is shown"
    assert " parameters · " in done.stderr
    assert {"train_h100": "micro 8 × 16", "train_h100_optimized": "512 sequences"}[name] in done.stderr


def test_a_mistake_is_a_sentence(script: Any) -> None:
    done = script("train_h100.py", "--batch_size", "many")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("redline: pretrain-350m: train.micro_batch: 'many' is not a count")
    assert "Traceback" not in done.stderr


def test_fp8_and_no_fp8_contradict_each_other(translate: Any) -> None:
    with pytest.raises(SystemExit) as refused:
        translate("train_h100", "--use_fp8", "--no_fp8")
    assert refused.value.code == 2


def test_the_guides_defaults(translate: Any) -> None:
    plain = recipe(translate("train_h100"))
    assert batch(plain) == (8, 16, "auto")
    assert (plain.train.lr, plain.train.hours) == (4e-4, 1.5)
    assert plain.train.target_loss is None, (
        "the guide promises 2.90 to 2.95: a run that stops at 3.0781 cannot get there"
    )
    assert (plain.monitor.log_every, plain.eval.every, plain.checkpoint.every) == (100, 1000, 5000)
    tuned = recipe(translate("train_h100_optimized"))
    assert batch(tuned) == ("auto", "auto", 512)
    assert tuned.train.target_loss is None
    assert (tuned.train.lr, tuned.train.warmup_steps, tuned.eval.every) == (6e-4, 1000, 500)


@pytest.mark.parametrize(
    ("launcher", "words", "expected"),
    [
        ("train_h100", "--no_fp8 --batch_size 16 --gradient_accumulation_steps 8", (16, 8, "auto")),
        ("train_h100", "--no_fp8", (16, 8, "auto")),
        ("train_h100", "--use_fp8", (8, 16, "auto")),
        ("train_h100", "--no_fp8 --batch_size 4", (4, 16, "auto")),
        ("train_h100_optimized", "--no_fp8", ("auto", "auto", 512)),
        ("train_h100", "--batch_size 4 --gradient_accumulation_steps 32", (4, 32, "auto")),
        ("train_h100", "--batch_size 4 --gradient_accumulation 4", (4, 4, "auto")),
        ("train_h100", "train.global_batch=256", (8, "auto", 256)),
        ("train_h100", "train.micro_batch_size=2 train.gradient_accumulation=3", (2, 3, "auto")),
        ("train_h100_optimized", "--batch_size 16 --gradient_accumulation_steps 8", (16, 8, "auto")),
        ("train_h100_optimized", "--batch_size 16", (16, "auto", 512)),
    ],
)
def test_batches(translate: Any, launcher: str, words: str, expected: tuple[Any, Any, Any]) -> None:
    assert batch(recipe(translate(launcher, *words.split()))) == expected


@pytest.mark.parametrize(
    ("words", "section", "key", "value"),
    [
        ("--learning_rate 3e-4", "train", "lr", 3e-4),
        ("--max_hours 0.5", "train", "hours", 0.5),
        ("--mixed_precision bf16", "train", "precision", "bf16"),
        ("--mixed_precision no", "train", "precision", "fp32"),
        ("--use_fp8 --mixed_precision bf16", "train", "precision", "fp8"),
        ("--use_fp8 --fp8_backend torchao", "train", "fp8", "torchao"),
        ("--no_fp8", "train", "precision", "auto"),
        ("--fp8_backend native", "train", "precision", "auto"),
        ("--compile_model", "train", "compile", True),
        ("--compile_model False", "train", "compile", False),
        ("--use_flash_attn", "model", "attention", "auto"),
        ("--use_flash_attention false", "model", "attention", "dense"),
        ("--num_workers 16", "data", "workers", 16),
        ("train.target_loss=3.0781", "train", "target_loss", 3.0781),
        ("--no_fp8 --mixed_precision fp16", "train", "precision", "fp16"),
        ("--pin_memory --persistent_workers", "train", "lr", 4e-4),
    ],
)
def test_flags(translate: Any, words: str, section: str, key: str, value: Any) -> None:
    assert getattr(getattr(recipe(translate("train_h100", *words.split())), section), key) == value


def test_what_is_no_flag_of_the_guides_goes_on_to_redline(translate: Any) -> None:
    assert translate("train_h100", "--resume", "latest", "train.hours=2") == [
        "train",
        "--resume",
        "latest",
        "train.hours=2",
    ]
    assert translate("train_h100", "--run", "here", "--dry-run")[-3:] == ["--run", "here", "--dry-run"]


def test_the_model_test_runs_and_can_fail(
    script: Any,
    module: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    done = script("test_optimized_model.py", "--skip_compile")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split()[:2] for line in done.stdout.splitlines()[:-1]]
    assert rows == [
        *(["ok", name] for name in ("machine", "parameters", "attention", "forward", "backward", "learns")),
        ["skip", "compile"],
        ["ok", "memory"],
    ]
    assert "350,405,632" in done.stdout

    import sys

    broken = module("test_optimized_model")
    monkeypatch.setitem(broken.CHECKS, "forward", lambda *_: 1 / 0)
    monkeypatch.setitem(broken.CHECKS, "learns", lambda *_: (False, "no"))
    monkeypatch.setattr(sys, "argv", ["script", "--skip_compile"])
    assert broken.main() == 1
    output = capsys.readouterr().out
    assert "FAIL  forward     ZeroDivisionError" in output
    assert output.endswith("forward, learns failed\n")
