"""The tokens that a recipe's `data` section names: one source, a mixture of several, or a stream."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from redline.cache import discard_dir, explain_write_errors, read_bytes, read_text, temporary_sibling, write_atomically
from redline.data.encode import default_workers
from redline.data.estimate import expected_facts
from redline.data.index import Index
from redline.data.mixture import turns, window_index, window_mixture_key
from redline.data.prepare import prepare_cached, tokenizer_for
from redline.data.read_stats import Progress, ProgressCallback
from redline.data.shards import check_shard
from redline.data.sources import Reading, holds_tokens, prepared_folder, shared_tokenizer
from redline.data.stream import StreamIndex, StreamSplit, StreamState, TokenStream, read_state
from redline.data.text import EMBEDDED
from redline.data.tokenizer import Tokenizer, load_tokenizer, trained_size
from redline.data.tokens import TokenData, TokenSplit, check_definition, digest_of, has_valid_digest, shard_files
from redline.errors import UserError
from redline.recipe.resolve import DataFacts
from redline.recipe.schema import Data, Part

# The validation tokens of a mixture alternate between its sources in blocks of about this many tokens, so that the
# first sequences, which a run evaluates, come from all of them.
_BLOCK_TOKENS = 16_384


@dataclass(frozen=True)
class Corpus:
    """The tokens of all sources as if they were one, and the order in which they are read."""

    tokens: TokenData
    facts: DataFacts
    parts: tuple[Part, ...]  # the sources, with their weights
    sizes: tuple[int, ...]  # training tokens of each source, in the order in which `tokens.train` has them

    def index(self, seq_len: int, seed: int, *, shuffle: bool = True) -> Index:
        """Return which window of `tokens.train` each sample is."""
        train = self.tokens.train
        if isinstance(train, StreamSplit):
            return StreamIndex(train, seq_len, seed, shuffle)
        return window_index(self.sizes, self.parts, seq_len, seed, shuffle=shuffle)


def open_corpus(data: Data, *, for_evaluation: bool = False, progress: ProgressCallback | None = None) -> Corpus:
    """Open the tokens that `data` names, after preparing those that are not in the cache.

    For evaluation nothing is held out, and duplicates are kept.
    """
    held_out, dedup = (0.0, False) if for_evaluation else (data.val_fraction, data.dedup)
    reading = Reading(held_out, data.text_key, dedup)
    if data.stream and not for_evaluation and not _holds_tokens(data.parts[0].source):
        return _open_stream(data, reading, progress)
    opened = _open_parts([part.source for part in data.parts], data.tokenizer, reading, progress)
    tokens = _combine(data.parts, opened)
    facts = replace(
        facts_of(tokens),
        train_tokens=_epoch_tokens([len(part.train) for part in opened], data.parts),
        made=all(_holds_tokens(part.source) for part in data.parts),
    )
    return Corpus(tokens, facts, data.parts, tuple(len(part.train) for part in opened))


def _epoch_tokens(sizes: Sequence[int], parts: Sequence[Part]) -> int:
    """Return the training tokens of an epoch: each source's, times its `repeat`."""
    return sum(round(size * part.reads_per_epoch) for size, part in zip(sizes, parts, strict=True))


def facts_of(tokens: TokenData) -> DataFacts:
    """Return what the plan needs to know about prepared tokens."""
    sizes = [tokens.train.bytes, 0 if tokens.val is None else tokens.val.bytes]
    known = [size for size in sizes if size is not None]
    return DataFacts(
        vocab_size=tokens.vocab_size,
        train_tokens=len(tokens.train),
        val_tokens=len(tokens.val) if tokens.val is not None else 0,
        fingerprint=tokens.fingerprint,
        tokenizer=tokens.tokenizer_name,
        tokenizer_fingerprint=tokens.tokenizer_fingerprint,
        text_bytes=known if len(known) == len(sizes) else None,
    )


def _holds_tokens(source: str) -> bool:
    return source != EMBEDDED and holds_tokens(Path(source).expanduser())


def _open_parts(
    sources: Sequence[str], spec: str, reading: Reading, progress: ProgressCallback | None
) -> list[TokenData]:
    if len(sources) == 1 or trained_size(spec) is None:
        return [prepare_cached(source, spec, reading, progress=progress) for source in sources]
    definition = shared_tokenizer(sources, spec, reading)

    @cache
    def load() -> Tokenizer:
        if not _is_intact(definition):
            _save(tokenizer_for(sources, spec, reading, progress), definition)
        tokenizer = load_tokenizer(str(definition))
        tokenizer.name = spec
        return tokenizer

    load()  # first, because the content of the file is part of the name of each prepared folder
    return [prepare_cached(source, str(definition), reading, progress=progress, load=load) for source in sources]


def _save(tokenizer: Tokenizer, path: Path) -> None:
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_sibling(path)
        tokenizer.save(temporary)
        digest = hashlib.sha256(read_bytes(temporary)).hexdigest()
        temporary.replace(path)
        write_atomically(_digest_file(path), digest + "\n")


def _digest_file(definition: Path) -> Path:
    return definition.with_name(f"{definition.name}.sha256")


def _is_intact(definition: Path) -> bool:
    """Return whether a cached tokenizer exists and agrees with its digest; older releases wrote no digest."""
    if not definition.is_file() or not _digest_file(definition).is_file():
        return definition.is_file()
    return hashlib.sha256(read_bytes(definition)).hexdigest() == read_text(_digest_file(definition)).strip()


def _combine(parts: Sequence[Part], opened: Sequence[TokenData]) -> TokenData:
    if len(opened) > 1:
        return _join_sources(parts, opened)
    if parts[0].repeat is None:  # with or without a weight: the only source has all samples
        return opened[0]
    return replace(opened[0], fingerprint=_fingerprint(parts, opened))


