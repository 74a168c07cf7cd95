from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.data import tokens as raw
from redline.data.prepare import prepare
from redline.data.sources import Document
from redline.data.tokenizer import Tokenizer, load_tokenizer
from redline.data.tokens import ShardWriter, TokenSplit, open_tokens, token_dtype
from redline.errors import UserError


@pytest.fixture
def prepared(documents: list[Document], tmp_path: Path) -> Path:
    prepare(documents, load_tokenizer("bytes"), tmp_path / "prepared", shard_tokens=20_000)
    return tmp_path / "prepared"


def write_ids(path: Path, ids: np.ndarray | list[int], dtype: str = "<u2") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.asarray(ids).astype(dtype).tofile(path)
    return path


@settings(max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.data())
def test_reading_across_borders_equals_one_array(sizes: list[int], data: st.DataObject) -> None:
    whole = np.arange(sum(sizes), dtype=np.uint16)
    pieces = np.split(whole, np.cumsum(sizes)[:-1])
    split = TokenSplit(pieces, vocab_size=1000, eot=0, utf8_bytes=None, fingerprint="")
    length = data.draw(st.integers(1, len(whole)))
    starts = np.array(data.draw(st.lists(st.integers(0, len(whole) - length), max_size=10)), dtype=np.int64)
    windows = split.windows(starts, length)
    assert windows.dtype == np.int64
    assert np.array_equal(windows, starts[:, None] + np.arange(length))
    for start in starts:
        assert np.array_equal(split.read(int(start), length), whole[start : start + length])


def test_reading_outside_is_an_error() -> None:
    split = TokenSplit([np.arange(10, dtype=np.uint16)], vocab_size=10, eot=0, utf8_bytes=None, fingerprint="")
    for start, count in ((-1, 2), (9, 2), (0, -1)):
        with pytest.raises(IndexError):
            split.read(start, count)
    for starts in ([-1], [9], [0, 9]):
        with pytest.raises(IndexError):
            split.windows(np.array(starts), 2)


def test_wide_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    assert (token_dtype(65_536).itemsize, token_dtype(65_537).itemsize) == (2, 4)
    with ShardWriter(tmp_path, "train", vocab_size=100_000, tokenizer_fingerprint="0" * 16, shard_tokens=4) as writer:
        writer.append([1, 99_999, 3])
        writer.append([70_000, 5])
        files = writer.finish()
    assert [file.map().tolist() for file in files] == [[1, 99_999, 3, 70_000], [5]]
    assert files[0].path.stat().st_size == 64 + 4 * 4
    with pytest.raises(ValueError, match="outside a vocabulary"):
        writer.append([100_000])


def test_prepared_folder_opens_with_its_tokenizer_and_no_other(
    prepared: Path, trained: Tokenizer, tmp_path: Path
) -> None:
    right = load_tokenizer("bytes").fingerprint
    assert {open_tokens(prepared, spec).fingerprint for spec in (None, "bytes", right)} == {
        open_tokens(prepared).fingerprint
    }
    trained.save(tmp_path / "other.json")
    for wrong in ("gpt2", trained.fingerprint, "train:300", str(tmp_path / "other.json")):
        with pytest.raises(UserError, match=r"wrong tokenizer.*bytes"):
            open_tokens(prepared, wrong)


def test_every_flipped_byte_of_a_header_is_noticed(prepared: Path) -> None:
    shard = prepared / "train-00000.tok"
    good = shard.read_bytes()
    for position in range(64):
        shard.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        with pytest.raises(UserError, match=r"train-00000\.tok"):
            open_tokens(prepared)
    shard.write_bytes(good)
    open_tokens(prepared).verify()


def test_flipped_token_is_noticed_by_verify(prepared: Path) -> None:
    shard = prepared / "train-00001.tok"
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.write_bytes(content)
    with pytest.raises(UserError, match=r"train-00001\.tok.*SHA-256"):
        open_tokens(prepared).verify()


@pytest.mark.parametrize("size", [0, 10, 64, 1001])
def test_truncated_or_missing_shard_is_noticed(prepared: Path, size: int) -> None:
    os.truncate(prepared / "val-00000.tok", size)
    with pytest.raises(UserError, match=rf"val-00000\.tok.*has {size} bytes instead of"):
        open_tokens(prepared)
    (prepared / "val-00000.tok").unlink()
    with pytest.raises(UserError, match="missing"):
        open_tokens(prepared)


