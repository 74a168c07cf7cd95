"""The size of the data for `redline plan`, before anything is prepared.

The counts of prepared folders and token files are exact; those of text are estimated from the sizes of its files.
Nothing but file sizes and descriptions is read.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from redline.cache import read_text
from redline.data.facts import document_bytes, fact_count, is_facts
from redline.data.problems import is_problems, problem_count
from redline.data.sources import (
    EMBEDDED,
    EMBEDDED_BYTES,
    Reading,
    dataset_id,
    holds_tokens,
    prepared_folder,
    shared_tokenizer,
    source_files,
)
from redline.data.splits import tail_tokens
from redline.data.tokenizer import named_vocabulary, trained_size
from redline.errors import UserError
from redline.recipe.resolve import DataFacts
from redline.recipe.schema import Data
from redline.remote import is_url

# Measured on 26 MB of English prose. Code has fewer bytes per GPT-2 token (2.2), because its indentation takes many.
GPT2_BYTES_PER_TOKEN = 4.42
# Bytes of text per byte of a file, by its suffix. Compressed English text is about a third of its size.
_TEXT_SHARE = {".jsonl": 0.95, ".ndjson": 0.95, ".parquet": 1.8, ".gz": 3.0, ".zst": 3.2}
_RAW_TOKEN_BYTES = 2


def expected_facts(data: Data, base_vocabulary: int = 0) -> DataFacts:
    """Return the facts of `data`; they are `estimated` unless its tokens are prepared.

    `base_vocabulary` is the vocabulary of the base model, for `data.tokenizer=base`. `train_tokens` is 0 if it is
    unknown: of a dataset id, or of a path that is not on this machine. Fingerprints are empty unless the tokens are
    prepared.
    """
    vocab_size = base_vocabulary if data.tokenizer == "base" else vocabulary(data.tokenizer)
    parts = [_repeated(_source_facts(part.source, data, vocab_size), part.reads_per_epoch) for part in data.parts]
    if len(parts) == 1:
        return parts[0]
    known = all(part.train_tokens for part in parts)
    return DataFacts(
        vocab_size=max(part.vocab_size for part in parts),
        train_tokens=sum(part.train_tokens for part in parts) if known else 0,
        val_tokens=sum(part.val_tokens for part in parts) if known else 0,
        fingerprint="",
        tokenizer=data.tokenizer,
        tokenizer_fingerprint="",
        estimated=any(part.estimated for part in parts),
        made=all(part.made for part in parts),
    )


def _repeated(facts: DataFacts, repeat: float) -> DataFacts:
    if repeat == 1.0:
        return facts
    return replace(facts, train_tokens=round(facts.train_tokens * repeat), fingerprint="")


def vocabulary(tokenizer: str) -> int:
    """Return the number of ids of the tokenizer, without loading it."""
    if known := named_vocabulary(tokenizer):
        return known[0]
    return trained_size(tokenizer) or _defined_vocabulary(Path(tokenizer).expanduser())


def bytes_per_token(tokenizer: str, vocab_size: int) -> float:
    """Estimate bytes of text per token: bytes 1, GPT-2 4.42, other BPE by size (512: 2.0, 4096: 3.3, 16384: 4.1)."""
    if tokenizer == "bytes":
        return 1.0
    if tokenizer == "gpt2":
        return GPT2_BYTES_PER_TOKEN
    return min(4.7, max(1.0, 2.0 + 0.43 * (math.log2(vocab_size) - 9)))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # the name is too long, or a folder above it may not be entered
        return False


def _source_facts(source: str, data: Data, vocab_size: int) -> DataFacts:
    path = Path(source).expanduser()
    if is_problems(source):
        return _problems(source, data, vocab_size)
    if is_url(source):
        return _url_facts(source, data, vocab_size)
    if source != EMBEDDED and not is_facts(source) and not _exists(path):
        return _estimate(data, vocab_size, 0.0, 0)
    if source != EMBEDDED and holds_tokens(path):
        return replace(_token_facts(path, data, vocab_size), made=True)
    if dataset_id(source) is None and (facts := _described(_cache_folder(source, data))):
        return facts
    return _estimate(data, vocab_size, *_text_bytes(source))


def _url_facts(source: str, data: Data, vocab_size: int) -> DataFacts:
    """Return the facts of a URL by its listing. A machine that cannot reach it plans without them."""
    try:
        return _described(_cache_folder(source, data)) or _estimate(data, vocab_size, *_text_bytes(source))
    except UserError:
        return _estimate(data, vocab_size, 0.0, 0)


def _token_facts(path: Path, data: Data, vocab_size: int) -> DataFacts:
    """Return the facts of a path that holds tokens."""
    if path.suffix == ".bin":
        return _raw(path, path.with_name("val.bin") if path.name == "train.bin" else None, data, vocab_size)
    if (path / "train.bin").is_file():
        return _raw(path / "train.bin", path / "val.bin", data, vocab_size)
    return _described(path) or _estimate(data, vocab_size, 0.0, 0)


def _problems(source: str, data: Data, vocab_size: int) -> DataFacts:
    """Return the facts of word problems: one sequence for each."""
    count = problem_count(source)
    held_out = round(count * data.val_fraction)
    return replace(
        _estimate(data, vocab_size, 0.0, 0),
        train_tokens=(count - held_out) * data.seq_len,
        val_tokens=held_out * data.seq_len,
    )


def _cache_folder(source: str, data: Data) -> Path:
    reading = Reading(data.val_fraction, data.text_key, data.dedup)
    tokenizer, sources = data.tokenizer, [part.source for part in data.parts]
    if len(sources) > 1 and trained_size(tokenizer) is not None:
        exist = all(
            one == EMBEDDED or is_facts(one) or is_url(one) or _exists(Path(one).expanduser()) for one in sources
        )
        tokenizer = str(shared_tokenizer(sources, tokenizer, reading)) if exist else tokenizer
    return prepared_folder(source, tokenizer, reading, stream=data.stream)


def _described(folder: Path) -> DataFacts | None:
    """Return the facts that a prepared folder states; None if it does not exist or cannot be read."""
    try:
        meta = json.loads(read_text(folder / "meta.json"))
        return DataFacts(
            vocab_size=int(meta["vocab_size"]),
            train_tokens=int(meta["splits"]["train"]["tokens"]),
            val_tokens=int(meta["splits"]["val"]["tokens"]),
            fingerprint=str(meta["fingerprint"]),
            tokenizer=str(meta["tokenizer"]["name"]),
            tokenizer_fingerprint=str(meta["tokenizer"]["fingerprint"]),
            text_bytes=[int(meta["splits"][split]["bytes"]) for split in ("train", "val")],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _raw(train: Path, val: Path | None, data: Data, vocab_size: int) -> DataFacts:
    """Return the facts of raw token files by their sizes; their content is not read."""
    tokens = train.stat().st_size // _RAW_TOKEN_BYTES
    has_val = val is not None and val.is_file()
    held_out = val.stat().st_size // _RAW_TOKEN_BYTES if val is not None and has_val else tail_tokens(tokens)
    return DataFacts(
        vocab_size=vocab_size,
        train_tokens=tokens if has_val else tokens - held_out,
        val_tokens=held_out,
        fingerprint="",
        tokenizer=data.tokenizer,
        tokenizer_fingerprint="",
    )


def _text_bytes(source: str) -> tuple[float, int]:
    """Estimate the bytes of text; return them with the number of files."""
    if source == EMBEDDED:
        return EMBEDDED_BYTES, 0
    if is_facts(source):
        return document_bytes(source), fact_count(source)
    files = source_files(source)
    return sum(file.size * _TEXT_SHARE.get(file.path.suffix, 1.0) for file in files), len(files)


def _estimate(data: Data, vocab_size: int, text_bytes: float, documents: int) -> DataFacts:
    tokens = round(text_bytes / bytes_per_token(data.tokenizer, vocab_size)) + documents
    held_out = round(tokens * data.val_fraction)
    return DataFacts(
        vocab_size=vocab_size,
        train_tokens=tokens - held_out,
        val_tokens=held_out,
        fingerprint="",
        tokenizer=data.tokenizer,
        tokenizer_fingerprint="",
        estimated=True,
    )


def _defined_vocabulary(path: Path) -> int:
    """Return the number of ids of a tokenizer.json: the largest id plus one."""
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        definition: Any = json.loads(read_text(path))
        vocab = definition["model"]["vocab"]  # Unigram has a list: the positions are the ids
        ids = [*vocab.values()] if isinstance(vocab, dict) else [len(vocab) - 1]
        return max(int(i) for i in [*ids, *(token["id"] for token in definition["added_tokens"])]) + 1
    except FileNotFoundError:
        fix = "Name bytes, gpt2, train:N or the path of a tokenizer.json."
        raise UserError("no such tokenizer.", where=str(path), fix=fix) from None
    except (OSError, ValueError, KeyError, TypeError):
        fix = "Save it again with `tokenizers`."
        raise UserError("the tokenizer.json cannot be read.", where=str(path), fix=fix) from None