def _fingerprint(parts: Sequence[Part], opened: Sequence[TokenData]) -> str:
    keys = window_mixture_key(parts)
    return digest_of(["mixture", [[data.fingerprint, key] for data, key in zip(opened, keys, strict=True)]])


def _join_sources(parts: Sequence[Part], opened: Sequence[TokenData]) -> TokenData:
    first = opened[0]
    for part, other in zip(parts, opened, strict=True):
        if other.tokenizer_fingerprint != first.tokenizer_fingerprint:
            what = f"the tokens were made with another tokenizer ({other.tokenizer_name}) than {parts[0].source}."
            raise UserError(what, where=part.source, fix="Prepare all sources of a mixture with the same tokenizer.")
    held_out = [data.val for data in opened if data.val is not None]
    return TokenData(
        source=first.source,
        train=_join_splits([data.train for data in opened], [data.train.pieces for data in opened]),
        val=_join_splits(held_out, _alternating_blocks(held_out)) if held_out else None,
        tokenizer_name=first.tokenizer_name,
        tokenizer_fingerprint=first.tokenizer_fingerprint,
        vocab_size=first.vocab_size,
        eot=first.eot,
        fingerprint=_fingerprint(parts, opened),
        files=tuple(file for data in opened for file in data.files),
        omissions=tuple(line for data in opened for line in data.omissions),
    )


Pieces = tuple[np.ndarray, ...]


def _join_splits(splits: Sequence[TokenSplit], pieces: Sequence[Pieces]) -> TokenSplit:
    sizes = [split.bytes for split in splits]
    return TokenSplit(
        [piece for some in pieces for piece in some],
        vocab_size=splits[0].vocab_size,
        eot=splits[0].eot,
        utf8_bytes=None if None in sizes else sum(size for size in sizes if size is not None),
        fingerprint=digest_of([split.fingerprint for split in splits]),
    )


def _alternating_blocks(splits: Sequence[TokenSplit]) -> list[Pieces]:
    """Cut the splits into blocks, and interleave the blocks in proportion to the sizes of the splits."""
    blocks = [[block for piece in split.pieces for block in _blocks(piece, split.eot)] for split in splits]
    order = turns([len(some) for some in blocks])
    following = [iter(some) for some in blocks]
    return [tuple(next(following[source]) for source in order)]


def _blocks(piece: np.ndarray, eot: int) -> list[np.ndarray]:
    """Cut the tokens into blocks, between two documents if one begins soon after the end of a block."""
    cuts = []
    for end in range(_BLOCK_TOKENS, len(piece), _BLOCK_TOKENS):
        starts = np.flatnonzero(piece[end : end + _BLOCK_TOKENS // 2] == eot)
        cuts.append(end + int(starts[0]) if len(starts) else end)
    return [block for block in np.split(piece, cuts) if len(block)]


def _open_stream(data: Data, reading: Reading, progress: ProgressCallback | None) -> Corpus:
    """Open a stream, and wait until training may begin.

    The fingerprint stands for source and tokenizer, because the tokens are not known yet.
    """
    source = data.parts[0].source
    path = Path(source).expanduser()
    folder = prepared_folder(source, data.tokenizer, reading, stream=True)
    task = {
        "source": str(path.resolve()) if path.exists() and source != EMBEDDED else source,
        "tokenizer": data.tokenizer,
        "reading": asdict(reading),
        "workers": max(1, default_workers() - 1),  # one core is left for training
    }
    if _is_damaged(folder, read_state(folder)):
        discard_dir(folder)
    stream = TokenStream(folder, task)
    if progress:
        progress(Progress(f"preparing the first shard of {source}", 0, None, 0))
    state = stream.wait(lambda now: now.ready)
    meta = state.description
    vocab_size, eot, made_with = int(meta["vocab_size"]), int(meta["eot"]), meta["tokenizer"]
    fingerprint = digest_of(["stream", folder.name, made_with["fingerprint"]])
    train = StreamSplit(stream, vocab_size, eot, fingerprint, made_with["fingerprint"])
    train.take(state)
    entry = meta["splits"]["val"]
    files = tuple(shard_files(folder, vocab_size, entry))
    held_out = [file.map() for file in files]
    val = TokenSplit(held_out, vocab_size=vocab_size, eot=eot, utf8_bytes=entry["bytes"], fingerprint=digest_of(entry))
    tokens = TokenData(
        source=folder,
        train=train,
        val=val if held_out else None,
        tokenizer_name=made_with["name"],
        tokenizer_fingerprint=made_with["fingerprint"],
        vocab_size=vocab_size,
        eot=eot,
        fingerprint=fingerprint,
        files=files,
    )
    return Corpus(tokens, _stream_facts(data, tokens, complete=state.done), data.parts, (len(train),))


def _stream_facts(data: Data, tokens: TokenData, *, complete: bool) -> DataFacts:
    facts = facts_of(tokens)
    return facts if complete else replace(facts, train_tokens=expected_facts(data).train_tokens, estimated=True)


def _is_damaged(folder: Path, state: StreamState) -> bool:
    """Return whether what an earlier process wrote cannot be continued, so that the stream has to begin again."""
    meta = state.description
    if not meta.get("splits"):
        return False
    try:
        if "digest" in meta and not has_valid_digest(meta):
            return True
        check_definition(folder, meta)
        for entry in meta["splits"].values():
            for file in shard_files(folder, int(meta["vocab_size"]), entry):
                check_shard(file, str(meta["tokenizer"]["fingerprint"]))
    except (UserError, ValueError, KeyError, TypeError):
        return True
    return False
