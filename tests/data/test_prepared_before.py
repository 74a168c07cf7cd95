"""Prepared folders, caches and splits made before the package was restructured keep their identity.

`prepared_before/recorded.json` was written by running this file with the code of commit b9d150d: `describe_all` made a
varied set of tiny sources and recorded their fingerprints, which rows are held out, and the digests of their tokens.
The tests make the same sources with today's code and compare. `prepared_before/folder` and `prepared_before/stream`
were prepared by that commit; today's code has to open them and read the same tokens.

A difference here means that users would prepare their data again, or that a resumed run would train on rows that it was
validated on. Never record anew to make a failing test pass.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_tokenizers import CHATML, tokenizer_folder

from redline.data import stream
from redline.data.corpus import Corpus, facts_of, open_corpus
from redline.data.prepare import prepare_cached, prepare_source, tokenizer_for
from redline.data.sources import Reading, prepared_folder, shared_tokenizer
from redline.data.stream import StreamSplit, read_state
from redline.data.tokenizer import named_vocabulary
from redline.data.tokens import TokenData, TokenSplit, open_tokens
from redline.jobs.diffusion.data import load_records
from redline.jobs.finetune.data import AnswerData, load_answers
from redline.jobs.latent_prefix.data import PairData, PromptTokenizer, load_pairs
from redline.planning.layout import Layout, Segment
from redline.recipe.schema import Data

BEFORE = Path(__file__).with_name("prepared_before")
GPT2 = os.environ.get("REDLINE_GPT2")
WORDS = [
    "red",
    "line",
    "train",
    "token",
    "block",
    "mask",
    "loss",
    "step",
    "king",
    "river",
    "stone",
    "light",
    "naïve",
    "café",
    "日本語",
    "🙂",
]
SEQ_LEN = 32


# --- sources, the same on every machine: no randomness, no clock


def sentence(number: int, words: int = 9) -> str:
    return " ".join(WORDS[(number * 7 + place * place) % len(WORDS)] for place in range(words))


def text_of(number: int) -> str:
    return f"Row {number}.\n" + "".join(f"{sentence(number + line)}.\n" for line in range(1 + number % 5))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_text_rows(path: Path, numbers: range, key: str = "text") -> str:
    """Rows of text, among them every eleventh twice, an empty one and one without text."""
    rows: list[dict[str, Any]] = []
    for number in numbers:
        rows += [{key: text_of(number), "id": number}] * (2 if number % 11 == 0 else 1)
    return write_rows(path, [*rows, {key: "  "}, {"other": "x"}])


def write_folder(folder: Path, files: int) -> str:
    for number in range(files):
        (folder / f"part-{number % 3}").mkdir(parents=True, exist_ok=True)
        (folder / f"part-{number % 3}" / f"{number:03d}.txt").write_text(text_of(number), encoding="utf-8")
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    return str(folder)


def write_parquet(path: Path, numbers: range) -> str:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"content": [text_of(number) for number in numbers], "id": list(numbers)})
    pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=30)
    return str(path)


def write_completions(path: Path, numbers: range) -> str:
    rows = [{"prompt": f"What is {n}?", "completion": f"{sentence(n, 3)} {n}."} for n in numbers]
    return write_rows(path, [*rows, *rows[:4]])


def write_chats(path: Path, numbers: range) -> str:
    rows = []
    for n in numbers:
        turns = [("system", "Be brief."), ("user", f"Say {n}."), ("assistant", sentence(n, 4)), ("user", "More?")]
        messages = [{"role": role, "content": content} for role, content in turns]
        rows.append({"messages": [*messages, {"role": "assistant", "content": f"No more of {n}."}]})
    return write_rows(path, rows)


def write_solutions(path: Path, numbers: range) -> str:
    """As in GSM8K's socratic files; every ninth question comes twice."""
    rows = []
    for n in numbers:
        answer = f"How many in May? ** {n}+1 = <<{n}+1={n + 1}>>{n + 1} clips.\n#### {n + 1}"
        rows += [{"question": f"What comes after {n}?", "answer": answer}] * (2 if n % 9 == 0 else 1)
    return write_rows(path, rows)


