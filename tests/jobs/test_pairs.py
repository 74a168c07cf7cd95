"""Pairs of text and answers: the layouts that are read, the rows that are refused, and a split by article."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.errors import UserError
from redline.jobs.latent_prefix.data import Pair, cut_bytes, read_pairs, split_pairs, unrelated_pairs

SQUAD = Path(__file__).parents[3] / "shared/data/squad/squad-v1.1-40-articles.json"


def lines(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def squad(path: Path, answers: list | None = None) -> str:
    qa = {
        "id": "7",
        "question": "Who?",
        "answers": answers if answers is not None else [{"text": "Ann"}, {"text": "Ann"}, {"text": "she"}],
    }
    article = {"title": "T", "paragraphs": [{"context": "Ann was here.", "qas": [qa]}]}
    path.write_text(json.dumps({"version": "1.1", "data": [article]}))
    return str(path)


def test_squad_layout(tmp_path: Path) -> None:
    (pair,), report = read_pairs(squad(tmp_path / "squad.json"))
    assert pair == Pair("Question: Who?\nContext: Ann was here.\n", "Question: Who?\n", ("Ann", "she"), "T")
    assert (report.rows, report.bad) == (1, 0)


def test_rows_of_every_kind(tmp_path: Path) -> None:
    hotpot = {"question": "Where?", "answer": "there", "context": {"title": ["A"], "sentences": [["One. ", "Two."]]}}
    rows = [
        {"source": "a text", "answer": "an answer"},
        {
            "question": "Who?",
            "context": "Ann.",
            "answers": {"text": ["Ann", "Ann"], "answer_start": [0, 0]},
            "title": "T",
        },
        {"question": "1 + 1?", "answer": "1 + 1 = <<1+1=2>>2\n#### 1,002"},
        hotpot,
        {"question": "Where?", "answer": "there", "context": [["A", ["One. ", "Two."]]]},
        {"source": "how many?", "answer": 3},
    ]
    found, _ = read_pairs(lines(tmp_path / "rows.jsonl", *rows))
    assert [pair.answers for pair in found] == [("an answer",), ("Ann",), ("1002",), ("there",), ("there",), ("3",)]
    assert found[0].text == "a text\n"
    assert found[2].text == "Question: 1 + 1?\n"
    assert found[3].text == found[4].text == "Question: Where?\nContext: A: One. Two.\n"
    assert (found[1].group, found[1].question, found[0].question) == ("T", "Question: Who?\n", "")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"source": "a"}, "no answer"),
        ({"source": "a", "answer": "  "}, "empty 'answer'"),
        ({"source": "", "answer": "b"}, "empty 'source'"),
        ({"question": "a", "context": 3, "answer": "b"}, "'context' is not text"),
        ({"answer": "b"}, "neither a 'source'"),
        ({"source": "a", "answers": []}, "no answer"),
        ({"source": "a", "answer": "1\n####"}, "nothing after the ####"),
    ],
)
def test_unusable_rows_are_counted_and_a_majority_is_refused(tmp_path: Path, row: dict, reason: str) -> None:
    good = {"source": "a", "answer": "b"}
    found, report = read_pairs(lines(tmp_path / "some.jsonl", good, good, good, row))
    assert (len(found), report.bad) == (3, 1)
    assert reason in report.line()
    with pytest.raises(UserError, match=reason):
        read_pairs(lines(tmp_path / "most.jsonl", good, row, row, row))


def test_squad_without_answers_or_with_another_layout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no answer"):
        read_pairs(squad(tmp_path / "squad.json", []))
    (tmp_path / "broken.json").write_text('{"data": 3}')
    with pytest.raises(UserError, match="SQuAD's layout"):
        read_pairs(str(tmp_path / "broken.json"))


def test_embedded_problems_need_no_file() -> None:
    found, _ = read_pairs("problems:easy:20")
    assert len(found) == 20
    assert all(pair.text.startswith("Question: ") and pair.answers[0].isdigit() for pair in found)


def one_source(pairs: list[Pair], seed: int, fraction: float) -> tuple[list[Pair], list[Pair]]:
    """Return the pairs of training and of validation."""
    (train,), (val,) = split_pairs({"rows": pairs}, seed, fraction)
    return train, val


@given(st.lists(st.integers(0, 30), min_size=2, max_size=80), st.integers(0, 99), st.floats(0.05, 0.6))
def test_articles_are_held_out_as_a_whole(groups: list[int], seed: int, fraction: float) -> None:
    pairs = [Pair(f"text {n}", "", ("a",), f"article {group}") for n, group in enumerate(groups)]
    if len(set(groups)) < 2:
        with pytest.raises(UserError, match="none can be held out"):
            one_source(pairs, seed, fraction)
        return
    train, val = one_source(pairs, seed, fraction)
    assert train
    assert val
    assert {pair.group for pair in train}.isdisjoint(pair.group for pair in val)
    assert len(train) + len(val) == len(pairs)
    backwards = one_source(pairs[::-1], seed, fraction)[1]
    assert {pair.text for pair in backwards} == {pair.text for pair in val}, "the split does not depend on the order"


def test_a_text_in_two_articles_is_not_trained_on_if_it_is_held_out() -> None:
    pairs = [Pair(f"text {n}", "", ("a",), f"g{n}") for n in range(10)]
    _, val = one_source(pairs, 0, 0.3)
    doubled = [*pairs, Pair(val[0].text, "", ("b",), next(p.group for p in pairs if p not in val))]
    train, _ = one_source(doubled, 0, 0.3)
    assert val[0].text not in {pair.text for pair in train}


def test_a_text_in_two_sources_is_not_trained_on_if_one_of_them_holds_it_out() -> None:
    first = [Pair(f"text {n}", "", ("a",), f"g{n}") for n in range(40)]
    second = [Pair(f"text {n}", "", ("b",), f"other {n}") for n in range(40)]
    train, val = split_pairs({"first": first, "second": second}, 0, 0.3)
    assert all(train)
    assert all(val)
    held_out = {pair.text for some in val for pair in some}
    assert held_out.isdisjoint(pair.text for some in train for pair in some)


@given(st.text(max_size=60), st.integers(1, 40))
def test_truncation_keeps_whole_characters(text: str, most: int) -> None:
    kept = cut_bytes(text, most)
    raw = text.encode("utf-8", "replace")
    assert len(kept) <= most
    assert raw.startswith(kept)
    assert len(raw) - len(kept) < 4 or len(kept) > most - 4
    kept.decode("utf-8")


@pytest.mark.skipif(not SQUAD.is_file(), reason="SQuAD's articles are not here")
def test_real_articles() -> None:
    found, report = read_pairs(str(SQUAD))
    assert (len(found), report.bad) == (8231, 0)
    train, val = one_source(found, 1337, 0.1)
    assert {pair.group for pair in train}.isdisjoint(pair.group for pair in val)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=30))
def test_unrelated_pairs_are_of_another_group(made: list[tuple[int, int]]) -> None:
    pairs = [Pair(f"text {text}", "", ("a",), f"group {group}") for group, text in made]
    found = unrelated_pairs(pairs)
    groups, texts = {pair.group for pair in pairs}, {pair.text for pair in pairs}
    if len(groups) > 1:
        assert found is not None
        assert all(pairs[other].group != pair.group for pair, other in zip(pairs, found, strict=True))
    elif len(texts) > 1:
        assert found is not None
        assert all(pairs[other].text != pair.text for pair, other in zip(pairs, found, strict=True))
    else:
        assert found is None
