"""R13: an invalid row, token file or shard is refused or counted, and never trained on."""

from __future__ import annotations

import functools
import gzip
import json
import pickle
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from redline.data import sources
from redline.data import tokens as shards
from redline.data.chat_template import load_chat_tokenizer
from redline.data.prepare import prepare_source
from redline.data.sources import Reading
from redline.data.tokenizer import ByteTokenizer
from redline.data.tokens import open_tokens
from redline.errors import UserError
from redline.jobs.diffusion.data import read_records
from redline.jobs.finetune import data as answering
from redline.jobs.finetune.data import load_answers
from redline.recipe.schema import Data

LONGEST_ROW = 8192  # in place of 64 MiB
Row = dict[str, Any]


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


NO_TEXT: list[Any] = [
    *(None, True, 17, 2.5, float("nan"), float("inf"), -(10**400), [], {}, ["a"], {"a": "b"}, nested(400)),
    *("", "   ", "\n\t\r\n", "a\0b", "\ud800", "b\udfff", "\u3000"),
]
NO_OBJECT = [
    *(b"not json", b"{", b'{"text": "a"', b"[1, 2]", b"17", b"null", b'"text"', b"NaN", b"}", b"{'text': 'a'}"),
    *(b"\xff\xfe\x00\x01", b"\x00" * 20, b'{"text": "\xff"}', b"[" * 5000, b'{"a":' * 1200, b"9" * 5000),
    b'{"text": "' + b"x" * (2 * LONGEST_ROW) + b'"}',
]


@dataclass(frozen=True)
class Kind:
    """A kind of rows: a usable row, its required fields, and a function that reads back the good ones."""

    good: Callable[[int], Row]
    fields: tuple[str, ...]
    worse: Callable[[random.Random, Row], Row]  # makes a row that is broken in a way specific to this kind
    read: Callable[[Path], tuple[list[str], int]]  # the training texts, and the number of rows counted as bad
    expected: Callable[[int], str]  # the training text of the good row


def text_row(number: int) -> Row:
    return {"text": f"Text {number} é\n of its own.", "more": number}


def prepared(path: Path) -> tuple[list[str], int]:
    out = path.with_suffix(".tokens")
    tokenizer = ByteTokenizer()
    data = prepare_source(str(path), tokenizer, out, Reading(0.0), workers=1)
    ids = np.concatenate(data.train.pieces)
    documents = np.split(ids, np.flatnonzero(ids == tokenizer.eot))[1:]
    meta = json.loads((out / "meta.json").read_text())
    return [tokenizer.decode(document[1:].tolist()) for document in documents], meta["counts"]["bad_rows"]


def record_row(number: int) -> Row:
    return {"question": f"What is {number} + 1?", "answer": f"It is {number + 1}.\n#### {number + 1}"}


def recorded(path: Path) -> tuple[list[str], int]:
    records, report = read_records(str(path))
    assert report.bad == sum(report.reasons.values())
    return [f"{record.question} {record.answer}" for record in records], report.bad


def no_number(rng: random.Random, row: Row) -> Row:
    return {**row, "answer": rng.choice(["It is one.", "####", "#### none", "12", "#### −", "12 ####"])}


def pair_row(number: int) -> Row:
    if number % 3:
        return {"prompt": f"What is {number}?", "completion": f"It is {number}."}
    turns = [{"role": "user", "content": f"What is {number}?"}, {"role": "assistant", "content": f"It is {number}."}]
    return {"messages": turns}


def no_chat(rng: random.Random, row: Row) -> Row:
    user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    broken: list[Any] = [
        *(
            [assistant, user],
            [user],
            [],
            [user, "b"],
            [user, {**assistant, "role": "judge"}],
            [user, {"role": "assistant"}],
        ),
        *([user, {**assistant, "role": rng.choice(NO_TEXT)}], [user, {**assistant, "tool_calls": [1]}], "ab", 5),
        *([{**user, "content": rng.choice(NO_TEXT)}, assistant], [user, {**assistant, "content": rng.choice(NO_TEXT)}]),
    ]
    return {"messages": rng.choice(broken)}


