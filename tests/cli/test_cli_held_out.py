"""`eval --data` recognises text that the run was trained on; prompts for samples come from the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from redline.data.tokens import TokenSplit, document_keys, first_tokens
from redline.evaluate.opened_run import open_run
from redline.evaluate.questions import held_out_of
from redline.recipe.load import load
from redline.runs.events import read_events


def split_of(*documents: list[int], pieces: int = 1) -> TokenSplit:
    tokens = np.array([token for one in documents for token in (0, *one)], dtype=np.uint16)
    parts = [part for part in np.array_split(tokens, pieces) if len(part)]
    return TokenSplit(parts, vocab_size=100, eot=0, utf8_bytes=None, fingerprint="")


def test_documents_are_recognised_by_their_first_tokens() -> None:
    long = list(range(1, 90))
    keys = document_keys(split_of([1, 2, 3], long, [4, 5], pieces=4))
    assert keys is not None
    assert len(keys) == 3
    cut = document_keys(split_of(long[:70], [1, 2]))
    assert cut is not None
    assert set(cut) & set(keys) == {keys[1]}, "its end was cut off, as when it is held out"
    assert first_tokens(split_of([1, 2, 3], [4]), 16) == [1, 2, 3]
    assert first_tokens(split_of(long), 4) == [1, 2, 3, 4]


def test_a_run_on_a_text_of_the_user(inside: Any, world: Any, corpus: Path, tmp_path: Path) -> None:
    """Samples start like the text, and `eval --data` reports which documents were trained on."""
    words = [f"data.source={corpus}", "train.steps=1", "eval.samples=1", "eval.sample_tokens=4", "--run", "runs/one"]
    assert inside("train", "quickstart", *world.tiny, *words).code == 0
    run = tmp_path / "runs/one"
    (prompt,) = {event["prompt"] for event in read_events(run / "events.jsonl") if event["type"] == "sample"}
    assert prompt != load("quickstart").recipe.eval.prompt
    assert prompt
    assert any(path.read_text().startswith(prompt) for path in corpus.iterdir())
    assert json.loads((run / "lock.json").read_text())["recipe"]["eval"]["prompt"] is None

    opened = open_run(run, source=str(corpus))
    seen = held_out_of(opened.objective, opened.training)
    assert seen is not None
    assert seen.unit == "sequences"
    assert seen.shared is not None
    assert seen.shared > 10
    (tmp_path / "new.txt").write_text("Nothing of this was ever seen before by anybody, least of all here.\n")
    opened = open_run(run, source=str(tmp_path / "new.txt"))
    new = held_out_of(opened.objective, opened.training)
    assert new is not None
    assert (new.shared, new.few) == (0, True)


@pytest.mark.parametrize(
    ("words", "prompt"),
    [
        ([], "def "),
        (["data.source=embedded"], "def "),
        (["data.source=./notes"], None),
        (["data.source=./notes", "eval.prompt=Once"], "Once"),
    ],
)
def test_a_shipped_prompt_stays_with_its_own_data(words: list[str], prompt: str | None) -> None:
    assert load("quickstart", words).recipe.eval.prompt == prompt


def test_a_prompt_in_a_recipe_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("model: {size: 1m}\ntrain: {steps: 1}\neval: {prompt: Once}\n")
    assert load(str(path), ["data.source=./notes"]).recipe.eval.prompt == "Once"