def write_questions(path: Path, numbers: range) -> str:
    """Questions about articles, five for each."""
    rows = [
        {
            "title": f"Article {n // 5}",
            "context": text_of(n // 5),
            "question": f"Which is {n}?",
            "answers": {"text": [f"the {n}", f"no {n}"], "answer_start": [0, 0]},
        }
        for n in numbers
    ]
    return write_rows(path, rows)


# --- what identifies a source once it is prepared


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def describe_split(split: TokenSplit | None) -> dict[str, Any] | None:
    if split is None:
        return None
    tokens = split.read(0, len(split))
    return {
        "tokens": len(tokens),
        "bytes": split.bytes,
        "fingerprint": split.fingerprint,
        "sha256": digest(tokens.tobytes()),
        "documents": int((tokens == split.eot).sum()),
    }


def rows_in(split: TokenSplit | None, data: TokenData) -> list[int]:
    """The numbers of the rows whose first line is in the split."""
    if split is None:
        return []
    text = data.tokenizer().decode(split.read(0, len(split)).tolist())
    return sorted({int(number) for number in re.findall(r"Row (\d+)\.", text)})


def describe_tokens(data: TokenData) -> dict[str, Any]:
    return {
        "fingerprint": data.fingerprint,
        "tokenizer": [data.tokenizer_name, data.tokenizer_fingerprint, data.vocab_size, data.eot],
        "train": describe_split(data.train),
        "val": describe_split(data.val),
        "held out": rows_in(data.val, data),
        "files": [[file.path.name, file.tokens, file.sha256, file.max_id] for file in data.files],
        "facts": asdict(facts_of(data)),
    }


def describe_corpus(corpus: Corpus) -> dict[str, Any]:
    facts = asdict(corpus.facts)
    description = describe_tokens(corpus.tokens) | {"facts": facts}
    # The name of a tokenizer that several sources share is the path of its file, of a stream the folder: see `key`.
    order = corpus.index(SEQ_LEN, 3).starts(np.arange(200, dtype=np.int64))
    return description | {"sizes": list(corpus.sizes), "order": digest(order.tobytes())}


def data_of(source: Any, tokenizer: str = "bytes", **options: Any) -> Data:
    return Data(source=source, tokenizer=tokenizer, seq_len=SEQ_LEN, **options)


# --- the cases


def describe_folder(folder: Path) -> Any:
    """Many documents: the hash of each decides whether it is held out."""
    return describe_corpus(open_corpus(data_of(write_folder(folder / "texts", 90))))


def describe_few_documents(folder: Path) -> Any:
    """Few documents: the end of each is held out."""
    return describe_corpus(open_corpus(data_of(write_folder(folder / "texts", 12), val_fraction=0.2)))


def describe_rows(folder: Path) -> Any:
    source = write_text_rows(folder / "rows.jsonl", range(200))
    return describe_corpus(open_corpus(data_of(source, "train:300", val_fraction=0.1)))


def describe_rows_without_duplicates(folder: Path) -> Any:
    source = write_text_rows(folder / "rows.jsonl", range(200), "body")
    return describe_corpus(open_corpus(data_of(source, text_key="body", dedup=True, val_fraction=0.1, shuffle=False)))


def describe_parquet(folder: Path) -> Any:
    return describe_corpus(open_corpus(data_of(write_parquet(folder / "rows.parquet", range(100)), text_key="content")))


def _mixture(folder: Path, tokenizer: str, **second: Any) -> Any:
    first = write_text_rows(folder / "first.jsonl", range(120))
    other = write_text_rows(folder / "second.jsonl", range(500, 590))
    corpus = open_corpus(data_of([{"source": first}, {"source": other, **second}], tokenizer))
    description = describe_corpus(corpus)
    return description | {"tokenizer": description["tokenizer"][1:]}


def describe_mixture_with_repeat(folder: Path) -> Any:
    return _mixture(folder, "bytes", repeat=2.5)


def describe_mixture_with_weight(folder: Path) -> Any:
    return _mixture(folder, "bytes", weight=3)


def describe_mixture_with_trained_tokenizer(folder: Path) -> Any:
    return _mixture(folder, "train:300")


def describe_raw_tokens(folder: Path) -> Any:
    """Token files as nanoGPT writes them, for gpt2, which is known without its files."""
    ids = np.array([(n * n) % 50257 for n in range(20_000)], dtype="<u2")
    (folder / "raw.bin").write_bytes(ids.tobytes())
    data = open_tokens(folder / "raw.bin", "gpt2")
    return {
        "fingerprint": data.fingerprint,
        "splits": [describe_split(data.train), describe_split(data.val)],
        "vocabulary": named_vocabulary("gpt2"),
    }


def describe_stream(folder: Path) -> Any:
    source = write_text_rows(folder / "rows.jsonl", range(400))
    corpus = open_corpus(data_of(source, "train:300", stream=True, val_fraction=0.1))
    train = corpus.tokens.train
    assert isinstance(train, StreamSplit)
    train.take(train.stream.wait(lambda state: state.done))
    order = corpus.index(SEQ_LEN, 3).starts(np.arange(200, dtype=np.int64))
    train.stream.close()
    prepared = corpus.tokens.source
    key = prepared_folder(source, "train:300", Reading(0.1), stream=True)
    assert prepared == key
    expected = json.dumps(["stream", key.name, corpus.tokens.tokenizer_fingerprint], sort_keys=True)
    assert corpus.tokens.fingerprint == digest(expected.encode())
    return {
        "order": digest(order.tobytes()),
        "val": describe_split(corpus.tokens.val),
        "as a folder": describe_tokens(open_tokens(prepared)) | {"tokenizer": corpus.tokens.tokenizer_fingerprint},
        "state": {name: read_state(prepared).description[name] for name in ("splits", "place", "val_done", "done")},
    }


def _answers(folder: Path, source: Any, **options: Any) -> Any:
    tokenizer = tokenizer_folder(folder / "tokenizer", CHATML)
    standard: dict[str, Any] = {
        "seq_len": 96,
        "pack": True,
        "learn": "answers",
        "overlong": "drop",
        "template": None,
        "seed": 1,
        "val_fraction": 0.2,
    }
    data = load_answers(Data(source=source), folder=tokenizer, **standard | options)
    return describe_answers(data)


def describe_answers(data: AnswerData) -> Any:
    facts = asdict(data.facts)
    description: dict[str, Any] = {"facts": facts, "tokenizer": data.tokenizer.identity}
    for name, split in (("train", data.train), ("val", data.val)):
        if split is not None:
            rows = split.rows(np.arange(len(split), dtype=np.int64))
            description[name] = {key: digest(np.ascontiguousarray(rows[key]).tobytes()) for key in sorted(rows)}
            description[name]["keys"] = digest(json.dumps(split.samples.keys).encode())
            text = "".join(data.tokenizer.decode(split.samples[n][0]) for n in range(len(split.samples)))
            description[name]["rows"] = sorted({int(found) for found in re.findall(r"(?:What is|Say) (\d+)", text)})
    order = data.index.sequences(np.arange(200, dtype=np.int64))
    return description | {"order": digest(order.tobytes())}


def describe_completions(folder: Path) -> Any:
    return _answers(folder, write_completions(folder / "pairs.jsonl", range(60)))


def describe_chats(folder: Path) -> Any:
    return _answers(folder, write_chats(folder / "chats.jsonl", range(50)), seq_len=160, learn="all", pack=False)


def describe_mixed_answers(folder: Path) -> Any:
    first, second = (
        write_completions(folder / "a.jsonl", range(60)),
        write_completions(folder / "b.jsonl", range(40, 90)),
    )
    return _answers(folder, [{"source": first}, {"source": second, "repeat": 0.5}], template="chatml")


LAYOUT = Layout(
    (
        Segment("question", 32, 32, given=True),
        Segment("plan", 24, 8),
        Segment("execution", 32, 8),
    )
)


def _report(report: Any) -> dict[str, Any]:
    """The counts under the names that the recorded descriptions have."""
    counts = asdict(report)
    without_plan = counts.pop("without_plan")
    return {**counts, "unplanned": without_plan, "sources": None}


def _records(source: Any, tokenizer: str, **options: Any) -> Any:
    data = load_records(Data(source=source, tokenizer=tokenizer, **options), LAYOUT, seed=2, val_fraction=0.15)
    description: dict[str, Any] = {"facts": asdict(data.facts), "report": _report(data.report)}
    for name, split in (("train", data.train), ("val", data.val)):
        if split is not None:
            description[name] = {
                "tokens": digest(split.tokens.tobytes()),
                "ends": digest(split.ends.tobytes()),
                "questions": digest(json.dumps([record.question for record in split.records]).encode()),
            }
    held_out = [] if data.val is None else sorted(record.question for record in data.val.records)
    order = data.index.sequences(np.arange(200, dtype=np.int64))
    return description | {"held out": held_out[:20], "order": digest(order.tobytes())}


def describe_records(folder: Path) -> Any:
    return _records(write_solutions(folder / "rows.jsonl", range(80)), "bytes")


def describe_records_of_problems(folder: Path) -> Any:
    sources = [{"source": "problems:easy:90"}, {"source": write_solutions(folder / "r.jsonl", range(30)), "weight": 2}]
    return _records(sources, "train:320", dedup=True)


def describe_pairs(folder: Path) -> Any:
    """Pairs for latent prefixes: an article is held out as a whole."""
    tokenizer = tokenizer_folder(folder / "tokenizer", None)
    first = write_questions(folder / "a.jsonl", range(60))
    second = write_questions(folder / "b.jsonl", range(45, 80))
    data = load_pairs(
        data_of([{"source": first}, {"source": second, "repeat": 2}, {"source": "problems:easy:40"}]),
        [PromptTokenizer(tokenizer, "Answer: ")],
        most_bytes=128,
        patch=4,
        slots=4,
        words=True,
        seed=5,
        val_fraction=0.2,
    )
    return _describe_pairs(data)


def _describe_pairs(data: PairData) -> Any:
    assert data.val is not None
    order = data.index.sequences(np.arange(200, dtype=np.int64))
    batch = data.train.batch(np.arange(16, dtype=np.int64))
    return {
        "fingerprints": [data.fingerprint, data.rows_fingerprint, data.content],
        "held out": sorted({pair.group[:12] for pair in data.val.pairs}),
        "train": digest(json.dumps([pair.text for pair in data.train.pairs]).encode()),
        "val": digest(json.dumps([pair.text for pair in data.val.pairs]).encode()),
        "batch": {name: digest(array.tobytes()) for name, array in sorted(batch.items())},
        "order": digest(order.tobytes()),
    }


CASES: dict[str, Callable[[Path], Any]] = {
    name.removeprefix("describe_"): case
    for name, case in list(globals().items())
    if name.startswith("describe_") and name not in ("describe_split", "describe_tokens", "describe_corpus")
}
del CASES["answers"]
NEEDS = {"completions": "transformers", "chats": "transformers", "mixed_answers": "transformers"}
NEEDS |= {"pairs": "transformers", "parquet": "pyarrow"}


def describe_all(folder: Path) -> dict[str, Any]:
    """Every case, for recorded.json."""
    descriptions = {}
    for name, case in CASES.items():
        (folder / name).mkdir(parents=True)
        descriptions[name] = json.loads(json.dumps(case(folder / name)))
    return descriptions


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "FIRST_SHARD", 3000)
    monkeypatch.setattr(stream, "LARGEST_SHARD", 9000)
    monkeypatch.setattr(stream, "VAL_WITHIN", 5000)


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return dict(json.loads((BEFORE / "recorded.json").read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", CASES)
def test_a_source_is_prepared_as_before(name: str, tmp_path: Path, recorded: dict[str, Any]) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    assert json.loads(json.dumps(CASES[name](tmp_path))) == recorded[name]


# --- names of folders in the cache


def key_before(origin: list[Any], tokenizer: list[Any], reading: Reading) -> str:
    """The formula of commit b9d150d, written out: it holds the absolute path of a file, which no record can hold."""
    content = ["redline-tokens-1", 4, origin, tokenizer, vars(reading)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


def origin_before(path: Path) -> list[Any]:
    files = [path] if path.is_file() else sorted((p for p in path.rglob("*") if p.is_file()), key=str)
    return ["files", [[str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns] for p in files]]


def test_folders_of_the_cache_have_the_names_they_had(tmp_path: Path, cache: Path) -> None:
    rows = Path(write_text_rows(tmp_path / "rows.jsonl", range(70)))
    texts = Path(write_folder(tmp_path / "texts", 9))
    readings = [Reading(), Reading(0.1, "content", True)]
    assert vars(readings[1]) == {"val_fraction": 0.1, "text_key": "content", "dedup": True}
    for reading in readings:
        for path in (rows, texts):
            key = key_before(origin_before(path), ["bytes"], reading)
            assert prepared_folder(str(path), "bytes", reading) == cache / "data" / key
            key = key_before(origin_before(path), ["train:1000"], reading)
            assert prepared_folder(str(path), "train:1k", reading, stream=True) == cache / "streams" / key
        key = key_before([origin_before(rows), origin_before(texts)], ["train:300"], reading)
        shared = shared_tokenizer([str(rows), str(texts)], "train:300", reading)
        assert shared == cache / "tokenizers" / key / "tokenizer.json"
        key = key_before(["dataset", "owner/name", "config", "test"], ["gpt2"], reading)
        assert prepared_folder("owner/name:config@test", "gpt2", reading) == cache / "data" / key


def test_a_folder_of_the_cache_is_used_again(tmp_path: Path, cache: Path) -> None:
    """The committed folder, put where the cache of commit b9d150d kept this source, is opened and not made again."""
    rows = Path(write_text_rows(tmp_path / "rows.jsonl", range(70)))
    folder = cache / "data" / key_before(origin_before(rows), ["bytes"], Reading(0.1))
    shutil.copytree(BEFORE / "folder", folder)
    stamps = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    data = prepare_cached(str(rows), "bytes", Reading(0.1))
    assert data.source == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == stamps


def test_answers_of_the_cache_are_used_again(tmp_path: Path, cache: Path) -> None:
    pytest.importorskip("transformers")
    from redline.data.chat_template import load_chat_tokenizer

    source = Path(write_completions(tmp_path / "pairs.jsonl", range(30)))
    _answers(tmp_path, str(source))
    tokenizer = load_chat_tokenizer(tmp_path / "tokenizer")
    key = ["redline-answers-1", origin_before(source), tokenizer.identity, "answers"]
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    assert [path.name for path in (cache / "answers").iterdir()] == [name]


# --- folders that commit b9d150d prepared


@pytest.mark.parametrize("name", ["folder", "stream"])
def test_a_prepared_folder_is_opened(name: str, recorded: dict[str, Any]) -> None:
    data = open_tokens(BEFORE / name)
    data.verify()
    assert json.loads(json.dumps(describe_tokens(data))) == recorded[f"prepared {name}"]


def test_the_same_folder_is_written(tmp_path: Path) -> None:
    source = write_text_rows(tmp_path / "rows.jsonl", range(70))
    reading = Reading(0.1)
    prepare_source(source, tokenizer_for([source], "bytes", reading), tmp_path / "out", reading, workers=1)
    for path in (BEFORE / "folder").glob("*.tok"):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name
    now, before = (json.loads((folder / "meta.json").read_text()) for folder in (tmp_path / "out", BEFORE / "folder"))
    counts = [meta.pop("counts") for meta in (now, before)]
    for count in counts:  # what is left is numbers: the reasons are for people
        del count["bad_rows_by_reason"], count["first_bad_row"]
    assert counts[0] == counts[1]
    assert {**now, "digest": ""} == {**before, "digest": ""}


@pytest.mark.skipif(not GPT2, reason="REDLINE_GPT2 does not name the tokenizer's files")
def test_gpt2_encodes_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: dict[str, Any]) -> None:
    monkeypatch.setenv("REDLINE_GPT2", str(GPT2))
    source = write_text_rows(tmp_path / "rows.jsonl", range(70))
    assert json.loads(json.dumps(describe_corpus(open_corpus(data_of(source, "gpt2"))))) == recorded["gpt2"]
