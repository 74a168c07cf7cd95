"""The trials of fp8 matmuls: one that fails, crashes, hangs, is wrong or is slow leaves its linear in bf16."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.hardware.trials import run_trials
from redline.kernels import float8_choice
from redline.kernels.float8_choice import Float8Choice, choose

SHAPES = {"qkv": (128, 32, 96), "out": (128, 32, 32), "up": (128, 32, 128), "down": (128, 64, 32)}
# A child whose linear `up` behaves as its first argument says; the others are faster in fp8.
CHILD = """
import json, os, signal, sys, time
from redline.hardware.trials import answer_trials
request = json.load(sys.stdin)
def up():
    match sys.argv[1]:
        case "fails": raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\\nmore lines")
        case "is wrong": raise ArithmeticError("the result is wrong")
        case "crashes": os.kill(os.getpid(), signal.SIGSEGV)
        case "hangs": time.sleep(60)
        case "is slow": return 1.0, 3.0
        case "has no memory": raise type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory")
trials = dict.fromkeys(request["shapes"], lambda: (2.0, 1.0)) | {"up": up}
answer_trials(sys.argv[2:], trials, {"up": 1})
"""


def choice_with(behaviour: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Float8Choice:
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(float8_choice, "_key", lambda *what: str(what))
    child = [sys.executable, "-c", CHILD, behaviour]
    monkeypatch.setattr(float8_choice, "run_trials", partial(run_trials, command=child))
    return choose("auto", SHAPES, fused=True)


@pytest.mark.parametrize(
    ("behaviour", "detail"),
    [
        ("fails", "up failed: CUBLAS_STATUS_NOT_SUPPORTED"),
        ("is wrong", "up failed: the result is wrong"),
        ("crashes", "up failed: crashed (SIGSEGV)"),
        ("hangs", "up failed: timed out"),
    ],
)
def test_a_bad_trial_leaves_its_linear_in_bf16(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, behaviour: str, detail: str
) -> None:
    choice = choice_with(behaviour, monkeypatch, tmp_path)
    assert (choice.linears, choice.failed) == (("qkv", "out", "down"), ("up",))
    assert detail in choice.reason
    assert "more lines" not in choice.reason
    assert not list((tmp_path / "cache").glob("float8*")), "a failure is never stored: the next run tries again"


def test_a_slow_linear_stays_in_bf16_and_is_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    choice = choice_with("is slow", monkeypatch, tmp_path)
    assert (choice.linears, choice.failed) == (("qkv", "out", "down"), ())
    assert "up 1.00 → 3.00" in choice.reason
    again = choice_with("crashes", monkeypatch, tmp_path)
    assert again.linears == choice.linears
    assert "as measured before" in again.reason


def test_a_trial_without_memory_ends_as_a_step_without_memory_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        choice_with("has no memory", monkeypatch, tmp_path)


def test_results_are_compared_with_those_in_bf16() -> None:
    generator = torch.Generator().manual_seed(3)
    exact = [torch.randn(20_000, 8, generator=generator), torch.randn(64, 8, generator=generator)]
    near = [x * (1 + 0.05 * torch.randn(x.shape, generator=generator)) for x in exact]
    float8_choice._check_results(lambda: exact, lambda: near)
    float8_choice._check_results(lambda: exact, lambda: near[1:])  # torchao's work has the gradients alone
    for wrong in (exact[1] * 2, torch.zeros(64, 8), torch.full((64, 8), torch.nan), exact[1].flip(0)):
        with pytest.raises(ArithmeticError, match="wrong"):
            float8_choice._check_results(lambda: exact, partial(_with_last, exact, wrong))


def _with_last(results: list[torch.Tensor], last: torch.Tensor) -> list[Any]:
    return [*results[:-1], last]
