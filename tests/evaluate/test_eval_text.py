"""`redline eval --data` scores every token of a text once, with the run's own tokenizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from redline.data.tokenizer import load_tokenizer
from redline.errors import UsageError, UserError
from redline.evaluate.opened_run import open_run
from redline.kernels.attention import Bound
from redline.recipe.lock import make_lock, write_lock

SEQ_LEN = 32


@pytest.fixture
def trained(world: Any, tmp_path: Path) -> Callable[..., Path]:
    def train(*overrides: str) -> Path:
        run = tmp_path / "run"
        trainer = world.run(run, *overrides)
        trainer.objective.save_tokenizer(run)
        write_lock(run, make_lock("tiny", "0", trainer.resolved, trainer.objective.data.facts))
        return run

    return train


def reference(model: Any, tokens: list[int]) -> float:
    """Σ −ln p of every token but the first, each from what lies before it in its window; slowly, and by the logits."""
    total = 0.0
    for begin in range(0, len(tokens) - 1, SEQ_LEN):
        window = torch.tensor([tokens[begin : begin + SEQ_LEN + 1]])
        with torch.no_grad():
            logits = model.logits(model(window[:, :-1], Bound()))
        total += torch.nn.functional.cross_entropy(logits[0], window[0, 1:], reduction="sum").item()
    return total


@pytest.mark.parametrize("characters", [1, 5, SEQ_LEN - 1, SEQ_LEN, SEQ_LEN + 1, 3 * SEQ_LEN, 200])
def test_every_token_counts_once(trained: Callable[..., Path], tmp_path: Path, characters: int) -> None:
    run = trained()
    text = ("the river é and the stone " * 20)[:characters]
    (tmp_path / "other.txt").write_text(text, encoding="utf-8")
    opened = open_run(run, source=str(tmp_path / "other.txt"), sequences=1 << 40, device="cpu")
    data = text.encode()
    expected = reference(opened.objective.model, [256, *data])
    for micro in (1, 3, 64):
        metrics = opened.objective.evaluate(micro)
        assert metrics["loss"] == pytest.approx(expected / len(data), rel=1e-6)
        assert metrics["perplexity"] == pytest.approx(math.exp(expected / len(data)), rel=1e-5)
        assert metrics["bits_per_byte"] == pytest.approx(expected / math.log(2) / len(data), rel=1e-6)


@pytest.mark.parametrize("options", [("model.tied=false",), ("train.ema=0.9",), ("data.pack=true",)], ids=str)
def test_other_models(trained: Callable[..., Path], tmp_path: Path, options: tuple[str, ...]) -> None:
    run = trained(*options)
    (tmp_path / "other.txt").write_text("a token of light.\n" * 9)
    opened = open_run(run, source=str(tmp_path / "other.txt"), sequences=1 << 40, device="cpu")
    assert opened.weights == ("ema" if "train.ema=0.9" in options else "raw")
    data = (tmp_path / "other.txt").read_bytes()
    expected = reference(opened.objective.model, [256, *data])
    assert opened.objective.evaluate(4)["loss"] == pytest.approx(expected / len(data), rel=1e-6)


def test_packed_documents_do_not_see_each_other(trained: Callable[..., Path], tmp_path: Path) -> None:
    run = trained("data.pack=true")
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in (("a", "red line"), ("b", "king of the river")):
        (folder / f"{name}.txt").write_text(text)
    opened = open_run(run, source=str(folder), sequences=1 << 40, device="cpu")
    model = opened.objective.model
    # each alone, and the mark of the second document from the first
    expected = reference(model, [256, *b"red line", 256]) + reference(model, [256, *b"king of the river"])
    assert opened.objective.evaluate(4)["loss"] == pytest.approx(expected / (8 + 1 + 17), rel=1e-6)


def test_less_when_less_is_asked_for(trained: Callable[..., Path], tmp_path: Path) -> None:
    run = trained()
    text = tmp_path / "other.txt"
    text.write_text("the river and the stone read a token of light.\n" * 40)
    opened = open_run(run, source=str(text), sequences=2, device="cpu")
    expected = reference(opened.objective.model, [256, *text.read_bytes()][: 2 * SEQ_LEN + 1])
    assert opened.objective.evaluate(8)["loss"] == pytest.approx(expected / (2 * SEQ_LEN), rel=1e-6)


def test_the_runs_own_tokenizer(trained: Callable[..., Path], tmp_path: Path) -> None:
    run = trained("data.tokenizer=train:300")
    text = tmp_path / "other.txt"
    text.write_text("the river and the stone read a token of light.\n" * 40)
    opened = open_run(run, source=str(text), sequences=1 << 40, device="cpu")
    own = load_tokenizer(str(run / "tokenizer.json"))
    tokens = [own.eot, *own.encode(text.read_text())]
    total = reference(opened.objective.model, tokens)
    metrics = opened.objective.evaluate(opened.micro)
    assert metrics["loss"] == pytest.approx(total / (len(tokens) - 1), rel=1e-6)
    assert metrics["bits_per_byte"] == pytest.approx(total / math.log(2) / text.stat().st_size, rel=1e-6)


def test_tokens_that_another_tokenizer_made(trained: Callable[..., Path], tmp_path: Path) -> None:
    from redline.data.prepare import prepare
    from redline.data.sources import Document

    run = trained()
    own = load_tokenizer("train:300", lambda: ["a river and a stone"] * 9)
    prepare([Document("a", "a river and a stone\n" * 40)], own, tmp_path / "shards")
    np.full(500, 40_000, "<u2").tofile(tmp_path / "raw.bin")
    for source in ("shards", "raw.bin"):
        with pytest.raises(UserError, match=r"run: .*another tokenizer"):
            open_run(run, source=str(tmp_path / source), device="cpu")


def test_tokenizer_files_that_are_missing(
    trained: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fix that an error proposes works for a trained run."""
    np.arange(500, dtype="<u2").tofile(tmp_path / "train.bin")
    run = trained(f"data.source={tmp_path / 'train.bin'}", "data.tokenizer=gpt2")
    (tmp_path / "other.txt").write_text("a river")
    monkeypatch.setattr("redline.data.tokenizer._folders", lambda: iter(()))
    monkeypatch.delenv("REDLINE_GPT2", raising=False)
    with pytest.raises(UserError, match="set REDLINE_GPT2 to the folder that holds it; a new run can"):
        open_run(run, source=str(tmp_path / "other.txt"), device="cpu")


