"""Mixtures: exact shares at any point, every window of every part, and nothing that depends on batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.data import corpus as corpus_module
from redline.data.corpus import Corpus, MixtureIndex, open_corpus, turns, whole_shares
from redline.data.loader import WindowIndex
from redline.data.prepare import prepare_cached
from redline.errors import RecipeError, UserError
from redline.recipe.load import load

WEIGHTS = st.lists(st.integers(1, 40), min_size=1, max_size=5)


def data_of(*overrides: str) -> Any:
    return load("pretrain-125m", ["data.tokenizer=bytes", "data.seq_len=16", *overrides]).recipe.data


@given(WEIGHTS)
def test_no_part_is_ever_a_turn_off(shares: list[int]) -> None:
    order = turns(shares)
    had = np.cumsum(order == np.arange(len(shares))[:, None], axis=1)
    due = np.arange(1, len(order) + 1) * np.array(shares)[:, None] / sum(shares)
    assert np.abs(had - due).max() < 1
    assert had[:, -1].tolist() == shares


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=6))
def test_weights_become_whole_numbers_of_nearly_the_same_shares(weights: list[float]) -> None:
    shares = whole_shares(weights)
    assert min(shares) >= 1
    for share, weight in zip(shares, weights, strict=True):
        assert share / sum(shares) == pytest.approx(weight / sum(weights), abs=1e-4)
    assert whole_shares([0.0001, 1]) == [1, 10_000]
    assert whole_shares([3, 1]) == whole_shares([0.75, 0.25]) == whole_shares([0.3, 0.1]) == [3, 1]


@settings(max_examples=50)
@given(st.data())
def test_a_mixture_reads_each_part_as_its_own_index_does(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(9, 60), min_size=1, max_size=4))
    weights = data.draw(st.lists(st.integers(1, 9), min_size=len(sizes), max_size=len(sizes)))
    parts = [WindowIndex(size, 4, seed) for seed, size in enumerate(sizes)]
    offsets = np.cumsum([0, *sizes[:-1]]).tolist()
    index = MixtureIndex(parts, offsets, weights)
    count = data.draw(st.integers(1, 300))
    first = data.draw(st.integers(0, 1000))
    starts = index.starts(np.arange(first, first + count))
    assert np.array_equal(starts, np.concatenate([index.starts(np.array([n])) for n in range(first, first + count)]))
    everything = index.starts(np.arange(first + count))
    for part, offset, size, weight in zip(parts, offsets, sizes, weights, strict=True):
        own = everything[(everything >= offset) & (everything < offset + size)] - offset
        assert np.array_equal(own, part.starts(np.arange(len(own)))), "in order, none left out, none twice"
        assert abs(len(own) - (first + count) * weight / sum(weights)) < 1


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Path, Path]:
    for name, letter in (("a", "a"), ("b", "b")):
        (tmp_path / name).mkdir()
        for number in range(80):
            (tmp_path / name / f"{number}.txt").write_text(f"{letter * 40} {number}\n" * (1 + (name == "b")))
    return tmp_path / "a", tmp_path / "b"


def mixture(parts: tuple[Path, Path], *overrides: str) -> Corpus:
    source = f"data.source=[{{source: {parts[0]}, weight: 3}}, {parts[1]}]"
    return open_corpus(data_of(source, *overrides))


def test_a_mixture_is_prepared_part_by_part(parts: tuple[Path, Path]) -> None:
    corpus = mixture(parts)
    alone = [prepare_cached(str(part), "bytes") for part in parts]
    assert corpus.sizes == tuple(len(data.train) for data in alone)
    assert corpus.facts.train_tokens == sum(corpus.sizes)
    rows = corpus.tokens.train.windows(corpus.index(16, 7).starts(np.arange(400)), 17)
    from_b = (rows == ord("b")).any(axis=1)
    assert from_b.sum() == 100
    assert from_b.reshape(-1, 4).sum(axis=1).tolist() == [1] * 100
    assert not ((rows == ord("a")).any(axis=1) & from_b).any(), "no window lies in two parts"


def test_the_fingerprint_names_parts_and_weights(parts: tuple[Path, Path]) -> None:
    fingerprint = mixture(parts).facts.fingerprint
    assert fingerprint == mixture(parts).facts.fingerprint
    assert fingerprint != open_corpus(data_of(f"data.source=[{parts[0]}, {parts[1]}]")).facts.fingerprint


def test_validation_is_the_union_and_begins_with_all_of_it(
    parts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "_BLOCK_TOKENS", 60)
    val = mixture(parts).tokens.val
    alone = [prepare_cached(str(part), "bytes").val for part in parts]
    assert val is not None
    assert alone[0] is not None
    assert alone[1] is not None
    assert val.bytes == (alone[0].bytes or 0) + (alone[1].bytes or 0)
    tokens = val.read(0, len(val))
    both = np.concatenate([split.read(0, len(split)) for split in alone if split])
    assert np.array_equal(np.sort(tokens), np.sort(both))
    share = len(alone[1]) / len(both)
    half = tokens[: len(tokens) // 2]
    assert np.mean(half[half >= ord("a")] == ord("b")) == pytest.approx(share, abs=0.15)


def test_a_trained_tokenizer_learns_from_all_parts(parts: tuple[Path, Path]) -> None:
    corpus = mixture(parts, "data.tokenizer=train:300")
    tokenizer = corpus.tokens.tokenizer()
    assert corpus.tokens.tokenizer_name == "train:300"
    assert len(tokenizer.encode("a" * 40)) < 12
    assert len(tokenizer.encode("b" * 40)) < 12
    assert mixture(parts, "data.tokenizer=train:300").facts == corpus.facts


def test_parts_of_different_tokenizers_are_refused(parts: tuple[Path, Path], tmp_path: Path) -> None:
    other = prepare_cached(str(parts[1]), "train:300").source
    (tmp_path / "own").mkdir()
    prepare_cached(str(parts[1]), "train:300").tokenizer().save(tmp_path / "own" / "tokenizer.json")
    with pytest.raises(UserError, match="wrong tokenizer"):
        open_corpus(data_of(f"data.source=[{parts[0]}, {other}]"))


def test_a_part_that_is_too_short_is_named(parts: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("no")
    with pytest.raises(UserError, match=r"short\.txt: the data has \d tokens, less than one sequence"):
        open_corpus(data_of(f"data.source=[{parts[0]}, {tmp_path / 'short.txt'}]")).index(16, 0)


@pytest.mark.parametrize(
    "value", ["[]", "3", "[{weight: 2}]", "[{source: a, weight: 0}]", "[a, a]", "{source: a}", "[3]"]
)
def test_a_source_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(RecipeError, match=r"data\.source"):
        data_of(f"data.source={value}")


def test_a_mixture_trains_and_resumes_exactly(
    parts: tuple[Path, Path], world: Any, tmp_path: Path, tensors_of: Any
) -> None:
    source = f"data.source=[{{source: {parts[0]}, weight: 3}}, {parts[1]}]"
    uninterrupted = world.run(tmp_path / "whole", source)
    world.run(tmp_path / "cut", source, stop_at=3)
    resumed = world.run(tmp_path / "cut", source, resume=True)
    assert uninterrupted.state.step == resumed.state.step == 6
    first, second = (tensors_of(tmp_path / name / "checkpoints/step-00000006") for name in ("whole", "cut"))
    assert all((first[name] == second[name]).all() for name in first)
    metrics = uninterrupted.objective.evaluate(4)
    assert metrics["bits_per_byte"] == pytest.approx(metrics["loss"] / np.log(2), rel=0.1), "a byte is a token here"