@pytest.fixture
def kinds(tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Kind]:
    monkeypatch.setattr(sources, "MAX_ROW_BYTES", LONGEST_ROW)
    monkeypatch.setattr(answering, "load_chat_tokenizer", functools.cache(load_chat_tokenizer))
    how: Row = {"seq_len": 512, "pack": True, "learn": "answers", "overlong": "drop", "template": None, "seed": 1}

    def answered(path: Path) -> tuple[list[str], int]:
        data = load_answers(Data(source=str(path), shuffle=False), folder=tiny_base, val_fraction=0.0, **how)
        found = [question.reference.strip() for question in data.questions(data.train, 1000)]
        return sorted(found), data.report.sources[0].bad

    return {
        "text": Kind(text_row, ("text",), lambda _, row: {"texts": "a"}, prepared, lambda n: text_row(n)["text"]),
        "records": Kind(record_row, ("question", "answer"), no_number, recorded, lambda n: f"What is {n} + 1? {n + 1}"),
        "answers": Kind(pair_row, ("prompt", "completion"), no_chat, answered, lambda n: f"It is {n}."),
    }


class Table:
    """A table of good and bad rows."""

    def __init__(self, kind: Kind, rng: random.Random, path: Path) -> None:
        self.good: list[int] = []
        self.bad = 0
        lines = []
        share = rng.choice([0.1, 0.3, 0.45, 0.9])
        for number in range(rng.randint(1, 14)):
            if is_bad := rng.random() < share:
                self.bad += 1
            else:
                self.good.append(number)
            lines.append(self._bad(kind, rng, number) if is_bad else line_of(kind.good(number)))
            lines += [b""] * rng.choice([0, 0, 0, 1])  # an empty line is no row
        content = b"\n".join(lines) + rng.choice([b"", b"\n"])
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)

    @property
    def must_be_refused(self) -> bool:
        return not self.good or self.bad > len(self.good)

    def _bad(self, kind: Kind, rng: random.Random, number: int) -> bytes:
        row = kind.good(number)
        way = rng.choice(["object", "field", "missing", "worse"])
        if way == "object":
            return rng.choice(NO_OBJECT)
        if way == "worse":
            return line_of(kind.worse(rng, row))
        fields = [field for field in kind.fields if field in row]
        if not fields:
            return line_of(kind.worse(rng, row))
        field = rng.choice(fields)
        if way == "missing":
            return line_of({name: value for name, value in row.items() if name != field})
        return line_of({**row, field: rng.choice(NO_TEXT)})


def line_of(row: Row) -> bytes:
    return json.dumps(row).encode()


def outcome(kind: Kind, path: Path) -> tuple[list[str], int, UserError | None]:
    try:
        return (*kind.read(path), None)
    except UserError as error:
        return [], 0, error


