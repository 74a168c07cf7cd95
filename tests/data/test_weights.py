"""What `weight` and `repeat` in data.source mean, for jobs that read windows and for jobs that read rows."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.data.corpus import Corpus, open_corpus, row_index, shares_of, window_index
from redline.data.estimate import expected_facts
from redline.errors import RecipeError
from redline.hardware.machine import Machine
from redline.jobs.diffusion.data import RecordData, load_records
from redline.planning.layout import Layout, Segment
from redline.recipe.load import flatten, load
from redline.recipe.lock import locked_recipe, make_lock
from redline.recipe.resolve import DataFacts, resolve
from redline.recipe.schema import Data, Part, Recipe

SEQ_LEN = 4
LAYOUT = Layout((Segment("question", 8, 8, given=True), Segment("plan", 8, 8), Segment("execution", 16, 16)))
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=4)


def unstated(count: int) -> list[Part]:
    return [Part(source=f"{number}.txt") for number in range(count)]


@st.composite
def weighted(draw: st.DrawFn) -> tuple[list[int], list[Part]]:
    """Draw two or more sources, at least one of them with a weight."""
    sizes = draw(st.lists(st.integers(1, 40), min_size=2, max_size=4))
    weights = draw(st.lists(st.none() | st.integers(1, 9), min_size=len(sizes), max_size=len(sizes)))
    weights[draw(st.integers(0, len(sizes) - 1))] = draw(st.integers(1, 9))
    return sizes, [Part(source=f"{n}.txt", weight=weight) for n, weight in enumerate(weights)]


def owners(rows: np.ndarray, sizes: list[int]) -> np.ndarray:
    """Return the source of each row."""
    return np.searchsorted(np.cumsum(sizes), rows, side="right")


@given(SIZES, st.integers(0, 5), st.integers(0, 3), st.booleans())
def test_without_weights_every_row_and_window_comes_once_an_epoch(
    sizes: list[int], seed: int, epoch: int, shuffle: bool
) -> None:
    parts, count = unstated(len(sizes)), sum(sizes)
    samples = np.arange(epoch * count, (epoch + 1) * count)
    rows = row_index(sizes, parts, seed, shuffle=shuffle)
    assert len(rows) == count
    assert sorted(rows.sequences(samples).tolist()) == list(range(count))
    tokens = [size * SEQ_LEN + 1 + size % SEQ_LEN for size in sizes]  # `size` windows and an incomplete one
    offsets = [sum(tokens[:number]) for number in range(len(tokens))]
    every = [first + SEQ_LEN * n for first, size in zip(offsets, sizes, strict=True) for n in range(size)]
    windows = window_index(tokens, parts, SEQ_LEN, seed, shuffle=shuffle)
    assert sorted(windows.starts(samples).tolist()) == every


@given(weighted(), st.integers(0, 5), st.integers(1, 500))
def test_stated_weights_are_shares_of_the_samples_at_any_point(
    mixture: tuple[list[int], list[Part]], seed: int, samples: int
) -> None:
    sizes, parts = mixture
    weights = [part.weight or 1.0 for part in parts]
    shares = np.array(weights) / sum(weights)
    assert shares_of(sizes, parts) == pytest.approx(shares.tolist())
    rows = row_index(sizes, parts, seed, shuffle=True)
    assert len(rows) == sum(sizes), "an epoch has as many samples as there are rows"
    rows_drawn = rows.sequences(np.arange(samples))
    assert np.abs(np.bincount(owners(rows_drawn, sizes), minlength=len(sizes)) - shares * samples).max() < 1
    tokens = [size * SEQ_LEN + 1 for size in sizes]
    starts = window_index(tokens, parts, SEQ_LEN, seed, shuffle=True).starts(np.arange(samples))
    assert np.array_equal(owners(starts, tokens), owners(rows_drawn, sizes)), "the same source, whatever the job reads"
    for number, size in enumerate(sizes):
        own = rows_drawn[owners(rows_drawn, sizes) == number]
        times = np.bincount(own - sum(sizes[:number]), minlength=size)
        assert times.max() - times.min() <= 1, "every row of a source is read before one is read again"


@settings(max_examples=20)
@given(weighted(), st.integers(0, 5), st.integers(0, 400))
def test_a_row_is_a_function_of_its_sample_number(mixture: tuple[list[int], list[Part]], seed: int, first: int) -> None:
    sizes, parts = mixture
    index = row_index(sizes, parts, seed, shuffle=True)
    alone = [int(index.sequences(np.array([number]))[0]) for number in range(first, first + 30)]
    assert index.sequences(np.arange(first, first + 30)).tolist() == alone


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, times in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        for n in range(80):
            (tmp_path / name / f"{n}.txt").write_text(f"{name * 40} {n}\n" * times)
    for name, count, word in (("one", 40, "a"), ("two", 20, "b")):
        rows = [{"question": f"{word} {n}?", "execution": f"{n} + 1", "answer": n + 1} for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def texts(data: Data) -> Corpus:
    return open_corpus(data)


def records(data: Data) -> RecordData:
    return load_records(data, LAYOUT, seed=1, val_fraction=0.1)


def recipe_of(source: str, name: str = "pretrain-125m") -> Recipe:
    return load(name, ["data.tokenizer=bytes", *(["data.seq_len=16"] if "hdp" not in name else []), source]).recipe


def digest(numbers: np.ndarray) -> str:
    return hashlib.sha256(numbers.astype(np.int64).tobytes()).hexdigest()[:16]


def test_a_single_source_is_read_alike_with_and_without_a_weight(folder: Path) -> None:
    for source in ("a", "[a]", "[{source: a, weight: 3}]"):
        corpus = texts(recipe_of(f"data.source={source}").data)
        assert corpus.facts.fingerprint == "16b447b0511f8cc1"
        assert digest(corpus.index(16, 7).starts(np.arange(2000))) == "6fc76bf429cde83a"
    for source in ("one.jsonl", "[one.jsonl]", "[{source: one.jsonl, weight: 3}]"):
        data = records(recipe_of(f"data.source={source}", "gsm8k-hdp").data)
        assert (data.facts.fingerprint, len(data.index)) == ("2baa167fe9529fcb", 34)
        assert digest(data.index.sequences(np.arange(500))) == "cdc9918ae6aec5e6"


def test_unweighted_texts_are_read_once_an_epoch(folder: Path) -> None:
    corpus = texts(recipe_of("data.source=[a, b]").data)
    windows = sum((size - 1) // 16 for size in corpus.sizes)
    starts = corpus.index(16, 7).starts(np.arange(windows))
    assert len(set(starts.tolist())) == windows
    assert (starts < corpus.sizes[0]).sum() == (corpus.sizes[0] - 1) // 16


def test_a_repeat_lengthens_the_epoch_of_every_job(folder: Path) -> None:
    once = texts(recipe_of("data.source=a").data)
    data = recipe_of("data.source=[{source: a, repeat: 3}]").data
    corpus = texts(data)
    assert corpus.facts.train_tokens == 3 * once.facts.train_tokens == expected_facts(data).train_tokens
    windows = (once.facts.train_tokens - 1) // 16
    assert set(np.bincount(corpus.index(16, 7).starts(np.arange(3 * windows)) // 16)) == {3}
    assert corpus.facts.fingerprint != once.facts.fingerprint
    both = "[{source: one.jsonl, repeat: 2}, two.jsonl]"
    data = records(recipe_of(f"data.source={both}", "gsm8k-hdp").data)
    assert set(np.bincount(data.index.sequences(np.arange(len(data.index))))) == {1, 2}


@pytest.mark.parametrize(
    "source",
    [
        "[{source: a, weight: 2}, {source: b, repeat: 2}]",
        "[{source: a, weight: 2, repeat: 2}]",
        "[{source: a, repeat: 0}, b]",
        "[{source: a, repeat: 1e300}, b]",
    ],
)
def test_a_weight_and_a_repeat_do_not_go_together(source: str) -> None:
    with pytest.raises(RecipeError, match=r"data\.source"):
        recipe_of(f"data.source={source}")


@pytest.mark.parametrize(
    ("source", "noted"),
    [
        ("[{source: a, weight: 3}, b]", ["75.0%", "25.0%"]),
        ("[{source: a, weight: 3}]", ["no effect"]),
        ("[{source: a, weight: 3}, {source: b, weight: 1}]", []),
        ("[a, b]", []),
    ],
)
def test_missing_weights_are_explained(source: str, noted: list[str]) -> None:
    machine = Machine("cpu", "a CPU", 8 << 30, 2, cpu_flops=1e11)
    facts = DataFacts(257, 100_000, 5_000, "data", "bytes", "tokenizer")
    warnings = resolve(recipe_of(f"data.source={source}"), machine, facts).warnings
    about = [text for text in warnings if "weight" in text]
    assert len(about) == bool(noted)
    assert all(word in about[0] for word in noted)


# Of runs that were begun when a weight was a share for windows and multiplied rows: what their locks name, and the
# order in which they read their samples.
OLD_WINDOWS: dict[str, Any] = {
    "a mixture": ([("a", 3.0), ("b", 1.0)], "8a3cd8d85b3300e0", "fd2be5fcdb5df3b7"),
    "equal shares": ([("a", 1.0), ("b", 1.0)], "28a2b5267b2bd8f0", "6bd0dbb9ca156dff"),
    "one source": ([("a", 3.0)], "16b447b0511f8cc1", "6fc76bf429cde83a"),
}
OLD_ROWS: dict[str, Any] = {
    "a mixture": ([("one.jsonl", 0.5), ("two.jsonl", 2.0)], 1568, "88be21723efc00b9", "457c36931fa40be7"),
    "no weights": ([("one.jsonl", 1.0), ("two.jsonl", 1.0)], 1600, "09465d7ebaf5b542", "e973ef4e5106194c"),
    "one source": ([("one.jsonl", 2.0)], 2176, "d462d8c8e7c0855f", "6f0d7411187183a1"),
}


def old_lock(recipe: Recipe, parts: list[tuple[str, float]]) -> dict[str, Any]:
    tree = recipe.model_dump(mode="json")
    tree["data"]["source"] = [{"source": name, "weight": weight} for name, weight in parts]
    return {"schema": 1, "recipe": tree, "recipe_name": "old", "run_id": "old"}


@pytest.mark.parametrize("case", OLD_WINDOWS)
def test_a_run_of_an_older_lock_reads_the_same_windows(folder: Path, case: str) -> None:
    parts, fingerprint, order = OLD_WINDOWS[case]
    corpus = texts(locked_recipe(folder, old_lock(recipe_of("data.source=a"), parts)).recipe.data)
    assert corpus.facts.fingerprint == fingerprint
    assert corpus.facts.train_tokens == (9801 if len(parts) == 2 else 3320)
    assert digest(corpus.index(16, 7).starts(np.arange(2000))) == order


@pytest.mark.parametrize("case", OLD_ROWS)
def test_a_run_of_an_older_lock_reads_the_same_rows(folder: Path, case: str) -> None:
    parts, tokens, fingerprint, order = OLD_ROWS[case]
    lock = old_lock(recipe_of("data.source=one.jsonl", "gsm8k-hdp"), parts)
    data = records(locked_recipe(folder, lock).recipe.data)
    assert (data.facts.fingerprint, data.facts.train_tokens) == (fingerprint, tokens)
    assert digest(data.index.sequences(np.arange(500))) == order


def test_a_new_lock_keeps_the_new_meaning(folder: Path) -> None:
    source = "data.source=[{source: one.jsonl, weight: 0.5}, {source: two.jsonl, weight: 2}]"
    recipe = recipe_of(source, "gsm8k-hdp")
    data = records(recipe.data)
    machine = Machine("cpu", "a CPU", 8 << 30, 2, cpu_flops=1e11)
    lock = make_lock("gsm8k-hdp", "id", resolve(recipe, machine, data.facts), data.facts)
    again = locked_recipe(folder, json.loads(json.dumps(lock))).recipe
    assert dict(flatten(again.model_dump()))["data.source"] == dict(flatten(recipe.model_dump()))["data.source"]
    assert records(again.data).facts == data.facts
