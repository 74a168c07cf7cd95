"""Every form of text gives its documents; what cannot be used is counted, and refused when it is most of it."""

from __future__ import annotations

import gzip
import itertools
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.data import prepare as encode
from redline.data import sources
from redline.data.prepare import cut_pieces, prepare_source, training_texts
from redline.data.sources import (
    DatasetId,
    DigestSet,
    Document,
    LongDocument,
    Reading,
    ReadStats,
    dataset_id,
    omission_messages,
    source_bytes,
    source_documents,
)
from redline.data.splits import REST, TRAIN, VAL, split_documents
from redline.data.tokenizer import load_tokenizer
from redline.errors import UserError

TEXTS = [f"Row {i}: naïve café 日本語, and a\nsecond line." for i in range(70)]


def lines(texts: list[str], key: str = "text") -> bytes:
    return b"".join(json.dumps({key: text, "id": i}).encode() + b"\n" for i, text in enumerate(texts))


def read(source: Path | str, text_key: str = "text") -> tuple[list[str], ReadStats]:
    counted = ReadStats(str(source))
    texts = ["".join(document.chunks()) for document in source_documents(str(source), counted, text_key)]
    return texts, counted


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        zstandard = pytest.importorskip("zstandard")
        content = zstandard.ZstdCompressor().compress(content)
    path.write_bytes(content)
    return path


def write_parquet(path: Path, texts: list[Any], column: str = "text") -> Path:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({column: texts, "id": list(range(len(texts)))}), path, row_group_size=16)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.jsonl.gz", "a.jsonl.zst"])
def test_json_lines(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, lines(TEXTS).replace(b"\n", b"\n\n"))  # blank lines are no rows
    texts, counted = read(path)
    assert texts == TEXTS
    assert (counted.rows, counted.bad_rows.total()) == (70, 0)
    assert counted.bytes == source_bytes(str(path)) == path.stat().st_size


def test_parquet(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [*TEXTS, None, ""], "body")
    texts, counted = read(path, "body")
    assert texts == TEXTS
    assert dict(counted.bad_rows) == {"'body' is not text": 1, "empty 'body'": 1}
    assert counted.bytes == pytest.approx(path.stat().st_size)
    with pytest.raises(UserError, match=r"a\.parquet: there is no column 'text'; the columns are body, id\..*text_key"):
        read(path)
    with pytest.raises(UserError, match=r"b\.parquet: .*Parquet"):
        read(write(tmp_path / "b.parquet", b"PAR1 no"))


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst", "a.gz", "notes"])
def test_text_files(tmp_path: Path, name: str) -> None:
    text = "".join(TEXTS)
    assert read(write(tmp_path / name, text.encode()))[0] == [text]


