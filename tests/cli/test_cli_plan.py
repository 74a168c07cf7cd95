"""`redline plan` from the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.hardware.specs import SPECS

KEYS = {
    "objective": None,
    "gpu": None,
    "gpus": None,
    "parameters": {"total", "trainable", "matmul"},
    "flops_per_token": {"useful", "executed", "formula"},
    "memory_gib": {"weights", "gradients", "optimizer", "activations", "logits", "workspace", "peak", "available"},
    "batch": {"micro", "accumulation", "global", "tokens_per_step"},
    "learning_rate": None,
    "throughput": {"tokens_per_s", "mfu", "mfu_causal", "source"},
    "ceiling": {"tokens_per_s", "mfu", "limits"},
    "hours": None,
    "cost_usd": None,
    "choices": None,
    "warnings": None,
}


def redline(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "redline", "plan", *words]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


def planned(*words: str) -> dict[str, Any]:
    done = redline(*words, "--json")
    assert done.returncode == 0, done.stderr
    plan: dict[str, Any] = json.loads(done.stdout)
    return plan


def test_the_json_has_the_keys_that_programs_rely_on() -> None:
    plan = planned("pretrain-350m", "--gpu", "h100", "--price", "2.5")
    for key, inner in KEYS.items():
        assert key in plan
        assert inner is None or inner <= set(plan[key]), key
    assert plan["parameters"]["total"] == 350_405_632
    assert plan["cost_usd"] == pytest.approx(2.5 * plan["hours"], abs=0.01)
    assert {part["part"] for part in plan["ceiling"]["limits"]} == {"matmul", "attention", "memory-bound"}
    assert all({"part", "ms_per_step"} <= set(part) for part in plan["ceiling"]["limits"])
    assert all({"key", "value", "reason"} == set(choice) for choice in plan["choices"])


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        (("--target-tokens-per-s", "700000"), "438,945"),
        (("--target-tokens-per-s", "0.7M"), "438,945"),
        (("--target-tokens-per-s", "500000", "train.precision=bf16"), "438,945"),
        (("--target-tokens-per-s", "900000", "train.precision=fp8"), "823,117"),
    ],
)
def test_the_guides_figures_are_refused_with_the_arithmetic(words: tuple[str, ...], limit: str) -> None:
    done = redline("pretrain-350m", "--gpu", "h100", *words)
    assert done.returncode == 1
    assert "is impossible" in done.stderr
    assert limit in done.stderr
    assert "2.253 GFLOP" in done.stderr
    assert "Traceback" not in done.stderr
    as_json = redline("pretrain-350m", "--gpu", "h100", *words, "--json")
    assert as_json.returncode == 1
    assert json.loads(as_json.stdout)["target"]["possible"] is False


def test_a_possible_target_is_accepted_and_an_optimistic_one_warned_of() -> None:
    words = ("pretrain-350m", "--gpu", "h100", "--target-tokens-per-s")
    assert not any("tokens/s" in warning for warning in planned(*words, "150000")["warnings"])
    assert any("best measured kernels" in warning for warning in planned(*words, "400000")["warnings"])
    assert planned("pretrain-350m", "--gpu", "h100", "--gpus", "2", "--target-tokens-per-s", "700000")["gpus"] == 2


def test_a_limit_that_the_data_may_raise_refuses_nothing_below_it() -> None:
    """With logits of answers only and attention within documents, a run can exceed the limit of full rows."""
    tuned = ("qlora-8b", "--gpu", "h100", "--target-tokens-per-s")
    limit = planned(*tuned, "1000")["ceiling"]["tokens_per_s"]
    assert "depends on the data" in planned(*tuned, str(limit + 1000))["warnings"][-1]
    assert redline(*tuned, str(2 * limit)).returncode == 1
    packed = ("pretrain-125m", "--gpu", "h100", "data.seq_len=32768", "train.global_batch=8", "--target-tokens-per-s")
    assert "depends on the data" in planned(*packed, "400000", "data.pack=true")["warnings"][-1]
    assert redline(*packed, "400000").returncode == 1


def test_a_model_that_fits_nowhere_is_reported() -> None:
    plan = planned("pretrain-350m", "model.vocab=100000000", "--gpu", "h100")
    reasons = {choice["key"]: choice["reason"] for choice in plan["choices"]}
    assert reasons["train.micro_batch"] == "nothing fits 71.2 GiB by estimate"
    assert "a smaller model" in plan["warnings"][0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_gpu_is_not_planned_as_a_cpu() -> None:
    done = redline("pretrain-350m", "train.device=cuda")
    assert done.returncode == 1
    assert "--gpu h100" in done.stderr


@pytest.mark.parametrize("gpu", SPECS)
def test_every_card_has_a_plan(gpu: str) -> None:
    plan = planned("pretrain-350m", "--gpu", gpu)
    assert plan["gpu"] == gpu
    assert plan["memory_gib"]["peak"] < plan["memory_gib"]["available"]
    assert 0 < plan["throughput"]["mfu"] < plan["ceiling"]["mfu"]


def test_this_machine_is_planned_for_by_itself() -> None:
    first = planned("quickstart", "--gpu", "cpu")
    assert first["throughput"]["tokens_per_s"] > 0, "measured once, by need"
    assert planned("quickstart", "--gpu", "cpu")["throughput"] == first["throughput"], "and kept"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("pretrain-350m", "--gpu", "h1000"), "Did you mean 'h100'?"),
        (("pretrain-350m", "--gpu", "h100", "--gpus", "3"), "cannot be shared by 3 GPUs"),
        (("pretrain-350m", "--gpu", "h100", "train.stepz=4"), "train.steps"),
        (("nosuch", "--gpu", "h100"), "there is no recipe"),
        (("qlora-8b", "--gpu", "h100", "model.mlp=relu2"), "no base has relu2"),
        (("pretrain-350m", "--gpu", "h100", "train.hours=1e300"), "too large"),
        (("pretrain-350m", "--gpu", "h100", "--target-tokens-per-s", "inf"), "--target-tokens-per-s"),
    ],
)
def test_a_mistake_is_one_sentence(words: tuple[str, ...], said: str) -> None:
    done = redline(*words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_probing_another_card_is_refused() -> None:
    done = redline("quickstart", "--gpu", "h100", "--probe")
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr


def test_a_plan_is_fast_and_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['redline', 'plan', 'pretrain-350m', '--gpu', 'h100', '--json']\n"
        "from redline.cli.main import app\n"
        "try: app()\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'tokenizers', 'rich'} & set(sys.modules)\n"
        "sys.stderr.write(str(sorted(heavy)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]"
    begin = time.process_time_ns(), os.times().children_user + os.times().children_system
    subprocess.run([sys.executable, "-m", "redline", "plan", "pretrain-350m", "--gpu", "h100"], capture_output=True)
    spent = os.times().children_user + os.times().children_system - begin[1]
    assert spent < 1.0, "0.26 s on a quiet machine"


def test_a_probe_runs_real_steps_and_the_plan_predicts_their_memory() -> None:
    tiny = ("model.size=5m", "data.seq_len=128", "train.global_batch=8", "train.micro_batch=8", "train.precision=fp32")
    plan = planned("quickstart", *tiny, "--gpu", "cpu", "--probe")
    assert plan["throughput"]["source"] == "measured"
    assert plan["throughput"]["tokens_per_s"] == pytest.approx(1024 / plan["measured"]["step_ms"] * 1e3, rel=0.01)
    assert plan["memory_gib"]["peak"] == pytest.approx(plan["measured"]["memory_gib"], rel=0.15)
