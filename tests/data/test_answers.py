"""Samples → packed sequences: nothing lost, nothing doubled, nothing seen on both sides, the same for the same seed."""

from __future__ import annotations

import io
import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_tokenizers import CHATML, FORGETFUL, STRICT, tokenizer_folder
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.cache import cache_dir
from redline.cli.preview import show_samples
from redline.data import time_limit
from redline.data.chat_template import ChatTokenizer, load_chat_tokenizer
from redline.data.corpus import EpochIndex
from redline.data.loader import IGNORE
from redline.data.sources import source_identity
from redline.data.tokens import digest_of
from redline.errors import UserError
from redline.jobs.finetune import data as answer_store
from redline.jobs.finetune.data import AnswerData, PackedSplit, best_fit, load_answers, preview_samples
from redline.recipe.schema import Data

pytest.importorskip("transformers")

SEQ_LEN = 96
Loaded = Callable[..., AnswerData]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_folder(tmp_path_factory.mktemp("tokenizer"), CHATML)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def row(number: int, name: str = "x") -> dict[str, str]:
    return {"prompt": f"How many {name} {number}?", "completion": "yes, " * (number % 9) + f"#### {number}"}


@pytest.fixture
def source(tmp_path: Path) -> str:
    return write(tmp_path / "a.jsonl", [row(number) for number in range(60)])


@pytest.fixture
def load(folder: Path) -> Loaded:
    def loaded(source: Any, tokenizer: Path | None = None, dedup: bool = False, **options: Any) -> AnswerData:
        standard: dict[str, Any] = {
            "seq_len": SEQ_LEN,
            "pack": True,
            "learn": "answers",
            "overlong": "drop",
            "template": None,
            "seed": 1,
            "val_fraction": 0.2,
        }
        return load_answers(Data(source=source, dedup=dedup), folder=tokenizer or folder, **standard | options)

    return loaded


def texts(split: PackedSplit | None, tokenizer: ChatTokenizer) -> list[str]:
    """The samples of a split, in its order."""
    return [] if split is None else [tokenizer.decode(split.samples[n][0]) for n in range(len(split.samples))]


def lessons(rows: dict[str, Any]) -> Counter[tuple[tuple[int, ...], int]]:
    """What a model with document masks learns: (context → target), each with how often."""
    found: Counter[tuple[tuple[int, ...], int]] = Counter()
    for inputs, targets, documents in zip(rows["inputs"], rows["targets"], rows["documents"], strict=True):
        for at in np.flatnonzero(targets != IGNORE):
            context = inputs[: at + 1][documents[: at + 1] == documents[at]]
            found[tuple(context.tolist()), int(targets[at])] += 1
    return found


def test_ignore_is_what_the_loss_ignores() -> None:
    from redline.kernels.cross_entropy import IGNORE as IGNORED

    assert IGNORE == IGNORED


@given(st.integers(1, 60).flatmap(lambda room: st.tuples(st.just(room), st.lists(st.integers(1, room), max_size=80))))
def test_best_fit(drawn: tuple[int, list[int]]) -> None:
    room, lengths = drawn
    bins = best_fit(np.array(lengths, dtype=np.int64), room)
    sums = np.bincount(bins, weights=lengths) if lengths else np.zeros(0)
    assert (sums > 0).all()  # no bin is empty, so every number is a bin
    assert (sums <= room).all()
    assert np.count_nonzero(2 * sums <= room) <= 1  # two halves would have been one
    for item, chosen in enumerate(bins):  # the fullest bin that has room, at its time
        before = np.bincount(bins[:item], weights=lengths[:item], minlength=item + 1)
        left = room - before
        fitting = left[(left >= lengths[item]) & (before > 0)]
        assert left[chosen] == (fitting.min() if len(fitting) else room)
    with pytest.raises(ValueError, match="between 1 and 4"):
        best_fit(np.array([5]), 4)


