"""A sixth job, in a package of its own (tests/external_job), is found by its entry point and works with every verb."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from redline.errors import UserError
from redline.jobs import base

PACKAGE = Path(__file__).parents[1] / "external_job"
RECIPE = """
objective: reversed_lm
reversed_lm: {span: 4}
model: {layers: 2, d_model: 32, heads: 2, d_ff: 64}
data: {source: CORPUS, tokenizer: bytes, seq_len: 32, workers: 1}
train: {device: cpu, precision: fp32, compile: false, steps: 4, global_batch: 8, micro_batch: 4}
eval: {every: 2, sequences: 4, samples: 1, sample_tokens: 8}
checkpoint: {every: 2}
monitor: {log_every: 1}
"""
Redline = Callable[..., Any]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(PACKAGE))
    base._installed.cache_clear()
    yield
    base._installed.cache_clear()
    base._load.cache_clear()


@pytest.fixture
def recipe(corpus: Path, tmp_path: Path) -> str:
    (tmp_path / "reversed.yaml").write_text(RECIPE.replace("CORPUS", str(corpus)))
    return "reversed.yaml"


@pytest.mark.usefixtures("installed")
def test_every_verb_works_with_a_job_of_another_package(inside: Redline, recipe: str, tmp_path: Path) -> None:
    def run(*words: str) -> str:
        answer = inside(*words)
        assert answer.code == 0, answer.err
        return str(answer.out)

    plan = json.loads(run("plan", recipe, "--gpu", "h100", "--json"))
    assert plan["objective"] == "reversed_lm"
    assert plan["parameters"]["total"] > 0
    assert "document 1" in run("train", recipe, "--preview", "1")
    run("train", recipe, "train.steps=2", "--run", "run")
    run("train", "--resume", "run", "train.steps=4")
    lock = json.loads((tmp_path / "run/lock.json").read_text())
    assert lock["recipe"]["reversed_lm"] == {"span": 4}
    evaluated = json.loads(run("eval", "run", "--json"))
    assert (evaluated["step"], evaluated["loss"] > 0) == (4, True)
    assert json.loads(run("eval", "run", "--json", "--data", str(next(iter(lock_sources(lock))))))["loss"] > 0
    samples = json.loads(run("sample", "run", "--prompt", "the", "--tokens", "8", "--json"))["samples"]
    assert len(samples) == 1
    report = json.loads(run("report", "run", "--json"))
    assert "reversed_lm" in json.dumps(report)
    assert (tmp_path / "run/report.html").is_file()
    refused = inside("export", "run", "--out", "model")
    assert refused.code == 1
    assert "reversed_lm" in refused.message


def lock_sources(lock: dict[str, Any]) -> list[str]:
    source = lock["recipe"]["data"]["source"]
    return [source] if isinstance(source, str) else [part["source"] for part in source]


@pytest.mark.usefixtures("installed")
def test_its_options_are_validated_like_those_of_redline(inside: Redline, recipe: str) -> None:
    refused = inside("plan", recipe, "reversed_lm.span=0")
    assert refused.code == 2
    assert "reversed_lm.span" in refused.message
    assert inside("plan", recipe, "reversed_lm.spam=3").code == 2


def test_without_the_package_the_job_is_unknown(inside: Redline, recipe: str) -> None:
    base._installed.cache_clear()
    refused = inside("plan", recipe)
    assert refused.code == 2
    assert "objective" in refused.message


def test_an_entry_point_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_installed", lambda: {"gone_lm": "no_such_package:Job", "other_lm": "json:JSONDecoder"})
    for name in ("gone_lm", "other_lm"):
        with pytest.raises(UserError, match=name):
            base.job(name)


def test_a_job_is_registered_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_registered", {})

    class Mine(base.Job):
        name = "mine_lm"
        runtime = "nowhere:Nothing"

        def costs(self, recipe: Any, rows: Any = None, micro: int = 1) -> Any:
            raise NotImplementedError

    mine = Mine()
    base.register_job(mine)
    assert base.job("mine_lm") is mine
    assert base.is_job("mine_lm")
    assert "mine_lm" in base.job_names()
    Mine.name = "causal_lm"
    with pytest.raises(ValueError, match="causal_lm"):
        base.register_job(mine)


def test_a_plan_of_a_job_of_redline_reads_no_entry_points_and_imports_no_other_job() -> None:
    code = (
        "import sys\n"
        "from redline.recipe.load import load\n"
        "load('pretrain-350m')\n"
        "print([name for name in sys.modules if name.startswith('redline.jobs.') or name == 'torch'])\n"
        "from redline.jobs import base\n"
        "print(base._installed.cache_info().misses)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules, misses = done.stdout.splitlines()
    assert misses == "0"
    assert "torch" not in modules
    assert "causal_lm" in modules
    assert not any(name in modules for name in ("finetune", "latent_prefix", "diffusion"))
