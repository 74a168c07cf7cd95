"""Large texts: many bad rows, very many short documents, very long documents. Memory stays bounded."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from redline.data.loader import WindowIndex, document_ids
from redline.data.tokens import open_tokens

BAD = (b"{broken", b'{"text": 5}', b'{"other": "x"}', b'["a row"]', b'\xff\xfe{"text": "x"}')
SYLLABLES = ("ba", "be", "bi", "do", "du", "fa", "fo", "ka", "ko", "ri", "sel", "tin", "um")
WORDS = [first + second for first in SYLLABLES for second in SYLLABLES]
LONG = [pytest.mark.soak, pytest.mark.timeout(3600)]


def write_rows(path: Path, size: int, words: int, bad_every: int) -> tuple[int, int]:
    """Write rows until the file has that size. Return the numbers of good and of bad rows."""
    chance, good, bad, written = random.Random(7), 0, 0, 0
    pool = [" ".join(chance.choices(WORDS, k=words)) for _ in range(500)]
    with open(path, "wb", buffering=1 << 20) as file:
        while written < size:
            if bad_every and (good + bad) % bad_every == bad_every - 1:
                row, bad = BAD[bad % len(BAD)], bad + 1
            else:
                row, good = json.dumps({"text": f"{good} {pool[good % 500]}"}).encode(), good + 1
            written += file.write(row + b"\n")
    return good, bad


@pytest.mark.parametrize("size", [6 << 20, pytest.param(1 << 30, marks=LONG)], ids=["6 MB", "1 GB"])
def test_rows_with_bad_ones_among_them(measured: Callable[..., Any], tmp_path: Path, say: Any, size: int) -> None:
    good, bad = write_rows(tmp_path / "rows.jsonl", size, words=200, bad_every=50)
    done = measured("prepare", "rows.jsonl", "--out", "tokens", "--tokenizer", "train:2048", "--json")
    summary = done.json
    assert summary["counts"]["bad_rows"] == bad
    assert summary["counts"]["rows"] == good + bad
    assert summary["train"]["documents"] + summary["val"]["documents"] == good
    say(
        f"load: {size / 1e6:,.0f} MB of JSONL, {bad:,} of {good + bad:,} rows bad, all counted:"
        f" {done.seconds:.1f} s ({summary['mb_per_s']:.1f} MB/s), {done.mib:,.0f} MiB"
    )
    assert done.mib < 300


@pytest.mark.parametrize("count", [60_000, pytest.param(10_000_000, marks=LONG)], ids=["60k", "10M"])
def test_very_many_short_documents(measured: Callable[..., Any], tmp_path: Path, say: Any, count: int) -> None:
    with open(tmp_path / "short.jsonl", "w", encoding="utf-8") as file:
        file.writelines(f'{{"text": "note {number}"}}\n' for number in range(count))
    done = measured("prepare", "short.jsonl", "--out", "tokens", "--tokenizer", "bytes", "--json")
    summary = done.json
    assert summary["train"]["documents"] + summary["val"]["documents"] == count
    assert summary["counts"]["duplicates"] == 0
    text = sum(len(f"note {number}") for number in range(count))
    assert summary["train"]["tokens"] + summary["val"]["tokens"] == text + count, "and an end-of-text for each"
    say(f"load: {count:,} documents of 11 bytes: {done.seconds:.1f} s, {done.mib:,.0f} MiB")
    assert done.mib < 768, "most of it for knowing a duplicate among very many"


@pytest.mark.parametrize("count", [12, pytest.param(1000, marks=LONG)])
def test_documents_of_a_hundred_thousand_tokens(
    measured: Callable[..., Any], tmp_path: Path, say: Any, count: int
) -> None:
    """Each is longer than any sequence: it is prepared in one piece, cut into windows, and numbered within them."""
    length = 100_000
    with open(tmp_path / "long.jsonl", "w", encoding="utf-8") as file:
        for number in range(count):
            text = (f"{number} " + " ".join(WORDS) + " ") * (length // 200)
            file.write(json.dumps({"text": text[:length]}) + "\n")
    done = measured("prepare", "long.jsonl", "--out", "tokens", "--tokenizer", "bytes", "--val-fraction", "0", "--json")
    assert done.json["train"] == {**done.json["train"], "documents": count, "tokens": count * (length + 1)}
    say(f"load: {count:,} documents of 100,000 tokens: {done.seconds:.1f} s, {done.mib:,.0f} MiB")
    assert done.mib < 200
    split = open_tokens(tmp_path / "tokens").train
    index = WindowIndex(len(split), 4096, seed=1)
    rows = split.windows(index.starts(np.arange(64)), 4097)
    numbers = document_ids(rows, split.eot)
    assert numbers.max() <= 1, "a window of 4,096 meets at most one border"
    assert (np.diff(numbers, axis=1) == (rows[:, 1:] == split.eot)).all()
