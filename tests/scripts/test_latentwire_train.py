"""LatentWire's launcher translates the guide's flags into arguments of `redline train`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from redline.recipe.load import load

GUIDE = (
    *("--batch_size", "4", "--gradient_accumulation", "16", "--mixed_precision", "bf16", "--compile_model"),
    *("--use_flash_attention", "--num_workers", "16", "--pin_memory", "--persistent_workers"),
)


@pytest.fixture
def translate(module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    def run(*words: str) -> list[str]:
        flags = module("guide_flags")
        monkeypatch.setitem(sys.modules, "guide_flags", flags)
        monkeypatch.setattr(flags, "main", lambda: None)
        launcher = module("latentwire_train")
        monkeypatch.setattr(sys, "argv", ["script", *words])
        launcher.run()
        return sys.argv[1:]

    return run


def test_the_guides_command(translate: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    verb, name, *rest = translate(*GUIDE, "--run", "here")
    assert (verb, name, rest[-2:]) == ("train", "latentwire-squad", ["--run", "here"])
    recipe = load(name, [word for word in rest if "=" in word]).recipe
    assert (recipe.train.micro_batch, recipe.train.accumulation, recipe.train.global_batch) == (4, 16, "auto")
    assert (recipe.train.precision, recipe.train.compile, recipe.data.workers) == ("bf16", True, 16)
    assert recipe.model.attention == "auto"
    errors = capsys.readouterr().err
    assert "--pin_memory: always on" in errors
    assert "--persistent_workers: always on" in errors


def test_without_flags_it_is_the_recipe_and_overrides_win(translate: Callable[..., list[str]]) -> None:
    assert translate() == ["train", "latentwire-squad"]
    words = translate("--batch_size", "4", "train.micro_batch=2")
    assert words == ["train", "latentwire-squad", "train.micro_batch=2"]
    assert translate("--resume", "latest", "--batch_size", "4") == ["train", "--resume", "latest"]


def test_help_and_mistakes(script: Any) -> None:
    done = script("latentwire_train.py", "--help")
    assert done.returncode == 0
    assert all(flag in done.stdout for flag in GUIDE if flag.startswith("--"))
    wrong = script("latentwire_train.py", "--batch_size", "many")
    assert wrong.returncode == 2
    assert "train.micro_batch: 'many' is not a count" in wrong.stderr
    assert "Traceback" not in wrong.stderr
