"""Rows → records: unusable rows are counted, and no question is in both splits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.data import sources
from redline.errors import UserError
from redline.jobs.diffusion.data import Record, parse_record, read_records, split_records

GSM8K = Path(__file__).parents[3] / "shared/data/gsm8k"
CLIPS = "Natalia sold clips to 48 friends in April, and half as many in May. How many altogether?"
MAIN = {
    "question": CLIPS,
    "answer": "She sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = <<48+24=72>>72 clips.\n#### 72",
}
SOCRATIC = {
    "question": CLIPS,
    "answer": "How many in May? ** She sold 48/2 = <<48/2=24>>24 clips in May.\n"
    "How many altogether? ** She sold 48+24 = <<48+24=72>>72 clips.\n#### 72",
}
STEPS = "She sold 48/2 = 24 clips in May.\nShe sold 48+24 = 72 clips."
PARTS = {"question": "2 and 3?", "plan": "How many?", "execution": "2 + 3 = 5.", "answer": "5"}


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_the_main_rows_of_gsm8k_have_no_plan() -> None:
    assert parse_record(MAIN) == Record(CLIPS, "", STEPS, "72")


def test_the_socratic_rows_of_gsm8k_have_a_plan() -> None:
    assert parse_record(SOCRATIC) == Record(CLIPS, "How many in May?\nHow many altogether?", STEPS, "72")


def test_rows_that_name_their_parts() -> None:
    assert parse_record(PARTS) == Record("2 and 3?", "How many?", "2 + 3 = 5.", "5")
    assert parse_record(PARTS | {"plan": None}).plan == parse_record(PARTS | {"plan": ""}).plan == ""
    assert parse_record(PARTS | {"answer": "so\n#### 1,005"}).answer == "1005"
    assert parse_record(PARTS | {"answer": 5}).answer == parse_record(PARTS | {"answer": 5.0}).answer == "5"
    assert parse_record(PARTS | {"answer": 1234567.5}).answer == "1234567.5"
    assert parse_record(PARTS | {"execution": "  2 + 3 = <<2+3=5>>5 \n\n so "}).execution == "2 + 3 = 5\nso"


def test_a_power_is_not_a_sub_question() -> None:
    """` ** ` separates sub-questions from steps only if every line has it."""
    found = parse_record({"question": "q", "answer": "2 ** 3 = 8\nIt is 8.\n#### 8"})
    assert (found.plan, found.execution) == ("", "2 ** 3 = 8\nIt is 8.")


@pytest.mark.parametrize(
    ("written", "number"),
    [
        ("72", "72"),
        ("1,234,567", "1234567"),
        ("$18", "18"),
        ("-5", "-5"),
        ("−5", "-5"),
        ("$-5", "-5"),
        ("0.50", "0.50"),
    ],
)
def test_final_numbers(written: str, number: str) -> None:
    assert parse_record({"question": "q", "answer": f"a\n#### {written}"}).answer == number


def test_bad_rows_are_counted_with_reason_and_place(tmp_path: Path) -> None:
    bad = [
        {"question": "q"},
        {"question": "q", "answer": "It is 5."},
        {"question": "q", "answer": "It is\n#### five"},
        {"question": " ", "answer": "#### 5"},
        {"question": ["q"], "answer": "#### 5"},
        {"question": "q", "answer": None},
        PARTS | {"answer": " "},
        PARTS | {"answer": float("nan")},
        "{not JSON",
        "[1, 2]",
    ]
    source = write(tmp_path / "rows.jsonl", [MAIN, *bad, *[SOCRATIC] * 12])
    records, report = read_records(source)
    assert len(records) == 13
    assert (report.source, report.rows, report.bad) == (source, 23, 10)
    assert report.reasons == {
        "no 'answer' field": 2,
        "no #### in its answer": 1,
        "no number after the #### of its answer": 1,
        "empty 'question'": 1,
        "'question' is not text": 1,
        "empty 'answer'": 1,
        "'answer' is not text": 1,
        "not JSON": 1,
        "not a JSON object": 1,
    }
    assert report.examples[0] == "rows.jsonl:2: no 'answer' field"
    assert "10 of them unusable" in report.line()
    assert "rows.jsonl:2" in report.line()


def test_a_source_without_usable_rows_is_an_error(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", [{"question": "q", "answer": "It is 5."}] * 3)
    with pytest.raises(UserError, match=r"3 of 3 rows cannot be used; the first is rows\.jsonl:1: .*`#### N`"):
        read_records(source)
    blank = write(tmp_path / "blank.jsonl", [" "])
    with pytest.raises(UserError, match=r"holds no rows\. Give rows with question"):
        read_records(blank)
    text = tmp_path / "notes.txt"
    text.write_text("no rows")
    with pytest.raises(UserError, match="neither JSONL nor Parquet"):
        read_records(str(text))
    with pytest.raises(UserError, match="problems:easy"):
        read_records("embedded")
    with pytest.raises(UserError, match="no such file or folder"):
        read_records(str(tmp_path / "absent.jsonl"))


def test_parquet_and_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def rows(source: str, dataset: Any) -> Any:
        asked.append((dataset.name, dataset.config, dataset.split))
        return iter([MAIN, {"question": "q", "answer": "none"}, SOCRATIC])

    monkeypatch.setattr(sources, "open_dataset", rows)
    records, report = read_records("openai/gsm8k:socratic@test")
    assert asked == [("openai/gsm8k", "socratic", "test")]
    assert [bool(record.plan) for record in records] == [False, True]
    assert report.examples == ["openai/gsm8k:socratic@test:2: no #### in its answer"]
    pyarrow = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"id": [1, 2], "question": ["a", "b"], "plan": ["p", None], "execution": ["e", "f"]})
    pq.write_table(table.append_column("answer", pyarrow.array([5, 6])), tmp_path / "rows.parquet")
    found, _ = read_records(str(tmp_path / "rows.parquet"))
    assert found == [Record("a", "p", "e", "5"), Record("b", "", "f", "6")]


def test_embedded_problems_are_a_source() -> None:
    records, report = read_records("problems:medium:30")
    assert len(records) == report.rows == 30
    assert all(record.plan and record.execution for record in records)


questions = st.lists(st.text("abc", min_size=1, max_size=2), min_size=2, max_size=40)


@given(questions, questions, st.integers(0, 99), st.floats(0.01, 0.99), st.booleans())
def test_no_question_is_in_both_splits(one: list[str], two: list[str], seed: int, fraction: float, dedup: bool) -> None:
    parts = {
        name: [Record(text, "", f"{name} {number}", "1") for number, text in enumerate(some)]
        for name, some in (("one", one), ("two", two))
    }
    try:
        split = split_records(parts, seed, fraction, dedup=dedup)
    except UserError as error:
        assert error.where in parts  # noqa: PT017, every question of a source may be held out
        return
    train, val = ([record.question for part in side for record in part] for side in (split.train, split.val))
    assert set(train).isdisjoint(val)
    assert set(train) | set(val) == {*one, *two}
    assert len(set(val)) == len(val)
    assert (len(set(train)) == len(train)) or not dedup
    assert len(train) + len(val) + split.duplicates == len(one) + len(two)
    assert split.val[0] or len({*one}) == 1
    backwards = {name: some[::-1] for name, some in parts.items()}
    assert {r.question for part in split_records(backwards, seed, fraction, dedup=dedup).val for r in part} == set(val)


def test_the_size_of_the_split() -> None:
    records = [Record(f"question {number}", "", "e", "1") for number in range(2000)]
    sizes = [len(split_records({"a": records}, seed, 0.1, dedup=False).val[0]) for seed in range(5)]
    assert all(150 < size < 250 for size in sizes)
    held_out = [split_records({"a": records}, seed, 0.1, dedup=False).val[0] for seed in range(5)]
    assert len({tuple(record.question for record in some) for some in held_out}) == 5, "each seed has its own split"
    assert split_records({"a": records}, 0, 0.0, dedup=False).val == [[]]
    assert [
        len(side[0]) for side in vars(split_records({"a": records[:2]}, 0, 0.01, dedup=False)).values() if side
    ] == [1, 1]


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not on this machine")
def test_all_of_gsm8k() -> None:
    main, report = read_records(str(GSM8K / "test.jsonl"))
    socratic, _ = read_records(str(GSM8K / "test_socratic.jsonl"))
    assert len(main) == len(socratic) == 1319
    assert report.bad == 0
    assert [(r.question, r.answer) for r in main] == [(r.question, r.answer) for r in socratic]
    assert all(record.plan for record in socratic)
    assert not any(mark in r.execution + r.plan for r in socratic for mark in ("<<", ">>", " ** ", "####"))
    assert [r.answer.replace("-", "").replace(".", "").isdigit() for r in main] == [True] * 1319