@pytest.mark.parametrize("learn", ["answers", "all"])
def test_packed_teaches_what_single_rows_teach(load: Loaded, source: str, learn: str) -> None:
    packed, single = load(source, learn=learn), load(source, learn=learn, pack=False)
    assert 1 < len(packed.train) < len(single.train) == len(single.train.samples) == len(packed.train.samples)
    assert packed.report.fill > 0.8 > single.report.fill
    for ours, theirs in ((packed.train, single.train), (packed.val, single.val)):
        assert ours is not None
        assert theirs is not None
        everything = lessons(ours.rows(np.arange(len(ours))))
        assert everything == lessons(theirs.rows(np.arange(len(theirs))))
        assert everything.total() > 100
    expected: Counter[Any] = Counter()  # from the texts alone, by another way
    tokenizer = packed.tokenizer
    for text in texts(packed.train, tokenizer):
        ids = tokenizer._backend.encode(text, add_special_tokens=False).ids
        begin = len(tokenizer._backend.encode(text[: text.index("assistant\n") + 10], add_special_tokens=False).ids)
        places = range(begin, len(ids) - 1) if learn == "answers" else range(1, len(ids))  # not the last newline
        expected.update((tuple(ids[:at]), ids[at]) for at in places)
    assert expected == lessons(packed.train.rows(np.arange(len(packed.train))))
    assert packed.report.sources[0].learnt == expected.total()


def test_rows_of_a_packed_sequence(load: Loaded, source: str) -> None:
    data = load(source)
    rows = data.train.rows(np.arange(len(data.train)))
    assert {name: (values.shape[1], values.dtype.name) for name, values in rows.items()} == {
        "inputs": (SEQ_LEN, "int64"),
        "targets": (SEQ_LEN, "int64"),
        "documents": (SEQ_LEN, "int32"),
        "positions": (SEQ_LEN, "int32"),
    }
    filled = 0
    for number in range(len(data.train)):
        inputs, targets, documents, positions = (values[number] for values in rows.values())
        members = range(data.train.sequence_starts[number], data.train.sequence_starts[number + 1])
        assert documents[0] == 0
        assert set(np.diff(documents)) <= {0, 1}
        for document, place in enumerate(members):
            own, (tokens, _) = documents == document, data.train.samples[place]
            assert np.array_equal(inputs[own], tokens)
            assert np.array_equal(positions[own], np.arange(len(tokens)))
            assert targets[own][-1] == IGNORE  # no sample predicts its neighbour
            filled += len(tokens)
        padding = documents == len(members)
        assert padding.sum() == SEQ_LEN - sum(len(data.train.samples[place][0]) for place in members)
        assert (targets[padding] == IGNORE).all()
    assert data.report.fill == data.train.fill == filled / rows["inputs"].size
    assert data.facts.train_tokens == rows["inputs"].size
    assert data.facts.val_tokens == len(data.val or []) * SEQ_LEN
    assert data.facts.vocab_size == data.tokenizer.vocab_size


def test_overlong_samples(load: Loaded, tmp_path: Path) -> None:
    long_question = {"prompt": "clips " * 100, "completion": "yes"}
    long_answer = {"prompt": "a", "completion": "yes " * 100}
    path = write(tmp_path / "a.jsonl", [*(row(number) for number in range(20)), long_question, long_answer])
    dropped, cut = load(path, val_fraction=0.0), load(path, overlong="cut", val_fraction=0.0)
    assert (dropped.report.sources[0].overlong, dropped.report.sources[0].cut) == (2, 0)
    assert (cut.report.sources[0].overlong, cut.report.sources[0].cut) == (2, 1)
    assert (dropped.report.sources[0].train_samples, cut.report.sources[0].train_samples) == (20, 21)
    more = set(texts(cut.train, cut.tokenizer)) - set(texts(dropped.train, dropped.tokenizer))
    assert [text.startswith("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nyes yes") for text in more] == [True]
    whole = lessons(cut.train.rows(np.arange(len(cut.train)))).total()
    assert whole == cut.report.sources[0].learnt
    with pytest.raises(
        UserError, match=r"2 of 22 samples are longer than data\.seq_len=96\. Set data.seq_len to at least \d{3}"
    ):
        load(path, overlong="error")
    with pytest.raises(UserError, match=r"none of the 22 samples fits into data\.seq_len=4; .*overlong=cut"):
        load(path, seq_len=4)