def test_damaged_description_is_noticed(prepared: Path) -> None:
    path = prepared / "meta.json"
    good = path.read_text()
    outside = good.replace("train-00000.tok", "../train-00000.tok")
    for bad in ("", good[: len(good) // 2], "[]", "{}", good.replace('"eot": 256', '"eot": 255'), outside):
        path.write_text(bad)
        with pytest.raises(UserError, match=r"meta\.json: .*damaged"):
            open_tokens(prepared)
    path.unlink()
    with pytest.raises(UserError, match=r"no meta\.json"):
        open_tokens(prepared)


def test_recorded_id_outside_the_vocabulary_is_refused(prepared: Path) -> None:
    data = open_tokens(prepared)
    with pytest.raises(UserError, match=r"train-00000\.tok: the token id 256 .* of tiny \(200 ids\)"):
        data.files[0].check_vocabulary("tiny", 200)


def test_raw_folder_with_validation(tmp_path: Path) -> None:
    write_ids(tmp_path / "raw" / "train.bin", np.arange(3000) % 50257)
    write_ids(tmp_path / "raw" / "val.bin", np.arange(500))
    for source in (tmp_path / "raw", tmp_path / "raw" / "train.bin"):
        data = open_tokens(source, "gpt2")
        assert data.val is not None
        assert (len(data.train), len(data.val), data.eot, data.train.bytes) == (3000, 500, 50256, None)
        assert data.val.read(0, 500).tolist() == list(range(500))
        data.verify()


@pytest.mark.parametrize(("tokens", "held_out"), [(5, 0), (1000, 100), (200_000, 8192), (3_000_000, 30_000)])
def test_single_raw_file_holds_out_its_end(tmp_path: Path, tokens: int, held_out: int) -> None:
    ids = np.arange(tokens) % 50_000
    data = open_tokens(write_ids(tmp_path / "ids.bin", ids), "gpt2")
    assert len(data.train) == tokens - held_out
    assert (len(data.val) if data.val else 0) == held_out
    if data.val:
        assert np.array_equal(data.val.read(0, held_out), ids[tokens - held_out :])
        assert data.val.fingerprint != data.train.fingerprint


def test_raw_file_is_read_once_and_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_ids(tmp_path / "ids.bin", np.arange(100))
    first = open_tokens(path, "gpt2")
    with monkeypatch.context() as patch:
        patch.setattr(raw, "scan_tokens", None)  # calling it would fail
        assert open_tokens(path, "gpt2").fingerprint == first.fingerprint
    write_ids(path, np.arange(100)[::-1])
    os.utime(path, ns=(time.time_ns(), time.time_ns() + 10**9))
    assert open_tokens(path, "gpt2").fingerprint != first.fingerprint


@pytest.mark.parametrize("content", ["not json", "[]", '{"x": 3}'])
def test_odd_memory_of_raw_files_does_no_harm(tmp_path: Path, cache: Path, content: str) -> None:
    cache.mkdir()
    (cache / "fingerprints.json").write_text(content)
    path = write_ids(tmp_path / "ids.bin", np.arange(100))
    assert len(open_tokens(path, "gpt2").train) == 90
    assert str(path.resolve()) in json.loads((cache / "fingerprints.json").read_text())


def test_changed_raw_tokens_are_noticed_by_verify(tmp_path: Path) -> None:
    path = write_ids(tmp_path / "ids.bin", np.arange(1000))
    data = open_tokens(path, "gpt2")
    with open(path, "r+b") as file:
        file.seek(500)
        file.write(b"\x07")
    with pytest.raises(UserError, match=r"ids\.bin"):
        data.verify()


def test_raw_files_that_cannot_be_meant(tmp_path: Path, prepared: Path) -> None:
    (tmp_path / "empty.bin").touch()
    (tmp_path / "odd.bin").write_bytes(b"\1\2\3")
    (tmp_path / "shard.bin").write_bytes((prepared / "train-00000.tok").read_bytes())
    (tmp_path / "header.bin").write_bytes((20240520).to_bytes(4, "little") + bytes(1020) + b"\1\2")
    write_ids(tmp_path / "wide.bin", np.arange(1000), "<u4")
    problems = {
        "missing": "no such file",
        "empty": "empty",
        "odd": "3 bytes",
        "shard": "one shard of a prepared folder",
        "header": "1024-byte header",
        "wide": "uint32",
    }
    for name, problem in problems.items():
        with pytest.raises(UserError, match=rf"{name}\.bin: .*{problem}"):
            open_tokens(tmp_path / f"{name}.bin", "gpt2")


def test_raw_id_outside_the_vocabulary_names_id_file_and_vocabulary(tmp_path: Path) -> None:
    path = write_ids(tmp_path / "ids.bin", [1, 2, 50257, 3])
    with pytest.raises(UserError, match=r"ids\.bin: the token id 50257 .* of gpt2 \(50257 ids\)"):
        open_tokens(path, "gpt2")


def test_raw_files_need_a_tokenizer(tmp_path: Path, trained: Tokenizer) -> None:
    path = write_ids(tmp_path / "ids.bin", np.arange(200))
    for spec in (None, "train:300"):
        with pytest.raises(UserError, match="does not name its tokenizer"):
            open_tokens(path, spec)
    trained.save(tmp_path / "own.json")
    assert open_tokens(path, str(tmp_path / "own.json")).vocab_size == trained.vocab_size