def test_a_folder_of_everything(tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    write(folder / "a.jsonl", lines(TEXTS[:3]))
    write(folder / "b.txt.gz", TEXTS[3].encode())
    write_parquet(folder / "c.parquet", TEXTS[4:6])
    write(folder / "d.png", b"\x89PNG\0\0")
    write(folder / "e" / "f.md", TEXTS[6].encode())
    texts, counted = read(folder)
    assert texts == TEXTS[:7]
    assert counted.first_binary_file == "d.png: the file is binary, not text."
    assert counted.bytes == pytest.approx(source_bytes(str(folder)))


@pytest.mark.parametrize("name", ["cut.jsonl.gz", "cut.txt.gz", "cut.jsonl.zst"])
def test_damaged_compression_is_said(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, lines([f"{i} {hash(str(i))}" for i in range(5000)]))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    if name.endswith(".zst"):
        path.write_bytes(b"no zstd at all")
    with pytest.raises(UserError, match=r"cut.*: the compressed file is damaged"):
        read(path)


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt.zst").write_bytes(b"x")
    (tmp_path / "a.parquet").write_bytes(b"x")
    for module, name in (("zstandard", "a.txt.zst"), ("pyarrow.parquet", "a.parquet"), ("datasets", "owner/name")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(UserError, match=r"make setup EXTRAS=data"):
            read(name if "/" in name else tmp_path / name)


def test_bad_rows_are_counted_with_the_first_place(tmp_path: Path) -> None:
    bad = [b"{", b"[1]", b'{"other": 1}', b'{"text": 3}', b'{"text": "  "}', b'{"text": "a\\u0000b"}']
    bad += [b'{"text": "\\ud800"}', b"\xff\xfe"]
    path = write(tmp_path / "a.jsonl", b"\n".join([lines(TEXTS[:9]).rstrip(), *bad]) + b"\n")
    texts, counted = read(path)
    assert texts == TEXTS[:9]
    assert counted.rows == 17
    assert counted.first_bad_row == "a.jsonl:10: not JSON"
    reasons = {"not JSON": 2, "not a JSON object": 1, "no 'text' field": 1, "'text' is not text": 1}
    assert dict(counted.bad_rows) == {**reasons, "empty 'text'": 1, "'text' is binary data, not text": 2}


def test_mostly_bad_rows_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", lines(TEXTS[:3], "body") + lines(TEXTS[:2]))
    with pytest.raises(UserError, match=r"3 of 5 rows cannot be used; the first is a\.jsonl:1: .*body, id"):
        read(path)
    monkeypatch.setattr(sources, "_CHECK_FROM_ROWS", 2)  # a large file need not be read to its end
    with pytest.raises(UserError, match="2 of 2 rows"):
        read(path)


def test_an_endless_row_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_ROW_BYTES", 64)
    path = write(tmp_path / "a.jsonl", lines(["short", "x" * 1000, "after"]))
    texts, counted = read(path)
    assert texts == ["short", "after"]
    assert str(counted.first_bad_row).startswith("a.jsonl:2: longer than")


@given(st.lists(st.binary(min_size=8, max_size=8), max_size=300), st.integers(0, 3))
def test_digests_are_remembered_as_in_a_set(digests: list[bytes], times: int) -> None:
    seen, known = DigestSet(), set()
    for digest in digests * times:
        value = digest if any(digest) else b"\1" + bytes(7)  # nought stands for an empty place
        assert seen.add(digest) == (value in known)
        known.add(value)


def test_digests_take_bounded_memory() -> None:
    seen = DigestSet(max_slots=1 << 11)
    digests = [i.to_bytes(8, "little") for i in range(1, 5000)]
    assert not any(seen.add(digest) for digest in digests)
    assert sum(seen.add(digest) for digest in digests) == 1 << 10, "what came after it was full is not remembered"


@pytest.mark.parametrize("dedup", [False, True])
def test_duplicates_are_counted_and_dropped_when_asked(tmp_path: Path, dedup: bool) -> None:
    path = write(tmp_path / "a.jsonl", lines([*TEXTS, *TEXTS[:5], TEXTS[0]]))
    data = prepare_source(str(path), load_tokenizer("bytes"), tmp_path / "out", Reading(0.0, dedup=dedup))
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert meta["counts"]["duplicates"] == 6
    assert meta["splits"]["train"]["documents"] == 70 + 6 * (not dedup)
    assert len(data.train) == meta["splits"]["train"]["bytes"] + meta["splits"]["train"]["documents"]


# --- long files


@pytest.fixture
def tiny_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_IN_MEMORY_BYTES", 10)
    monkeypatch.setattr(sources, "_CHUNK_BYTES", 7)
    monkeypatch.setattr(encode, "_PIECE_CHARACTERS", 12)


@pytest.mark.parametrize("name", ["long.txt", "long.txt.gz", "long.txt.zst"])
@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5])
def test_a_long_file_is_split_like_one_in_memory(
    tmp_path: Path, tiny_chunks: None, monkeypatch: pytest.MonkeyPatch, name: str, fraction: float
) -> None:
    for text in ("\n".join(TEXTS), "日本" * 300, "\ufeffmark\n" + "words and words " * 40, "one\ntwo\n" * 90):
        path = write(tmp_path / name, text.encode())
        (document,) = source_documents(str(path), ReadStats(""))
        assert isinstance(document, LongDocument)
        from_whole_text = Document(document.name, text.removeprefix("\ufeff"))
        assert document.digest() == from_whole_text.digest()
        if not text.startswith("\ufeff"):  # a mark counts as three bytes of the file, and is none of the text
            long, short = (list(cut_pieces(split_documents([one], fraction))) for one in (document, from_whole_text))
            assert long == short
        pieces = list(cut_pieces(split_documents([document], fraction)))
        for split in (TRAIN, VAL):
            assert [piece.begins for piece in pieces if piece.split == split][1:].count(True) == 0
        train, val = ("".join(piece.text for piece in pieces if piece.split == split) for split in (TRAIN, VAL))
        assert train + val == from_whole_text.text


