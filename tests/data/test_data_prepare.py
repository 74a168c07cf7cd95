from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.data import prepare as encode
from redline.data import prepare as module
from redline.data import sources
from redline.data.prepare import prepare, prepare_cached
from redline.data.sources import Document, Progress, Reading, cut_tail
from redline.data.splits import is_held_out
from redline.data.tokenizer import Tokenizer, load_tokenizer
from redline.data.tokens import TokenData, TokenSplit
from redline.errors import UserError


def texts_of(split: TokenSplit, tokenizer: Tokenizer) -> list[str]:
    tokens = split.read(0, len(split)).astype(np.int64)
    assert tokens[0] == split.eot, "an end-of-text token stands before each document"
    return [tokenizer.decode(part[1:].tolist()) for part in np.split(tokens, np.flatnonzero(tokens == split.eot))[1:]]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("spec", ["bytes", "train"])
@pytest.mark.parametrize("shard_tokens", [997, 10**9])
def test_no_token_is_lost(
    documents: list[Document], trained: Tokenizer, tmp_path: Path, spec: str, shard_tokens: int
) -> None:
    tokenizer = trained if spec == "train" else load_tokenizer("bytes")
    data = prepare(documents, tokenizer, tmp_path / "out", val_fraction=0.2, shard_tokens=shard_tokens)
    held_out = [d.text for d in documents if is_held_out(d.digest(), 0.2)]
    trained_on = [d.text for d in documents if not is_held_out(d.digest(), 0.2)]
    assert data.val is not None
    assert texts_of(data.train, tokenizer) == trained_on
    assert texts_of(data.val, tokenizer) == held_out
    assert data.train.bytes == sum(len(text.encode()) for text in trained_on)
    shards = list((tmp_path / "out").glob("train-*.tok"))
    assert (len(shards) > 10) == (shard_tokens == 997)
    assert all(shard.stat().st_size <= 64 + 2 * shard_tokens for shard in shards)
    data.verify()


def test_twice_gives_the_same_fingerprint_and_other_text_another(
    documents: list[Document], trained: Tokenizer, tmp_path: Path
) -> None:
    first = prepare(documents, trained, tmp_path / "a")
    second = prepare(iter(documents), trained, tmp_path / "b")
    assert first.fingerprint == second.fingerprint
    assert names_in(tmp_path / "a") == ["meta.json", "tokenizer.json", "train-00000.tok", "val-00000.tok"]
    for name in names_in(tmp_path / "a"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    changed = [Document(documents[0].name, documents[0].text + "!"), *documents[1:]]
    assert prepare(changed, trained, tmp_path / "c").fingerprint != first.fingerprint


def test_the_folder_names_its_tokenizer(documents: list[Document], trained: Tokenizer, tmp_path: Path) -> None:
    assert prepare(documents, trained, tmp_path / "a").tokenizer().fingerprint == trained.fingerprint
    assert prepare(documents, load_tokenizer("bytes"), tmp_path / "b").tokenizer().name == "bytes"
    assert not (tmp_path / "b" / "tokenizer.json").exists()


def test_single_document_is_split_at_a_line_near_its_end(tmp_path: Path) -> None:
    text = "".join(f"line {i}\n" for i in range(1000))
    tokenizer = load_tokenizer("bytes")
    data = prepare([Document("book.txt", text)], tokenizer, tmp_path / "out", val_fraction=0.1)
    assert data.val is not None
    (head,), (tail,) = texts_of(data.train, tokenizer), texts_of(data.val, tokenizer)
    assert head + tail == text
    assert tail.startswith("line ")
    assert 0.09 < len(tail) / len(text) < 0.11


@given(st.text(alphabet="ab \n", max_size=200), st.floats(0, 0.9))
def test_cut_tail_loses_nothing_and_holds_out_about_the_fraction(text: str, fraction: float) -> None:
    head, tail = cut_tail(text, fraction)
    assert head + tail == text
    held_out = int(len(text) * fraction)
    assert held_out <= len(tail) <= 2 * held_out


def test_without_validation(documents: list[Document], tmp_path: Path) -> None:
    data = prepare(documents, load_tokenizer("bytes"), tmp_path / "out", val_fraction=0.0)
    assert data.val is None
    assert not list((tmp_path / "out").glob("val-*"))
    with pytest.raises(UserError, match="fraction"):
        prepare(documents, load_tokenizer("bytes"), tmp_path / "other", val_fraction=1.0)


def test_long_document_in_pieces_has_the_tokens_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "_PIECE_CHARACTERS", 10)
    text = "".join(f"def f{i}():\n\n    if x:\n        return {i}\n\n\nplain text\nand more\n" for i in range(60))
    tokenizer = load_tokenizer("train:400", lambda: [text])
    assert len(tokenizer.encode("\n\n")) == 1, "runs of white space must be tokens, or cutting them shows nothing"
    data = prepare([Document("long", text)], tokenizer, tmp_path / "out", val_fraction=0.0)
    assert data.train.read(0, len(data.train)).tolist() == [tokenizer.eot, *tokenizer.encode(text)]