SIZES = [200, pytest.param(5000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]


@pytest.mark.parametrize("trials", SIZES)
def test_bad_rows(kinds: dict[str, Kind], tmp_path: Path, say: Any, trials: int) -> None:
    """Data with more bad rows than good ones are refused; otherwise good rows are read and bad ones counted."""
    refused = counted = 0
    for seed in range(trials):
        rng = random.Random(seed)
        kind = kinds[rng.choice(list(kinds))]
        path = tmp_path / f"{seed}{rng.choice(['.jsonl', '.jsonl', '.jsonl.gz', '.ndjson'])}"
        table = Table(kind, rng, path)
        found, bad, error = outcome(kind, path)
        assert table.must_be_refused == (error is not None), (seed, error)
        if error is not None:
            assert error.fix, seed
            assert len(str(error)) < 2000, "a row is quoted, not repeated"
            refused += 1
            continue
        assert found == (sorted if kind is kinds["answers"] else list)(map(kind.expected, table.good)), seed
        assert bad == table.bad, seed
        counted += bad
    say(f"R13: {trials} tables with bad rows: {refused} refused, in the others {counted} rows counted, 0 trained on")
    assert min(refused, counted) > trials // 10


DAMAGE = ["half", "start", "end", "empty column", "numbers", "bytes", "bad utf-8", "no column"]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["text", "records", "answers"])
def test_bad_parquet(kinds: dict[str, Kind], tmp_path: Path, name: str, damage: str) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    kind, path = kinds[name], tmp_path / "rows.parquet"
    columns = {key: ["a", "b"] for key in ("text", "question", "answer", "prompt", "completion")}
    raw = pa.array([b"\xff\xfe", b"\xc3("])
    other: dict[str, Any] = {
        "empty column": pa.nulls(2),
        "numbers": pa.array([1, 2]),
        "bytes": raw,
        "bad utf-8": pa.Array.from_buffers(pa.string(), 2, raw.buffers()),
    }
    table = {key: other.get(damage, values) for key, values in columns.items()}
    pq.write_table(pa.table({"other": [1, 2]} if damage == "no column" else table), path)
    whole = path.read_bytes()
    kept = {"half": whole[: len(whole) // 2], "start": whole[9:], "end": whole[:-9]}
    path.write_bytes(kept.get(damage, whole))
    with pytest.raises(UserError):
        kind.read(path)


def test_reasons_for_bad_rows_are_few_and_short() -> None:
    """Rows that each fail with another message must not fill the memory or the terminal."""
    stats = sources.ReadStats("rows")
    for number in range(900):
        stats.rows += 2
        stats.bad_row("here", f"a turn of {number}{'x' * 9000}\ud800", "\udfff" * 9000)
    assert stats.bad_rows.total() == 900
    assert len(stats.bad_rows) <= 101
    assert len(json.dumps(stats.counts()).encode()) < 100_000
    assert all(len(reason) < 300 and reason.encode() for reason in [*stats.bad_rows, *stats.examples, stats.fix])


RAW: dict[str, Callable[[np.ndarray], bytes]] = {
    **{kind: lambda ids, kind=kind: ids.astype(kind).tobytes() for kind in ("<u4", "<i8", ">u2", "<f4", "<f8")},  # type: ignore[misc]
    "negative": lambda ids: (-ids).astype("<i4").tobytes(),
    "odd length": lambda ids: ids.astype("<u2").tobytes()[:-1],
    "text": lambda ids: b"It is a text of words.\n" * 100,
    "text of accents": lambda ids: "déjà vu, naïve\n".encode() * 100,
    "npy": lambda ids: b"\x93NUMPY\x01\x00" + ids.astype("<u2").tobytes(),
    "zip": lambda ids: b"PK\x03\x04" + ids.astype("<u2").tobytes(),
    "a header": lambda ids: struct.pack("<256i", 20240520, *range(255)) + ids.astype("<u2").tobytes(),
    "a shard": lambda ids: shards.shard_header(np.dtype("<u2"), len(ids), "0" * 16) + ids.astype("<u2").tobytes(),
    "pickle": lambda ids: pickle.dumps(list(map(int, ids))),
    "nothing": lambda ids: b"",
    "another vocabulary": lambda ids: (ids + 9000).clip(0, 65535).astype("<u2").tobytes(),
}


@pytest.mark.parametrize("name", RAW)
def test_token_files_of_another_format(tmp_path: Path, name: str) -> None:
    for seed in range(5):
        ids = np.random.default_rng(seed).integers(0, 50257, 4096)
        path = tmp_path / f"{seed}.bin"
        path.write_bytes(RAW[name](ids))
        with pytest.raises(UserError):
            open_tokens(path, "gpt2")
    path.write_bytes(ids.astype("<u2").tobytes())
    assert len(open_tokens(path, "gpt2").train) > 3000
    with pytest.raises(UserError, match="outside the vocabulary of bytes"):
        open_tokens(path, "bytes")


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """A prepared folder."""
    path = tmp_path / "text.jsonl"
    path.write_bytes(b"\n".join(line_of(text_row(number)) for number in range(60)))
    prepare_source(str(path), ByteTokenizer(), tmp_path / "tokens", Reading(0.1), workers=1)
    return tmp_path / "tokens"


def spoil_meta(meta: Any, rng: random.Random) -> bytes:
    """Replace one value of the description everywhere."""
    places: list[tuple[Any, Any]] = []

    def visit(node: Any) -> None:
        for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
            if key not in ("counts", "name"):  # for people: no token follows from them
                places.append((node, key))
                visit(value)

    visit(meta)
    node, key = rng.choice(places)
    other: list[Any] = [None, -1, 0, 10**30, "", "../train", "/etc/passwd", [], {}, True, "uint32", 1.5, nested(50)]
    node[key] = rng.choice([value for value in other if value != node[key]])
    return json.dumps(meta).encode()


@pytest.mark.parametrize("trials", [120, pytest.param(3000, marks=pytest.mark.soak)])
def test_damaged_shards(tokens: Path, say: Any, trials: int) -> None:
    whole = {file.name: file.read_bytes() for file in tokens.iterdir()}
    shard_names = [name for name in whole if name.endswith(".tok")]
    for seed in range(trials):
        rng = random.Random(seed)
        name = rng.choice([*shard_names, "meta.json", "meta.json"])
        content = bytearray(whole[name])
        way = rng.choice(["cut", "longer", "header", "gone"])
        if name == "meta.json" and way in ("longer", "header"):
            content = bytearray(spoil_meta(json.loads(content), rng))
        elif way == "cut":
            del content[rng.randrange(len(content) - 2) :]
        elif way == "longer":
            content += bytes(rng.randint(1, 5000))
        elif way == "header":
            content[rng.randrange(shards.HEADER_BYTES)] ^= 1 << rng.randrange(8)
        if way == "gone":
            (tokens / name).unlink()
        else:
            (tokens / name).write_bytes(content)
        with pytest.raises(UserError):
            open_tokens(tokens)
        (tokens / name).write_bytes(whole[name])
    open_tokens(tokens)
    say(f"R13: {trials} spoilt shards and descriptions of them: all refused")


def test_tokens_of_another_tokenizer(tokens: Path) -> None:
    for spec in ("gpt2", "train:300", "0" * 16):
        with pytest.raises(UserError, match="wrong tokenizer"):
            open_tokens(tokens, spec)
    (tokens / "meta.json").write_text('{"schema": "redline-tokens-1", "a": ' + "[" * 100_000)
    with pytest.raises(UserError):
        open_tokens(tokens)
    shutil.rmtree(tokens)
    for name in ("x" * 5000, "\0", "/dev/null", "\udcff"):
        for kind in (prepared, recorded, lambda path: open_tokens(path, "bytes")):
            with pytest.raises(UserError):
                kind(Path(name))


def test_planted_defects_are_caught(kinds: dict[str, Kind], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R18: a reader that accepts binary data or drops rows silently fails the test above."""
    monkeypatch.setattr(sources, "is_clean", lambda text: True)
    with pytest.raises((AssertionError, UnicodeEncodeError)):
        test_bad_rows(kinds, tmp_path, lambda _: None, 60)
    monkeypatch.undo()
    monkeypatch.setattr(sources, "MAX_ROW_BYTES", LONGEST_ROW)
    monkeypatch.setattr(sources, "_parse_object", lambda line, *_: None)
    (tmp_path / "again").mkdir()
    with pytest.raises(AssertionError):
        test_bad_rows(kinds, tmp_path / "again", lambda _: None, 60)