def test_junk_at_the_end_of_a_long_file_is_found_before_it_is_used(tmp_path: Path, tiny_chunks: None) -> None:
    for junk, problem in ((b"\0", "binary"), (b"\xff", r"not UTF-8 text \(byte 500\)"), (b"\xe6\x97", "byte 500")):
        path = write(tmp_path / "long.txt", b"good text\n" * 50 + junk)
        with pytest.raises(UserError, match=problem):
            next(source_documents(str(path), ReadStats("")))


@given(st.text(alphabet="ab \n\té", max_size=150), st.lists(st.integers(0, 150), max_size=8))
def test_pieces_follow_from_the_text_alone(text: str, cuts: list[int]) -> None:
    borders = [0, *sorted(cuts), len(text)]
    chunks = [text[a:b] for a, b in itertools.pairwise(borders)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "_PIECE_CHARACTERS", 9)
        from_whole_text, arrived = list(encode._cut_text([text])), list(encode._cut_text(chunks))
    assert arrived == from_whole_text
    assert "".join(from_whole_text) == text
    assert max(map(len, from_whole_text), default=0) <= 9 * encode._MAX_PIECE + 1


def test_a_stream_holds_out_only_at_its_beginning() -> None:
    documents = [Document(f"{i}", f"{i:03d}" + "x" * 97) for i in range(400)]
    splits = [split for split, _ in split_documents(documents, 0.2, val_within=10_000)]
    assert splits[:100].count(VAL) > 5
    assert set(splits[100:]) == {REST}
    assert [split for split, _ in split_documents(documents, 0.2)][:100] == splits[:100]
    assert [split for split, _ in split_documents(documents[:3], 0.2, val_within=1)] == [VAL] * 3 + [REST] * 3


def test_no_copy_of_what_a_stream_holds_out_is_trained_on() -> None:
    documents = [Document(f"{i}", f"{i:03d}" + "x" * 97) for i in range(200)]
    splits = list(split_documents([*documents, *documents], 0.2, val_within=10_000))
    held_out = {document.text for split, document in splits if split == VAL}
    assert len(held_out) > 5
    assert held_out.isdisjoint(document.text for split, document in splits if split != VAL)
    assert sum(split == REST for split, _ in splits) == 300 - len(held_out)


def test_whoever_splits_otherwise_raises_the_number_of_the_rules() -> None:
    """Folders that were prepared before would be taken, with what was held out then."""
    documents = [Document(f"{i}", f"a text, number {i}\n") for i in range(200)]
    held_out = [document.name for split, document in split_documents(documents, 0.05) if split == VAL]
    assert (sources.RULES, held_out) == (4, ["1", "22", "167", "186"])


