"""What a source is, and where its tokens lie once they are prepared. Pure: neither numpy nor a tokenizer is needed.

A cache folder's name follows from everything that its tokens depend on, so that `redline plan` finds it too.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline.cache import cache_dir, read_bytes, read_text
from redline.data.text import embedded_files, text_files
from redline.data.tokenizer import named_vocabulary, trained_size

SCHEMA = "redline-tokens-1"
EMBEDDED = "embedded"
# How documents are found, cut and split. Whoever changes that raises the number, so that old folders are not taken.
RULES = 4
TEXT_KEY = "text"

# Held out from the end of a raw file that comes without a validation file: one per cent, within these bounds.
_HOLD_OUT_MOST = 1_000_000
_HOLD_OUT_LEAST = 8_192

_DATASET = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(:(?P<config>[\w.-]+))?(@(?P<split>[\w.-]+))?")
_FILE_SUFFIXES = (".txt", ".md", ".json", ".jsonl", ".ndjson", ".parquet", ".bin", ".tok", ".gz", ".zst", ".csv", ".py")


@dataclass(frozen=True)
class DatasetId:
    """`owner/name[:config][@split]` on a hub."""

    name: str
    config: str | None
    split: str


@dataclass(frozen=True)
class Reading:
    """How documents are taken out of a source, besides what it is."""

    val_fraction: float = 0.05
    text_key: str = TEXT_KEY
    dedup: bool = False


def dataset_id(source: str) -> DatasetId | None:
    """The dataset that `source` names; None when it is a path, or could only be meant as one."""
    match = _DATASET.fullmatch(source)
    if match is None or source.endswith(_FILE_SUFFIXES):
        return None
    try:
        if Path(source).expanduser().exists():
            return None
    except OSError:  # too long for a path, or in a folder that may not be entered
        return None
    return DatasetId(match["name"], match["config"], match["split"] or "train")


def holds_tokens(source: Path) -> bool:
    """Whether the path holds tokens already, rather than text."""
    try:
        if (source.suffix == ".bin" and source.is_file()) or (source / "train.bin").is_file():
            return True
        meta = source / "meta.json"
        return meta.is_file() and SCHEMA in read_text(meta, errors="replace")
    except OSError:  # who reads the text says what is wrong with the path
        return False


def held_out_of(tokens: int) -> int:
    """How many tokens at the end of a raw file without a validation file are held out."""
    return min(_HOLD_OUT_MOST, max(tokens // 100, min(_HOLD_OUT_LEAST, tokens // 10)))


def origin_of(source: str) -> list[Any]:
    """What stands for the content. Files count by path, size and time of change: reading them all would take long."""
    if source == EMBEDDED:
        return [EMBEDDED, sys.version, [[file.name, file.size] for file in embedded_files()]]
    if dataset := dataset_id(source):
        return ["dataset", dataset.name, dataset.config, dataset.split]
    path = Path(source).expanduser()
    return ["files", [[str(file.path.resolve()), file.size, file.mtime_ns] for file in text_files(path)]]


def tokenizer_identity(spec: str) -> list[Any]:
    """The spec, and for a file what it holds."""
    if named_vocabulary(spec):
        return [spec]
    if (size := trained_size(spec)) is not None:  # train:1k is train:1000
        return [f"train:{size}"]
    path = Path(spec).expanduser()
    try:
        path = path / "tokenizer.json" if path.is_dir() else path
        return [spec, hashlib.sha256(read_bytes(path)).hexdigest()] if path.is_file() else [spec]
    except OSError:  # who loads it says what is wrong with the path
        return [spec]


def prepared_folder(source: str, tokenizer: str, reading: Reading, *, stream: bool = False) -> Path:
    """Where the cache keeps the tokens of this source, whether it does so already or not."""
    key = _key(origin_of(source), tokenizer_identity(tokenizer), reading)
    return cache_dir() / ("streams" if stream else "data") / key


def shared_tokenizer(sources: Sequence[str], spec: str, reading: Reading) -> Path:
    """Where the cache keeps a tokenizer that was trained on the texts of several sources."""
    key = _key([origin_of(source) for source in sources], tokenizer_identity(spec), reading)
    return cache_dir() / "tokenizers" / key / "tokenizer.json"


def _key(origin: list[Any], tokenizer: list[Any], reading: Reading) -> str:
    content = [SCHEMA, RULES, origin, tokenizer, vars(reading)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]