def test_a_device_that_is_not_here(trained: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"--device: .*finds no GPU.*--device cpu"):
        open_run(trained(), device="cuda")


@pytest.mark.parametrize("word", ["sampler_steps", "=4"])
def test_a_setting_without_a_value(trained: Callable[..., Path], word: str) -> None:
    with pytest.raises(UsageError, match=f"--set: '{word}' is not KEY=VALUE"):
        open_run(trained(), settings=(word,), device="cpu")


@pytest.mark.parametrize("spec", ["bytes", "train:300"])
def test_writing_needs_no_data(world: Any, tmp_path: Path, corpus: Path, spec: str) -> None:
    """A run that was copied from another machine generates the same text."""
    import shutil

    from redline.jobs.objective import Sampling

    shutil.copytree(corpus, tmp_path / "corpus")
    trainer = world.run(tmp_path / "run", f"data.source={tmp_path / 'corpus'}", f"data.tokenizer={spec}")
    trainer.objective.save_tokenizer(tmp_path / "run")
    facts = trainer.objective.data.facts
    write_lock(tmp_path / "run", make_lock("tiny", "0", trainer.resolved, facts))
    expected = trainer.objective.sample("red ", Sampling(tokens=12, seed=3))
    shutil.rmtree(tmp_path / "corpus")
    shutil.move(tmp_path / "run", tmp_path / "moved")
    opened = open_run(tmp_path / "moved", writes_only=True, device="cpu")
    assert opened.objective.sample("red ", Sampling(tokens=12, seed=3)) == expected
    assert expected[0].text


@pytest.mark.parametrize("form", ["shards", "raw"])
def test_all_of_prepared_tokens(trained: Callable[..., Path], tmp_path: Path, form: str) -> None:
    """The validation split of a prepared folder is evaluated with the rest of it."""
    import numpy as np

    from redline.data.prepare import prepare
    from redline.data.sources import Document

    run = trained("data.pack=false")  # there are two marks, and the reference looks across them
    text = "the king of stone and light\n" * 30
    if form == "shards":
        source = tmp_path / "shards"
        data = prepare([Document("a", text)], load_tokenizer("bytes"), source, val_fraction=0.2)
        assert data.val is not None
        tokens = [int(token) for split in (data.train, data.val) for token in split.read(0, len(split))]
        assert tokens.count(256) == 2
    else:
        source, tokens = tmp_path / "tokens.bin", [256, *text.encode()]
        np.array(tokens, dtype="<u2").tofile(source)
    opened = open_run(run, source=str(source), sequences=1 << 40, device="cpu")
    metrics = opened.objective.evaluate(4)
    expected = reference(opened.objective.model, tokens)
    assert metrics["loss"] == pytest.approx(expected / (len(tokens) - 1), rel=1e-6)
    per_byte = None if form == "raw" else pytest.approx(expected / math.log(2) / len(text), rel=1e-6)
    assert metrics["bits_per_byte"] == per_byte