def test_a_tokenizer_learns_from_an_even_part_of_much_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines(TEXTS * 10))
    everything = list(training_texts([str(path)], Reading(0.0)))
    assert everything == TEXTS * 10
    thinned = list(training_texts([str(path)], Reading(0.0), max_bytes=path.stat().st_size // 5))
    assert thinned == everything[:: len(everything) // len(thinned)]
    assert 100 <= len(thinned) <= 140
    beginning = list(training_texts([str(path)], Reading(0.0), max_bytes=500, from_start=True))
    assert beginning == everything[: len(beginning)]


# --- datasets of a hub


@pytest.mark.parametrize(
    ("source", "meant"),
    [
        ("owner/name", DatasetId("owner/name", None, "train")),
        ("Owner-1/na.me:en_2@validation", DatasetId("Owner-1/na.me", "en_2", "validation")),
        ("./notes", None),
        ("notes", None),
        ("a/b/c", None),
        ("data/notes.txt", None),
        ("data/rows.jsonl.gz", None),
        ("~/notes", None),
    ],
)
def test_what_is_a_dataset_id(source: str, meant: DatasetId | None) -> None:
    assert dataset_id(source) == meant


def test_a_folder_that_is_there_is_no_dataset_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my" / "notes").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert dataset_id("my/notes") is None


def fake_datasets(monkeypatch: pytest.MonkeyPatch, rows: Any) -> list[Any]:
    """Install a package whose `load_dataset` yields these rows or raises an error."""
    calls: list[Any] = []

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> Any:
        calls.append((name, config, split, streaming))
        if isinstance(rows, Exception):
            raise rows
        return rows

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


def test_a_dataset_is_read_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_datasets(monkeypatch, [{"body": "one"}, {"body": None}, {"body": "two"}])
    texts, counted = read("owner/name:en@test", "body")
    assert texts == ["one", "two"]
    assert calls == [("owner/name", "en", "test", True)]
    assert (counted.rows, counted.first_bad_row) == (3, "owner/name:en@test:2: 'body' is not text")
    with pytest.raises(UserError, match="no column 'text'; the columns are body"):
        read("owner/name:en@test")


def failing(name: str, message: str, base: type[Exception] = Exception) -> Exception:
    return type(name, (base,), {})(message)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (failing("GatedRepoError", "401"), "gated.*Accept its terms.*HF_TOKEN"),
        (failing("DatasetNotFoundError", "Dataset 'o/n' is a gated dataset on the Hub."), "gated"),
        (failing("DatasetNotFoundError", "doesn't exist"), "no such dataset.*Check the spelling"),
        (failing("RepositoryNotFoundError", "404"), "no such dataset"),
        (failing("OfflineModeIsEnabled", "offline", ConnectionError), "cannot be reached.*HF_HUB_OFFLINE"),
        (ConnectionError("no route"), "cannot be reached"),
        (
            ValueError("Bad split: x. Available splits: ['train']\nmore"),
            r"Bad split: x.*\['train'\]\. Write the id",
        ),
    ],
)
@pytest.mark.parametrize("when", ["opening", "reading"])
def test_what_the_package_raises_becomes_a_sentence(
    monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str, when: str
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")

    def broken() -> Any:
        yield {"text": "one"}
        raise error

    fake_datasets(monkeypatch, error if when == "opening" else broken())
    with pytest.raises(UserError, match=rf"(?s)^owner/name: .*{sentence}"):
        read("owner/name")


def test_text_in_another_encoding_is_counted_apart_from_binary_files(tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    for number, text in enumerate(TEXTS[:3]):
        write(folder / f"{number}.txt", text.encode())
    write(folder / "a.bin", b"\0\1")
    write(folder / "old.txt", "déjà vu".encode("latin-1"))
    counted = read(folder)[1]
    assert (counted.binary_files, counted.not_utf8_files, counted.first_not_utf8_file) == (2, 1, "old.txt")
    encoding, binary = omission_messages(counted.counts())
    assert "1 file" in encoding
    assert "old.txt" in encoding
    assert "1 file" in binary
    assert "a.bin" in binary
    for number in range(6):
        write(folder / f"old{number}.txt", "déjà vu".encode("latin-1"))
    with pytest.raises(UserError, match=r"7 of 11 files are not UTF-8; the first is old\.txt.*iconv -t UTF-8"):
        read(folder)