def test_progress_counts_tokens(documents: list[Document], tmp_path: Path) -> None:
    reports: list[Progress] = []
    data = prepare(documents, load_tokenizer("bytes"), tmp_path / "out", progress=reports.append)
    reported = [progress.tokens for progress in reports]
    assert len(reported) >= 3
    assert reported == sorted(reported)
    assert reported[-1] == len(data.train) + (len(data.val) if data.val else 0)


def test_content_is_never_overwritten(documents: list[Document], tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious.txt").write_text("keep me")
    with pytest.raises(UserError, match="not an empty folder"):
        prepare(documents, load_tokenizer("bytes"), out)
    assert names_in(out) == ["precious.txt"]
    (out / "precious.txt").unlink()
    assert len(prepare(documents, load_tokenizer("bytes"), out).train)


def test_failure_leaves_nothing_behind(documents: list[Document], tmp_path: Path) -> None:
    def failing() -> Iterator[Document]:
        yield from documents
        raise OSError("the disk went away")

    folder = tmp_path / "place"
    with pytest.raises(OSError, match="went away"):
        prepare(failing(), load_tokenizer("bytes"), folder / "out")
    with pytest.raises(UserError, match="no text is left"):
        prepare([], load_tokenizer("bytes"), folder / "out")
    assert names_in(folder) == []


@pytest.fixture
def texts(tmp_path: Path, documents: list[Document]) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for document in documents[:80]:
        (folder / f"{document.name}.txt").write_text(document.text)
    return folder


def test_cache_is_used_until_something_changes(texts: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare_cached(str(texts), "train:300", Reading(0.1))
    with monkeypatch.context() as patch:
        patch.setattr(module, "prepare", None)  # calling it would fail
        again = prepare_cached(str(texts), "train:300", Reading(0.1))
    assert (again.source, again.fingerprint) == (first.source, first.fingerprint)
    assert first.source.is_relative_to(cache)
    changed = [
        prepare_cached(str(texts), "train:301", Reading(0.1)),
        prepare_cached(str(texts), "train:300", Reading(0.2)),
    ]
    (texts / "part-000.txt").write_text("something else entirely")
    changed.append(prepare_cached(str(texts), "train:300", Reading(0.1)))
    assert len({first.source, *(data.source for data in changed)}) == 4


def test_damaged_cache_is_made_again(texts: Path) -> None:
    first = prepare_cached(str(texts), "bytes")
    os.truncate(first.source / "train-00000.tok", 100)
    again = prepare_cached(str(texts), "bytes")
    again.verify()
    assert (again.source, again.fingerprint) == (first.source, first.fingerprint)


def test_two_at_once_agree(texts: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both_ready = threading.Barrier(2, timeout=20)
    write = module.write_atomically

    def write_together(path: Path, text: str) -> None:
        """meta.json, the last file before the folders are renamed."""
        write(path, text)
        both_ready.wait()

    monkeypatch.setattr(module, "write_atomically", write_together)
    results: list[TokenData] = []
    threads = [threading.Thread(target=lambda: results.append(prepare_cached(str(texts), "bytes"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len({data.fingerprint for data in results}) == 1
    assert len(results) == 2
    assert names_in(cache / "data") == [results[0].source.name]


def test_embedded_corpus_is_prepared_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    some = list(sources.embedded_documents())[:200]
    monkeypatch.setattr(sources, "embedded_documents", lambda: iter(some))
    data = prepare_cached("embedded", "train:512")
    assert data.val is not None
    assert data.tokenizer_name == "train:512"
    assert 0.01 < len(data.val) / len(data.train) < 0.2
    assert data.train.bytes + data.val.bytes == sum(len(document.text.encode()) for document in some)


def test_sources_that_are_tokens_are_opened(texts: Path, tmp_path: Path) -> None:
    prepared = prepare_cached(str(texts), "bytes")
    opened = prepare_cached(str(prepared.source), "bytes")
    assert opened.fingerprint == prepared.fingerprint
    np.arange(1000, dtype="<u2").tofile(tmp_path / "ids.bin")
    assert prepare_cached(str(tmp_path / "ids.bin"), "gpt2").vocab_size == 50257
    with pytest.raises(UserError, match="no such file"):
        prepare_cached(str(tmp_path / "missing"), "bytes")


def test_a_folder_of_text_may_hold_a_meta_json_of_its_own(texts: Path) -> None:
    (texts / "meta.json").write_text(json.dumps({"title": "a user's own notes"}))
    assert len(prepare_cached(str(texts), "bytes").train)
