"""The data that a recipe's `data` section names: one source, a mixture of several, or a stream.

From the bottom up: the order of samples from several sources, the tokens of a recipe, and text as the data of a job.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from redline.cache import discard_dir, explain_write_errors, read_bytes, read_text, temporary_sibling, write_atomically
from redline.data.estimate import expected_facts
from redline.data.loader import (
    Index,
    PassIndex,
    WindowIndex,
    cu_seqlens,
    document_ids,
    inputs_and_targets,
    order_keys,
    permute,
)
from redline.data.prepare import default_workers, prepare_cached, tokenizer_for
from redline.data.sources import (
    EMBEDDED,
    Progress,
    ProgressCallback,
    Reading,
    holds_tokens,
    prepared_folder,
    shared_tokenizer,
)
from redline.data.stream import StreamIndex, StreamSplit, StreamState, TokenStream, read_state
from redline.data.tokenizer import Tokenizer, load_tokenizer, trained_size
from redline.data.tokens import (
    TokenData,
    TokenSplit,
    check_definition,
    check_shard,
    digest_of,
    document_keys,
    first_tokens,
    has_valid_digest,
    shard_files,
)
from redline.errors import UserError
from redline.recipe.resolve import DataFacts
from redline.recipe.schema import Data, Part, Recipe

# ----------------------------------------------------------------------------------------------------
# The order of samples from several sources: the source of the n-th sample, and its row or window there.
#
# There are two rules, the same for every job (docs/decisions/0025-what-a-weight-means.md):
#
# - No source has a weight: an epoch has every row (or window) once, or `repeat` times, in one shuffle (`EpochIndex`).
# - A source has a weight: weights are shares of the samples. Each source is read in passes of its own, and its samples
#   are spread evenly (`MixtureIndex`). An epoch has as many samples as all sources have rows.
#
# Everything is a function of the seed and the sample number, so a resumed run needs no saved state.


Int64s = npt.NDArray[np.int64]

_MAX_ROUND = 1 << 16
_SAMPLED_ROWS = 1 << 16  # the means of a longer epoch are taken over so many of its rows
_SEED_STEP = 1_000_003  # the distance between the seeds of two sources


class RowIndex(Protocol):
    """Returns the row of each sample. Samples count through all epochs, without end."""

    def __len__(self) -> int: ...

    def sequences(self, samples: Int64s) -> Int64s: ...


def stated_weights(parts: Sequence[Part]) -> list[float] | None:
    """Return the weights of the sources, or None if no source has one. If any source has one, the default is 1.

    The weight of a single source has no effect, so it counts as none.
    """
    if len(parts) == 1 or all(part.weight is None for part in parts):
        return None
    return [1.0 if part.weight is None else part.weight for part in parts]


def shares_of(sizes: Sequence[int], parts: Sequence[Part]) -> list[float]:
    """Return each source's share of the samples; `sizes` are the rows or windows of each."""
    weights = stated_weights(parts)
    amounts = weights or [size * repeat for size, repeat in zip(sizes, _repeats(parts), strict=True)]
    total = math.fsum(amounts)
    return [amount / total for amount in amounts]


