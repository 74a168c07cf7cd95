"""The trial of the fused blocks: cards on which they compute something else get plain blocks, and say why."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from redline.errors import RecipeError
from redline.hardware.machine import named_gpu
from redline.hardware.trials import run_trials
from redline.models import fused, fused_trial
from redline.models.fused_trial import compare_blocks, fused_failure, trial_shape
from redline.planning.shapes import DecoderShape
from redline.recipe.load import load
from redline.recipe.resolve import DataFacts, Resolved, resolve_tried

SHAPE = DecoderShape(layers=12, d_model=64, heads=4, kv_heads=2, head_dim=16, d_ff=96, vocab=50_304)
FEATURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "relu2": {"mlp": "relu2", "tied": False},
    "qk-norm": {"qk_norm": True},
    "biases": {"qkv_bias": True},
    "tables": {"value_embeddings": 3, "skips": "unet"},
}
FACTS = DataFacts(50_257, 10**8, 10**6, "", "gpt2", "")
WORKS = "print(json.dumps(dict(test=name, works=True, about=dict(fused=0.01))))"
WRONG = "print(json.dumps(dict(test=name, works=False, detail='the output is wrong', whole='', kind='')))"


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_correct_blocks_pass(features: dict[str, Any], precision: str) -> None:
    errors = compare_blocks(trial_shape(DecoderShape(**{**vars(SHAPE), **features})), precision, "cpu")
    assert 0 < errors["fused"] < 0.1


@pytest.mark.parametrize(("operation", "culprit"), [("linear", "the output"), ("weight_gradient", "the gradient of")])
def test_a_wrong_kernel_fails(monkeypatch: pytest.MonkeyPatch, operation: str, culprit: str) -> None:
    right = getattr(fused, operation)
    monkeypatch.setattr(fused, operation, lambda *arguments: 1.1 * right(*arguments))
    with pytest.raises(ArithmeticError, match=f"{culprit}.* is wrong"):
        compare_blocks(trial_shape(SHAPE), "bf16", "cpu")


def test_the_trial_has_the_widths_of_the_model_and_few_layers() -> None:
    tried = trial_shape(SHAPE)
    assert (tried.d_model, tried.d_ff, tried.heads) == (SHAPE.d_model, SHAPE.d_ff, SHAPE.heads)
    assert tried.layers < SHAPE.layers
    assert tried.vocab < SHAPE.vocab


@pytest.fixture
def resolve_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Resolved]:
    """Resolve a recipe on an H100 whose trial, a child process, does as a line of Python says."""
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="NVIDIA H100"))

    def run(line: str, *overrides: str, **options: Any) -> Resolved:
        child = [sys.executable, "-c", f"import json, os, sys\nfor name in sys.argv[1:]:\n    {line}"]
        monkeypatch.setattr(fused_trial, "run_trials", partial(run_trials, command=child))
        recipe = load("pretrain-350m", overrides).recipe
        return resolve_tried(recipe, named_gpu("h100"), FACTS, fused_failure, **options)

    return run


def test_a_card_that_passes_is_not_asked_again(resolve_on: Callable[..., Resolved]) -> None:
    assert resolve_on(WORKS).recipe.model.kernels == "fused"
    assert resolve_on("sys.exit('it must not be asked')").recipe.model.kernels == "fused"
    assert resolve_on(WRONG, "model.d_ff=2816").recipe.model.kernels == "torch", "another width is another trial"


@pytest.mark.parametrize("line", [WRONG, "os.kill(os.getpid(), 11)", "sys.exit('no kernel image')"])
def test_a_card_that_fails_gets_plain_blocks_with_the_reason(resolve_on: Callable[..., Resolved], line: str) -> None:
    resolved = resolve_on(line)
    assert resolved.recipe.model.kernels == "torch"
    reason = next(choice.reason for choice in resolved.choices if choice.key == "model.kernels")
    assert any(word in reason for word in ("the output is wrong", "SIGSEGV", "no kernel image"))
    assert [warning for warning in resolved.warnings if "model.kernels" in warning]
    assert "fused_failure" in resolved.machine.facts()
    assert resolve_on(WORKS).recipe.model.kernels == "fused", "a failure is not stored"


def test_fused_by_name_is_refused_unless_the_run_has_begun_with_it(resolve_on: Callable[..., Resolved]) -> None:
    with pytest.raises(RecipeError) as refused:
        resolve_on(WRONG, "model.kernels=fused")
    assert refused.value.problems[0].key == "model.kernels"
    assert resolve_on(WRONG, "model.kernels=fused", falls_back=True).recipe.model.kernels == "torch"


def test_no_trial_where_nothing_fused_is_chosen(resolve_on: Callable[..., Resolved]) -> None:
    resolved = resolve_on("sys.exit('it must not be asked')", "model.kernels=torch")
    assert resolved.recipe.model.kernels == "torch"
    assert "fused_failure" not in resolved.machine.facts()
