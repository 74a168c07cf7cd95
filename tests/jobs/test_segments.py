"""Records → rows: tokens and loss masks of the segments, and reports of what is truncated and dropped."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.data.tokenizer import ByteTokenizer, Tokenizer
from redline.errors import UserError
from redline.jobs.diffusion.data import (
    Record,
    RecordData,
    RecordEncoder,
    RecordSplit,
    SpecialTokenizer,
    load_records,
    load_run_tokenizer,
    question_row,
)
from redline.planning.layout import Layout, Segment
from redline.recipe.schema import Data

BYTES = SpecialTokenizer(ByteTokenizer())
PLAN, EXECUTION, ANSWER, PAD, MASK = BYTES.plan, BYTES.execution, BYTES.answer, BYTES.pad, BYTES.mask


def hdp(question: int = 8, plan: int = 8, execution: int = 16, block: int = 4, plan_block: int | None = None) -> Layout:
    return Layout(
        (
            Segment("question", question, question, given=True),
            Segment("plan", plan, plan_block or plan),
            Segment("execution", execution, block),
        )
    )


def baseline(question: int = 8, solution: int = 16, block: int = 4) -> Layout:
    return Layout((Segment("question", question, question, given=True), Segment("solution", solution, block)))


def encode(layout: Layout, *records: Record) -> tuple[RecordSplit, RecordEncoder]:
    rows = RecordEncoder(layout, BYTES)
    return RecordSplit(*rows.encode(records), layout), rows


def row(layout: Layout, record: Record) -> tuple[list[int], list[int]]:
    """Return its tokens, and the positions of the loss mask."""
    split, _ = encode(layout, record)
    found = split.rows(np.array([0]))
    return found["tokens"][0].tolist(), np.flatnonzero(found["loss_mask"][0]).tolist()


def codes(text: str) -> list[int]:
    return list(text.encode())


def write(path: Path, count: int, name: str = "q") -> str:
    rows = [
        {"question": f"{name} {n}?", "plan": "p" * (n % 5), "execution": f"{n}+1", "answer": str(n + 1)}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(source: Any, layout: Layout | None = None, **options: Any) -> RecordData:
    standard: dict[str, Any] = {"seed": 1, "val_fraction": 0.2}
    data = Data(source=source, tokenizer=options.pop("tokenizer", "bytes"), dedup=options.pop("dedup", False))
    return load_records(data, layout or hdp(), **standard | options)


def test_a_record_in_three_segments() -> None:
    tokens, learnt = row(hdp(), Record("2+3?", "sum", "2+3=5", "5"))
    assert tokens == [
        *codes("2+3?"), *[PAD] * 4,
        PLAN, *codes("sum"), *[PAD] * 4,
        EXECUTION, *codes("2+3=5"), ANSWER, *codes("5"), *[PAD] * 8,
    ]  # fmt: skip
    # The plan is one block. The execution's 8 tokens end with a block, so that the padding begins in the next.
    assert learnt == [*range(8, 16), *range(16, 28)]


def test_a_record_in_two_segments_has_no_plan() -> None:
    tokens, learnt = row(baseline(), Record("2+3?", "sum", "2+3=5.", "5"))
    assert tokens == [*codes("2+3?"), *[PAD] * 4, EXECUTION, *codes("2+3=5."), ANSWER, *codes("5"), *[PAD] * 7]
    assert learnt == list(range(8, 20))


@given(
    st.builds(hdp, st.integers(1, 20), st.just(12), st.just(24), st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]))
    | st.builds(baseline, st.integers(1, 20), st.just(24), st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24])),
    st.builds(
        Record, st.text("qr", max_size=30), st.text("st", max_size=20), st.text("12", max_size=40), st.just("77")
    ),
)
def test_the_loss_mask(layout: Layout, record: Record) -> None:
    """It covers content, the first padding token and the rest of its block; later blocks of padding it does not."""
    split, rows = encode(layout, record)
    found = split.rows(np.array([0]))
    for segment, begin in zip(layout.segments, layout.starts, strict=True):
        tokens = found["tokens"][0, begin : begin + segment.length]
        learnt = found["loss_mask"][0, begin : begin + segment.length]
        if segment.given:
            assert not learnt.any()
            continue
        end = tokens.tolist().index(PAD)
        assert (tokens[end:] == PAD).all()
        assert learnt[: end + 1].all()
        blocks = learnt.reshape(-1, segment.block)
        assert (blocks.all(1) == blocks.any(1)).all()
        assert blocks.any(1).sum() == end // segment.block + 1
    written = BYTES.decode([i for i in found["tokens"][0].tolist() if i != PAD])
    assert written.endswith("<|answer|>77")
    truncated = {one.name: one.truncated for one in rows.reports()}
    room = {segment.name: segment.length for segment in layout.segments}
    last = layout.segments[-1].name
    assert truncated["question"] == (len(record.question) > room["question"])
    assert truncated[last] == (len(record.execution) + 4 > room[last] - 1)
    assert written.startswith(record.question[: room["question"]])
    if not any(truncated.values()):
        plan = f"<|plan|>{record.plan}" if "plan" in room else ""
        assert written == f"{record.question}{plan}<|execution|>{record.execution}<|answer|>77"


def test_a_full_segment_keeps_one_padding_token() -> None:
    tokens, learnt = row(hdp(question=4), Record("2+3?", "1234567", "2+3=5", "5"))
    assert tokens[:12] == [*codes("2+3?"), PLAN, *codes("123456"), PAD], "a question that is given may be full"
    assert set(range(4, 12)) <= set(learnt)


def test_steps_are_truncated_and_the_answer_is_not() -> None:
    split, rows = encode(hdp(), Record("q", "p", "1234567890123456", "55"))
    end = split.rows(np.array([0]))["tokens"][0, 16:].tolist()
    assert end == [EXECUTION, *codes("12345678901"), ANSWER, *codes("55"), PAD]
    assert [(one.name, one.truncated) for one in rows.reports()] == [("question", 0), ("plan", 0), ("execution", 1)]


def test_a_record_whose_answer_does_not_fit_is_dropped() -> None:
    fits, too_long = Record("a", "p", "12", "1" * 13), Record("b", "p", "12", "1" * 14)
    split, rows = encode(hdp(), fits, too_long, replace(fits, question="c"))
    assert [record.question for record in split.records] == ["a", "c"]
    assert (len(split), rows.dropped) == (2, 1)
    assert (
        BYTES.decode(split.tokens[1].tolist()).replace("<|pad|>", "") == "c<|plan|>p<|execution|><|answer|>" + "1" * 13
    )


def test_lengths_are_reported() -> None:
    records = [Record("q" * n, "", "1", "2") for n in range(1, 101)]
    _, rows = encode(hdp(question=90), *records)
    question, plan, execution = rows.reports()
    assert (question.median, question.most, question.longest, question.truncated) == (51, 96, 100, 10)
    assert (plan.median, plan.longest, execution.longest) == (1, 1, 4)
    assert rows.without_plan == 100


def test_loading_a_source(tmp_path: Path) -> None:
    data = load(write(tmp_path / "rows.jsonl", 100))
    assert data.val is not None
    assert len(data.train) + len(data.val) == 100
    assert 10 <= len(data.val) <= 30
    trained = {record.question for record in data.train.records}
    assert trained.isdisjoint(record.question for record in data.val.records)
    assert data.facts.vocab_size == data.tokenizer.vocab_size == 262
    assert data.facts.train_tokens == len(data.train) * 32
    assert data.facts.val_tokens == len(data.val) * 32
    assert (data.facts.tokenizer, data.facts.tokenizer_fingerprint) == ("bytes", ByteTokenizer().fingerprint)
    rows = data.train.rows(np.array([3, 0]))
    assert rows["tokens"].dtype == np.int64
    assert rows["loss_mask"].dtype == bool
    assert rows["tokens"].shape == rows["loss_mask"].shape == (2, 32)
    assert bytes(rows["tokens"][1, :8].tolist()[: len(data.train.records[0].question)]).decode().startswith("q ")
    lines = "\n".join(data.report.lines())
    assert (data.report.train, data.report.val) == (len(data.train), len(data.val))
    assert data.report.without_plan == 20
    execution = data.report.segments[-1]
    assert (execution.median, execution.most, execution.longest, execution.length) == (8, 8, 9, 16)
    assert all(str(count) in lines for count in (len(data.train), len(data.val), 20))
    everything = load(write(tmp_path / "rows.jsonl", 100), val_fraction=0.0)
    assert everything.val is None
    assert len(everything.train) == 100


def test_the_order_depends_on_seed_and_sample_number_only(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", 50)
    data, again, other = load(source), load(source), load(source, seed=2)
    count = len(data.index)
    assert count == len(data.train)
    numbers = data.index.sequences(np.arange(3 * count))
    for epoch in numbers.reshape(3, count):
        assert sorted(epoch.tolist()) == list(range(count))
    assert np.array_equal(numbers[7:20], again.index.sequences(np.arange(7, 20)))
    assert data.facts == again.facts != other.facts
    for changed in (load(source, hdp(block=8)), load(source, val_fraction=0.3), load(source, baseline(8, 24))):
        assert changed.facts.fingerprint != data.facts.fingerprint


def test_weights_and_duplicates_of_several_sources(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one.jsonl", 40, "a"), write(tmp_path / "two.jsonl", 20, "b")
    data = load([{"source": one, "repeat": 0.5}, {"source": two, "repeat": 2.0}], val_fraction=0.0)
    first = data.index.sequences(np.arange(len(data.index)))
    assert len(data.index) == 60 == data.facts.train_tokens // 32
    assert (first < 40).sum() == 20
    shared = load([{"source": one, "weight": 0.5}, {"source": two, "weight": 2.0}], val_fraction=0.0)
    first = shared.index.sequences(np.arange(len(shared.index)))
    assert len(shared.index) == 60 == shared.facts.train_tokens // 32
    assert (first < 40).sum() == 12, "a fifth of the samples, though it has two thirds of the rows"
    assert shared.facts.fingerprint != data.facts.fingerprint
    assert [data.train.records[number].question[0] for number in (0, 39, 40, 59)] == ["a", "a", "b", "b"]
    copy = write(tmp_path / "copy.jsonl", 41, "a")
    doubled = load([one, copy], val_fraction=0.0, dedup=True)
    assert (len(doubled.train), doubled.report.duplicates) == (41, 40)
    with pytest.raises(UserError, match=r"one\.jsonl: no row is left"):
        load([copy, one], val_fraction=0.0, dedup=True)


def test_a_prompt_is_encoded_like_the_question_of_a_row(tmp_path: Path) -> None:
    data = load(write(tmp_path / "rows.jsonl", 30))
    assert data.val is not None
    rows = data.val.rows(np.arange(3))["tokens"]
    for tokens, record in zip(rows, data.val.records[:3], strict=True):
        assert tokens[:8].tolist() == question_row(record.question, hdp(), data.tokenizer)
        assert int(record.answer) == int(record.question[2:-1]) + 1
    assert question_row("123456789", hdp(), BYTES) == codes("12345678")


def test_a_tokenizer_is_trained_without_the_validation_records(tmp_path: Path) -> None:
    """The run can load it again from its folder."""
    source = tmp_path / "rows.jsonl"
    rows = [
        {"question": f"How many {'ab' * (n % 7)} {n}?", "execution": f"{n} + 1", "answer": n + 1} for n in range(80)
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = load(str(source), hdp(48, 8, 32), tokenizer="train:300")
    assert data.facts.vocab_size == data.tokenizer.base.vocab_size + 5 > 262
    texts = [text for r in data.train.records for text in (r.question, r.plan, r.execution, r.answer)]
    assert _trained_on(texts).fingerprint == data.facts.tokenizer_fingerprint
    data.tokenizer.save(tmp_path / "tokenizer.json")
    again = load_run_tokenizer(data.facts, tmp_path)
    assert again.fingerprint == data.tokenizer.fingerprint
    other = load(str(source), hdp(48, 8, 32), tokenizer=str(tmp_path / "tokenizer.json"))
    assert np.array_equal(other.train.tokens, data.train.tokens)


def _trained_on(texts: list[str]) -> Tokenizer:
    from redline.data.tokenizer import load_tokenizer

    return load_tokenizer("train:300", lambda: texts)


@pytest.mark.parametrize(
    ("layout", "key"),
    [
        (hdp(plan=2), r"hierarchical_diffusion\.plan .*at least 3"),
        (hdp(execution=3, block=3), r"hierarchical_diffusion\.execution .*at least 4"),
        (baseline(question=0), r"block_diffusion\.question"),
        (baseline(solution=2, block=2), r"data\.seq_len .*at least 4"),
    ],
)
def test_segments_that_are_too_short_are_refused(layout: Layout, key: str) -> None:
    with pytest.raises(UserError, match=key):
        load("problems:easy:10", layout)


def test_a_source_whose_answers_do_not_fit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "q", "execution": "e", "answer": "12345678"}\n' * 3)
    with pytest.raises(UserError, match=r"rows\.jsonl: no record's answer fits into the 8 .*\.execution by at least 3"):
        load(str(path), hdp(execution=8))
    with pytest.raises(UserError, match=r"Raise data\.seq_len by at least 3"):
        load(str(path), baseline(solution=8))
    assert len(load(str(path), hdp(execution=11, block=11)).train) == 3
    with pytest.raises(ValueError, match="not the segments of a record"):
        load(str(path), Layout((Segment("text", 8, 4),)))


def test_word_problems_fit_and_decode_to_their_record() -> None:
    data = load("problems:easy:400", hdp(96, 64, 64, 16), tokenizer="train:512")
    assert [one.truncated for one in data.report.segments] == [0, 0, 0]
    assert data.report.dropped == data.report.without_plan == 0
    tokens = data.train.tokens[0].tolist()
    record = data.train.records[0]
    written = data.tokenizer.decode([i for i in tokens if i != data.tokenizer.pad])
    parts = (record.question, "<|plan|>", record.plan, "<|execution|>", record.execution, "<|answer|>", record.answer)
    assert written == "".join(parts)