def epoch_sample(index: RowIndex) -> Int64s:
    """Return the rows of an epoch, each as often as it occurs; of a long epoch, evenly spaced rows."""
    count = min(len(index), _SAMPLED_ROWS)
    return index.sequences(np.arange(count, dtype=np.int64) * len(index) // count)


def row_mixture_key(parts: Sequence[Part]) -> list[Any]:
    """Return what the fingerprint of a job that reads rows must contain about the mixture.

    Without weights these are plain numbers, as in older releases, where `weight` meant what `repeat` means now: a run
    of that time must have the same fingerprint as its lock when it is resumed.
    """
    weights = stated_weights(parts)
    return list(_repeats(parts)) if weights is None else [["share", weight] for weight in weights]


def window_mixture_key(parts: Sequence[Part]) -> list[Any]:
    """Return what the fingerprint of a job that reads windows must contain about the mixture.

    Weights are plain numbers, as in older releases, in which they were always shares.
    """
    weights = stated_weights(parts)
    return [["repeat", repeat] for repeat in _repeats(parts)] if weights is None else list(weights)


def row_index(sizes: Sequence[int], parts: Sequence[Part], seed: int, *, shuffle: bool) -> RowIndex:
    """Return the order of training for a job whose samples are rows; `sizes` are the rows of each source."""
    weights = stated_weights(parts)
    if weights is None:
        return EpochIndex(sizes, _repeats(parts), seed, shuffle)
    return ShareIndex(sizes, weights, seed, shuffle)


def window_index(sizes: Sequence[int], parts: Sequence[Part], seq_len: int, seed: int, *, shuffle: bool) -> Index:
    """Return the order of training for a job whose samples are windows; `sizes` are the tokens of each source."""
    indices = []
    for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        try:
            indices.append(WindowIndex(size, seq_len, seed + _SEED_STEP * number, shuffle))
        except UserError as error:
            raise UserError(error.what, where=part.source, fix=error.fix) from None
    if len(parts) == 1 and parts[0].repeat is None:
        return indices[0]
    offsets = _firsts(sizes)
    weights = stated_weights(parts)
    if weights is not None:
        return MixtureIndex(indices, offsets, weights)
    windows = [len(index) for index in indices]
    return UnionIndex(EpochIndex(windows, _repeats(parts), seed, shuffle), windows, offsets, seq_len)


def _repeats(parts: Sequence[Part]) -> list[float]:
    return [part.reads_per_epoch for part in parts]


def _firsts(sizes: Sequence[int]) -> list[int]:
    """Return where each source begins when all are concatenated."""
    return [sum(sizes[:number]) for number in range(len(sizes))]


def whole_shares(weights: Sequence[float]) -> list[int]:
    """Return the weights as small whole numbers: exactly if their sum allows it, otherwise to one part in 65,536."""
    fractions = [Fraction(weight).limit_denominator(_MAX_ROUND) for weight in weights]
    if all(fractions) and all(math.isclose(f, w, rel_tol=1e-12) for f, w in zip(fractions, weights, strict=True)):
        scale = math.lcm(*(fraction.denominator for fraction in fractions))
        whole = [int(fraction * scale) for fraction in fractions]
        divisor = math.gcd(*whole)
        if sum(whole) // divisor <= _MAX_ROUND:
            return [share // divisor for share in whole]
    total = math.fsum(weights)
    return [max(1, round(_MAX_ROUND * weight / total)) for weight in weights]


def turns(shares: Sequence[int]) -> Int64s:
    """Return a round in which each source has its share of turns, never more than one turn ahead or behind.

    This is Tijdeman's rule (1980): of the sources that are due by a margin, take the one with the earliest deadline.
    """
    parts, period = len(shares), sum(shares)
    if parts == 1:
        return np.zeros(period, dtype=np.int64)
    margin = 2 * parts - 2
    taken = [0] * parts
    order = []
    for turn in range(1, period + 1):
        due = [(turn * share - count * period) * margin for share, count in zip(shares, taken, strict=True)]
        eligible = [part for part in range(parts) if due[part] >= period]
        chosen = min(eligible, key=lambda part: (Fraction(period * (margin - 1) - due[part], shares[part]), part))
        taken[chosen] += 1
        order.append(chosen)
    return np.array(order, dtype=np.int64)


class MixtureIndex:
    """Takes samples from the index of each source in turn. `offsets` has the first token of each source."""

    def __init__(self, indices: Sequence[Index], offsets: Sequence[int], weights: Sequence[float]) -> None:
        self._indices, self._offsets = list(indices), list(offsets)
        shares = whole_shares(weights)
        self._order, self._shares = turns(shares), np.array(shares, dtype=np.int64)
        is_turn = self._order == np.arange(len(shares))[:, None]
        self._before = np.cumsum(is_turn, axis=1) - is_turn  # turns of the source earlier in the round

    def parts(self, samples: Int64s) -> tuple[Int64s, Int64s]:
        """Return for each sample its source, and the number of the sample within that source."""
        rounds, places = np.divmod(np.asarray(samples, dtype=np.int64), len(self._order))
        parts = self._order[places]
        return parts, rounds * self._shares[parts] + self._before[parts, places]

    def starts(self, samples: Int64s) -> Int64s:
        parts, numbers = self.parts(samples)
        starts = np.empty(parts.shape, dtype=np.int64)
        for part in np.unique(parts):
            rows = parts == part
            starts[rows] = self._offsets[part] + self._indices[part].starts(numbers[rows])
        return starts


class ShareIndex:
    """The order of rows of several sources, in shares that follow from their weights.

    An epoch has as many samples as all sources have rows. So a source with a large share is read more than once in an
    epoch, and one with a small share only in part; the next epoch continues its pass where this one ended.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool = True) -> None:
        self._rows = sum(sizes)
        passes = [PassIndex(size, seed + _SEED_STEP * number, shuffle) for number, size in enumerate(sizes)]
        self._mixture = MixtureIndex(passes, _firsts(sizes), weights)

    def __len__(self) -> int:
        """Return the number of rows per epoch."""
        return self._rows

    def sequences(self, samples: Int64s) -> Int64s:
        return self._mixture.starts(samples)


class EpochIndex:
    """The order of sequences of several sources without weights.

    Of a source with n sequences and the repeat w, an epoch reads w·n, rounded, and at least one. The source's own
    seeded order continues from epoch to epoch, and begins again after its last sequence; so with a repeat below 1 each
    epoch reads other sequences. Within an epoch all sources are shuffled together.
    """

    def __init__(self, sizes: Sequence[int], repeats: Sequence[float], seed: int, shuffle: bool = True) -> None:
        self.seed, self.shuffle = seed, shuffle
        self._sizes = np.array(sizes, dtype=np.int64)
        self._per_epoch = np.maximum(1, np.rint(np.array(repeats) * self._sizes)).astype(np.int64)
        self._first = np.cumsum(self._sizes) - self._sizes  # the first sequence of each source
        self._ends = np.cumsum(self._per_epoch)

    def __len__(self) -> int:
        """Return the number of sequences per epoch."""
        return int(self._ends[-1])

    def sequences(self, samples: Int64s) -> Int64s:
        """Return the sequence of each sample. Samples are numbered through all epochs, without end."""
        samples = np.asarray(samples, dtype=np.int64)
        if samples.size and samples.min() < 0:
            raise ValueError("sample numbers are not negative")
        epochs, places = np.divmod(samples, len(self))
        if self.shuffle:
            places = permute(places, len(self), order_keys(self.seed, epochs))
        parts = np.searchsorted(self._ends, places, side="right")
        turns = epochs * self._per_epoch[parts] + places - (self._ends - self._per_epoch)[parts]
        rounds, within = np.divmod(turns, self._sizes[parts])
        if self.shuffle:
            for part in np.unique(parts):
                own = parts == part
                keys = order_keys(self.seed, rounds[own], group=int(part) + 1)
                within[own] = permute(within[own], int(self._sizes[part]), keys)
        return self._first[parts] + within


class UnionIndex:
    """The order of windows of several sources without weights."""

    def __init__(self, epochs: EpochIndex, windows: Sequence[int], offsets: Sequence[int], seq_len: int) -> None:
        self._epochs, self._seq_len = epochs, seq_len
        self._ends = np.cumsum(np.array(windows, dtype=np.int64))
        self._first = self._ends - np.array(windows, dtype=np.int64)
        self._offsets = np.array(offsets, dtype=np.int64)

    def __len__(self) -> int:
        """Return the number of windows per epoch."""
        return len(self._epochs)

    def starts(self, samples: Int64s) -> Int64s:
        windows = self._epochs.sequences(samples)
        parts = np.searchsorted(self._ends, windows, side="right")
        return self._offsets[parts] + (windows - self._first[parts]) * self._seq_len


# ----------------------------------------------------------------------------------------------------
# The tokens of a recipe.


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


# ----------------------------------------------------------------------------------------------------
# Text as the data of a job: tokens in documents, read in windows of `data.seq_len`, with some of them held out.


PROMPT_CHARACTERS = 40  # of a held-out document, as the prompt of samples
_MEASURED_WINDOWS = 256  # from which the mean length of documents is estimated


@dataclass(frozen=True)
class TextData:
    tokens: TokenData
    held_out: TokenSplit | None  # what evaluation reads
    corpus: Corpus | None = None  # the order in which training reads; None when nothing is trained

    @property
    def facts(self) -> DataFacts:
        return self.corpus.facts if self.corpus is not None else facts_of(self.tokens)

    @property
    def messages(self) -> tuple[str, ...]:
        return self.tokens.omissions

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, for samples; None if its files are missing, since token files can be trained on without it."""
        try:
            return self.tokens.tokenizer()
        except UserError:
            return None

    def row_keys(self, *, trained: bool) -> list[bytes] | None:
        """Return one key per document to train on, or per held-out document; None if there are too many tokens."""
        split = self.tokens.train if trained else self.held_out
        return None if split is None or isinstance(split, StreamSplit) else document_keys(split)

    def held_out_sequences(self, seq_len: int) -> int:
        return 0 if self.held_out is None else -(-max(0, len(self.held_out) - 1) // seq_len)

    def first_prompt(self, seq_len: int) -> str:
        """Return the beginning of the first held-out document, a few words long."""
        split = self.held_out if self.held_out is not None and len(self.held_out) else self.tokens.train
        if self.tokenizer is None or not len(split):
            return ""
        text = self.tokenizer.decode(first_tokens(split, max(1, min(PROMPT_CHARACTERS, seq_len // 4))))
        # The last token may end in the middle of a character, which decodes to U+FFFD.
        line = next((line for line in text.rstrip("\ufffd").splitlines() if line.strip()), "")
        if len(line) <= PROMPT_CHARACTERS:
            return line.rstrip()
        return line[:PROMPT_CHARACTERS].rsplit(" ", 1)[0].rstrip()


def load_text(recipe: Recipe, *, for_evaluation: bool = False, progress: ProgressCallback | None = None) -> TextData:
    """Open the recipe's tokens, and prepare them first if necessary.

    With `for_evaluation` nothing is trained, and all of the text is held out.
    """
    corpus = open_corpus(recipe.data, for_evaluation=for_evaluation, progress=progress)
    if for_evaluation:
        return TextData(corpus.tokens, _all_tokens(corpus.tokens), corpus)
    index = training_index(recipe, corpus)  # raises here, before a model is built, if the text is too short
    if recipe.data.pack and not recipe.data.stream:
        rows = {"document": _document_length(corpus.tokens, index, recipe.data.seq_len)}
        corpus = replace(corpus, facts=replace(corpus.facts, rows=rows))
    return TextData(corpus.tokens, corpus.tokens.val, corpus)


def training_index(recipe: Recipe, corpus: Corpus) -> Index:
    """Return the order in which training reads the corpus."""
    return corpus.index(recipe.data.seq_len, recipe.train.seed, shuffle=recipe.data.shuffle)


def _document_length(tokens: TokenData, index: Index, seq_len: int) -> float:
    """Return the mean length, within its window, of the document that a token is in, from windows spread over the data.

    A mean over tokens, not over documents: a document of length n counts n times.
    """
    windows = max(1, len(tokens.train) // seq_len)
    samples = np.arange(min(windows, _MEASURED_WINDOWS)) * windows // min(windows, _MEASURED_WINDOWS)
    inputs, _ = inputs_and_targets(tokens.train.windows(index.starts(samples), seq_len + 1))
    lengths = np.diff(cu_seqlens(document_ids(inputs, tokens.eot))).astype(np.int64)
    return float((lengths**2).sum() / inputs.size)


def _all_tokens(tokens: TokenData) -> TokenSplit:
    """Return one split of all tokens: a prepared folder that is evaluated may have a validation split of its own."""
    splits = [tokens.train] if tokens.val is None else [tokens.train, tokens.val]
    sizes = [split.bytes for split in splits]
    return TokenSplit(
        [piece for split in splits for piece in split.pieces],
        vocab_size=tokens.vocab_size,
        eot=tokens.eot,
        utf8_bytes=None if None in sizes else sum(size or 0 for size in sizes),
        fingerprint=tokens.fingerprint,
    )


def random_text(facts: DataFacts) -> TextData:
    """Return data that can be built with but not read, for steps on random tokens that are only timed."""
    split = TokenSplit(
        [np.zeros(1, dtype=np.uint32)], vocab_size=facts.vocab_size, eot=0, utf8_bytes=None, fingerprint=""
    )
    tokens = TokenData(Path(), split, None, facts.tokenizer, "", facts.vocab_size, 0, "", ())
    return TextData(tokens, None)


def text_tokenizer(facts: DataFacts, folder: Path) -> TextData:
    """Return data of which only the tokenizer can be used; `folder`, a run's, may have a copy of it."""
    tokens = replace(random_text(facts).tokens, source=folder, tokenizer_fingerprint=facts.tokenizer_fingerprint)
    tokenizer = TextData(tokens, None).tokenizer
    return TextData(replace(tokens, eot=tokenizer.eot), None) if tokenizer else TextData(tokens, None)