def test_nothing_is_on_both_sides(load: Loaded, tmp_path: Path) -> None:
    rows = [row(number) for number in range(50)]
    chats = [{"messages": [{"role": "user", "content": r["prompt"]}, {"role": "assistant", "content": r["completion"]}]}
             for r in rows[:25]]  # fmt: skip
    first, second = write(tmp_path / "a.jsonl", rows + rows[:10]), write(tmp_path / "b.jsonl", [*chats, row(77)])
    data = load([first, second])
    train, val = texts(data.train, data.tokenizer), texts(data.val, data.tokenizer)
    assert not set(train) & set(val)
    assert len(val) == len(set(val))
    assert len(set(train) | set(val)) == 51
    total = sum(len(lines) for lines in (train, val)) + sum(s.duplicates for s in data.report.sources)
    assert total == 86
    assert 4 <= len(val) <= 18
    counts = Counter(train)
    assert max(counts.values()) == 3  # what is not held out may be there more than once …
    lean = load([first, second], dedup=True)
    assert Counter(texts(lean.train, lean.tokenizer)) == Counter(set(train))  # … unless that is not wanted


def test_the_split_follows_from_content_and_seed(load: Loaded, tmp_path: Path) -> None:
    rows = [row(number) for number in range(60)]
    data = load(write(tmp_path / "a.jsonl", rows))
    val = set(texts(data.val, data.tokenizer))
    turned = load(write(tmp_path / "b.jsonl", [*reversed(rows), *(row(number) for number in range(60, 90))]))
    assert val == set(texts(turned.val, data.tokenizer)) - {t for t in texts(turned.val, data.tokenizer) if
                                                             int(t.split("x ")[1].split("?")[0]) >= 60}  # fmt: skip
    other = load(str(tmp_path / "a.jsonl"), seed=2)
    assert val != set(texts(other.val, data.tokenizer))
    few = load(write(tmp_path / "c.jsonl", rows[:2]), val_fraction=0.001)
    assert (len(few.train.samples), len(texts(few.val, few.tokenizer))) == (1, 1)  # at least one, and not all
    many = load(write(tmp_path / "c.jsonl", rows[:3]), val_fraction=0.999)
    assert (len(many.train.samples), len(texts(many.val, many.tokenizer))) == (1, 2)
    assert load(write(tmp_path / "d.jsonl", rows[:1])).val is None
    assert load(str(tmp_path / "a.jsonl"), val_fraction=0.0).val is None


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 3.0])), min_size=1, max_size=4)
)
def test_repeats_are_how_often_a_source_comes_in_an_epoch(parts: list[tuple[int, float]]) -> None:
    sizes, repeats = [size for size, _ in parts], [repeat for _, repeat in parts]
    index = EpochIndex(sizes, repeats, seed=3)
    epochs = 12
    order = index.sequences(np.arange(epochs * len(index)))
    first = 0
    for size, repeat in parts:
        given_to_each = max(1, round(repeat * size))
        own = order[(order >= first) & (order < first + size)]
        assert len(own) == epochs * given_to_each
        for epoch in np.split(order, epochs):
            assert np.count_nonzero((epoch >= first) & (epoch < first + size)) == given_to_each
        times = np.bincount(own - first, minlength=size)
        assert times.max() - times.min() <= 1  # all have their turn before one has another
        first += size
    assert order.max() < first
    some = order[:: max(1, len(order) // 9)]
    alone = [index.sequences(np.array([number]))[0] for number in range(0, len(order), max(1, len(order) // 9))]
    assert alone == some.tolist()  # whatever else is asked for


def test_orders(load: Loaded, source: str) -> None:
    data = load(source)
    count = len(data.train)
    first, second = (data.index.sequences(np.arange(count) + epoch * count) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(count))
    assert first.tolist() != second.tolist() != list(range(count))
    again, other = load(source), load(source, seed=2)
    numbers = np.arange(3, 3 + 2 * count)
    for name, values in data.batch(numbers).items():
        assert np.array_equal(values, again.batch(numbers)[name])
    assert data.facts == again.facts
    assert data.facts.fingerprint != other.facts.fingerprint
    assert not np.array_equal(data.batch(numbers[:4])["inputs"], other.batch(numbers[:4])["inputs"])


def test_the_cache(load: Loaded, source: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = load(source)
    (kept,) = (cache / "answers").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(ChatTokenizer, "encode_rendered", None)  # nothing is tokenised again
        assert load(source, pack=False, seq_len=200, seed=9).facts.vocab_size == before.facts.vocab_size
    for damage in (
        lambda p: p.write_bytes(p.read_bytes()[:-4] + b"abcd"),
        lambda p: p.unlink(),
        lambda p: p.write_text(""),
    ):
        for name in ("tokens.npy", "learnt.npy", "meta.json"):
            damage(kept / name)
            assert load(source).facts == before.facts
            assert [one.name for one in (cache / "answers").iterdir()] == [kept.name]
    load(source, learn="all")
    with open(source, "a", encoding="utf-8") as file:
        file.write(json.dumps(row(99)) + "\n")
    assert load(source).report.sources[0].rows == 61
    assert len(list((cache / "answers").iterdir())) == 3
    assert all(isinstance(store.tokens, np.memmap) for store in load(source).train.samples.stores)


def test_a_failed_preparation_leaves_nothing(
    load: Loaded, source: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(answer_store, "_append", full)
    with pytest.raises(UserError, match=r"the cache cannot be written \(No space left on device\).*REDLINE_CACHE"):
        load(source)
    assert list((cache / "answers").iterdir()) == []


def test_a_template_has_a_budget_of_processor_time_for_each_source(
    load: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(time_limit.time, "thread_time", lambda: float(next(seconds)))  # each writing takes one
    few = [write(tmp_path / f"{name}.jsonl", [row(n, name) for n in range(15)]) for name in ("x", "y", "z")]
    assert len(load(few, val_fraction=0.0).train.samples) == 45, "of each source alone it is under a minute"
    many = write(tmp_path / "many.jsonl", [row(n) for n in range(60)])
    with pytest.raises(UserError, match="chat template"):
        load(many)


def test_rows_that_the_template_refuses(load: Loaded, tmp_path: Path) -> None:
    strict = tokenizer_folder(tmp_path / "strict", STRICT)
    odd = {"messages": [{"role": role, "content": "a"} for role in ("user", "user", "assistant")]}
    path = write(tmp_path / "a.jsonl", [row(0), odd, row(1), {"prompt": "x", "completion": ""}])
    report = load(path, strict, val_fraction=0.0).report.sources[0]
    assert (report.rows, report.bad, report.empty, report.train_samples) == (4, 2, 1, 2)
    assert sorted(example.split(" ")[0] for example in report.examples) == ["a.jsonl:2:", "a.jsonl:4:"]
    assert any("roles must alternate" in reason for reason in report.reasons)
    with pytest.raises(UserError, match=r"2 of 3 rows cannot be used; .*roles must alternate.*finetune\.template"):
        load(write(tmp_path / "b.jsonl", [odd, odd, row(1)]), strict)


def test_answers_of_one_row_stay_on_one_side(load: Loaded, tmp_path: Path) -> None:
    def thinking(number: int) -> dict[str, Any]:
        turns = [f"a{number}", f"<think>x</think>b{number}", f"c{number}", f"<think>y</think>d{number}"]
        roles = ("user", "assistant") * 2
        return {"messages": [{"role": r, "content": c} for r, c in zip(roles, turns, strict=True)]}

    forgetful = tokenizer_folder(tmp_path / "forgetful", FORGETFUL)
    data = load(write(tmp_path / "a.jsonl", [thinking(number) for number in range(30)]), forgetful)
    train, val = texts(data.train, data.tokenizer), texts(data.val, data.tokenizer)
    assert len(train) + len(val) == 60
    numbers = [{text.split("user\na")[1].split("<")[0] for text in side} for side in (train, val)]
    assert not numbers[0] & numbers[1]
    assert {len(side) for side in numbers} == {len(train) // 2, len(val) // 2}


def test_questions_for_evaluation(load: Loaded, source: str) -> None:
    data = load(source, val_fraction=0.0)
    questions = data.questions(data.train, 1000)
    asked = {row(number)["prompt"]: row(number)["completion"] for number in range(60)}
    assert len(questions) == 60
    for prompt, completion in asked.items():
        assert data.tokenizer.encode(prompt) in [one.prompt for one in questions if one.reference == completion]


def test_preview(load: Loaded, source: str, folder: Path) -> None:
    from rich.console import Console

    data = load(source)
    views = preview_samples(data, 5)
    first = int(data.index.sequences(np.array([0]))[0])
    assert [view.title.rpartition(" of ")[0] for view in views[:2]] == [f"sequence {first}, sample {n}" for n in (1, 2)]
    for view in views:
        plain = view.plain()
        prompt, answer = plain.split("assistant\n")
        assert answer.startswith("[[")
        assert answer.endswith("<|im_end|>]]\n")
        assert "[[" not in prompt
        assert plain.replace("[[", "").replace("]]", "") in texts(data.train, data.tokenizer)
        tokens = sum(len(load_chat_tokenizer(folder)._backend.encode(run.text).ids) for run in view.runs)
        assert f": {tokens:,} tokens, " in view.title
    file, colours = io.StringIO(), io.StringIO()
    show_samples(views, Console(file=file))
    assert views[1].plain() in file.getvalue()
    assert file.getvalue().count("--- sequence") == 5
    show_samples(views, Console(file=colours, force_terminal=True, width=200, color_system="standard"))
    assert "\x1b[1;32m" in colours.getvalue()  # what is learnt
    assert "\x1b[2m" in colours.getvalue()
    assert "[[" not in colours.getvalue()
    cut = preview_samples(data, 1, most=3)[0]
    assert "the beginning" in cut.title
    assert len(cut.plain()) < 40


# --- rows of plain text


def test_all_of_a_text_is_learnt_beside_answers(load: Loaded, tmp_path: Path) -> None:
    texts = [{"text": f"Text number {number} says nothing."} for number in range(20)]
    data = load(write(tmp_path / "mixed.jsonl", [*texts, *(row(number) for number in range(20))]), val_fraction=0.0)
    samples, encode = data.train.samples, data.tokenizer.encode_bare
    assert samples.is_text.sum() == 20
    for place in range(len(samples)):
        tokens, loss_mask = samples[place]
        if samples.is_text[place]:
            text = data.tokenizer.decode(tokens, special=False)
            assert tokens.tolist() == [*encode(text), data.tokenizer.eos_ids[-1]]
            assert loss_mask.tolist() == [False] + [True] * (len(tokens) - 1)
        else:
            assert loss_mask.argmax() > 1
            assert loss_mask.any()
    inputs = data.batch(np.arange(len(data.train)))
    targets = int((inputs["targets"] != IGNORE).sum())
    assert targets == samples.loss_tokens, "packing keeps every target of texts and answers"


def test_a_text_is_no_question(load: Loaded, tmp_path: Path) -> None:
    rows = [{"text": "No question."}, row(1), {"text": "Nor is this."}, row(2)]
    data = load(write(tmp_path / "mixed.jsonl", rows), val_fraction=0.0)
    questions = data.questions(data.train, 4)
    assert sorted(question.reference[-1] for question in questions) == ["1", "2"]
    titles = [view.title for view in preview_samples(data, 4)]
    assert sum(", plain text:" in title for title in titles) == 2


def test_a_text_that_ends_with_the_mark_gets_no_second_one(load: Loaded, tmp_path: Path) -> None:
    data = load(write(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "one<|endoftext|>"}, row(1)]), val_fraction=0.0)
    samples = data.train.samples
    ends = [samples[place][0].tolist() for place in np.flatnonzero(samples.is_text)]
    assert ends[0] == ends[1]


def test_a_cache_of_older_rules_is_made_again_if_it_had_bad_rows(load: Loaded, tmp_path: Path) -> None:
    """Older releases counted rows of text as bad; what they made of a source without bad rows is used as it is."""
    for name, rows, kept in (("good", [row(1), row(2)], 1), ("mixed", [{"text": "A text."}, row(1), row(2)], 3)):
        source = write(tmp_path / f"{name}.jsonl", rows)
        tokenizer = load(source, val_fraction=0.0).tokenizer
        key = [answer_store.SCHEMA, source_identity(source), tokenizer.identity, "answers"]
        meta_file = cache_dir() / "answers" / digest_of(key) / "meta.json"
        meta = json.loads(meta_file.read_text())
        older = {key: value for key, value in meta.items() if key not in ("rules", "digest")}
        older["counts"] = {**older["counts"], "bad_rows": len(rows) - 2, "rows": kept}
        meta_file.write_text(json.dumps({**older, "digest": digest_of(older)}))
        load(source, val_fraction=0.0)
        assert json.loads(meta_file.read_text())["counts"]["rows"] == (kept if name == "good" else 3)
        assert ("rules" in json.loads(meta_file.read_text())) == (name == "mixed")
