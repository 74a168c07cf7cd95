"""`redline eval --under`: the perplexity of one run's texts under another run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from redline.cli.main import app
from redline.errors import UsageError, UserError
from redline.evaluate.questions import generative_perplexity


@pytest.fixture
def runs(world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Train a diffusion run and a causal_lm run for a few steps on the same text."""
    monkeypatch.chdir(tmp_path)
    paths = {}
    for name, job in (("diffusion", ("objective=block_diffusion", "block_diffusion.block_size=8")), ("causal", ())):
        lines = [*world.tiny, f"data.source={world.corpus}", "data.pack=false", "train.steps=30", "train.lr=1e-2", *job]
        run = str(tmp_path / name)
        result = CliRunner().invoke(app, ["train", "quickstart", *lines, "--run", run])
        assert result.exit_code == 0, result.output
        paths[name] = run
    return paths


def evaluated(*words: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["eval", *words, "--json", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_generative_perplexity(runs: dict[str, str]) -> None:
    words = (runs["diffusion"], "--under", runs["causal"], "--texts", "6", "--tokens", "24")
    result = evaluated(*words)
    assert result["texts"] == 6
    assert 1 < result["generative_perplexity"] < 300
    assert result["texts_per_s"] > 0
    assert result["generative_perplexity"] == evaluated(*words)["generative_perplexity"]
    own = evaluated(runs["causal"])["perplexity"]
    assert result["generative_perplexity"] > own, "a model trained for thirty steps does not write better than people"


def test_what_does_not_go_together(runs: dict[str, str]) -> None:
    bound = CliRunner().invoke(app, ["eval", runs["causal"], "--under", runs["diffusion"], "--texts", "2"])
    assert isinstance(bound.exception, UsageError) or "only a causal_lm run" in bound.output
    result = CliRunner().invoke(app, ["eval", runs["diffusion"], "--under", runs["causal"], "--answers", "gsm8k"])
    assert isinstance(result.exception, UsageError) or "do not go together" in result.output


class Writes:
    """An objective that returns these texts in order."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)

    def sample(self, prompt: str, how: Any) -> list[Any]:
        return [SimpleNamespace(text=self.texts.pop(0)) for _ in range(how.count)]


def read_back(*texts: str) -> dict[str, Any]:
    def score(file: Path) -> dict[str, float | None]:
        return {"perplexity": float(len(file.read_text().splitlines()))}

    return generative_perplexity(Writes(*texts), score, count=len(texts), tokens=4, where="run")  # type: ignore[arg-type]


def test_texts_that_are_none_are_counted() -> None:
    result = read_back("a text", "\x00\x01\x02\x00", "another", "a third")
    assert (result["texts"], result["texts_read"], result["generative_perplexity"]) == (4, 3, 3.0)


def test_who_writes_no_text_is_to_be_trained_for_longer() -> None:
    with pytest.raises(UserError, match="1 of the 3 texts") as refused:
        read_back("a text", "\x00\x01\x02\x00", "  ")
    assert refused.value.fix == "Train it for longer."
