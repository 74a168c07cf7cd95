"""A run reads other text with its own tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from redline.data.tokenizer import load_tokenizer
from redline.errors import UserError
from redline.evaluate.trained import open_trained
from redline.recipe.lock import make_lock, write_lock


def trained(world: Any, run: Path, *overrides: str) -> Any:
    trainer = world.run(run, *overrides)
    trainer.objective.save_tokenizer(run)
    write_lock(run, make_lock("tiny", "0", trainer.resolved, trainer.objective.data.facts))
    return trainer


def test_all_of_another_text_is_evaluated(world: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer = trained(world, run, "data.tokenizer=train:300", "model.vocab=auto")
    text = tmp_path / "other.txt"
    text.write_text("the river and the stone read a token of light.\n" * 40)
    opened = open_trained(run, source=str(text), sequences=1 << 40, device="cpu")
    metrics = opened.objective.evaluate(opened.micro)
    tokens = load_tokenizer(str(run / "tokenizer.json")).encode(text.read_text())
    assert len(opened.objective.data.held_out) == len(tokens) + 1, "every token, and the mark before the document"
    assert metrics["loss"] is not None
    assert opened.objective.data.facts.tokenizer_fingerprint == trainer.objective.data.facts.tokenizer_fingerprint


def test_text_that_is_too_short_is_named(world: Any, tmp_path: Path) -> None:
    trained(world, tmp_path / "run")
    text = tmp_path / "short.txt"
    text.write_text("red")
    with pytest.raises(UserError, match=r"short\.txt: the data hold 4 tokens"):
        open_trained(tmp_path / "run", source=str(text), device="cpu")
