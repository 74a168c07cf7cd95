"""Training on tokens that are still being prepared: a process in the background writes shards, training reads them.

Shards are visited in order and shuffled within, so the window of the n-th sample follows from (seed, n, sizes of the
shards): a run that waits for a shard trains on the same batches as one that finds it complete.

The background process is `python -m redline.data.stream`, with its task as a line on standard input. It exits when that
input closes, that is, with the run that started it. It records each complete shard together with the place in the text
where the next one begins, and continues from there the next time. A complete stream is a prepared folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from redline.cache import explain_write_errors, open_regular, read_text, write_atomically
from redline.data.loader import order_keys, permute
from redline.data.prepare import Piece, count_piece, cut_pieces, description, encode_pieces, training_texts
from redline.data.sources import Reading, ReadStats, nothing_to_train_on, source_documents
from redline.data.splits import REST, TRAIN, VAL, split_documents, without_duplicates
from redline.data.tokenizer import Tokenizer, load_tokenizer
from redline.data.tokens import DEFINITION, ShardWriter, TokenFile, TokenSplit, check_shard, shard_files, with_digest
from redline.errors import UserError

Int64s = npt.NDArray[np.int64]

STATE = "state.json"
# A small first shard lets training begin soon. The largest one bounds how long training may have to wait for the next.
FIRST_SHARD = 8_000_000
LARGEST_SHARD = 32_000_000
# Only documents that begin within so many characters are held out, so that validation is complete before training.
VAL_WITHIN = 32_000_000
_POLL_S = 0.1
# train:N learns from the first so many bytes, because a stream begins before its text has been read.
_TOKENIZER_BYTES = 32 << 20


def stream_starts(
    samples: Int64s, shard_tokens: Sequence[int], *, complete: bool, seq_len: int, seed: int, shuffle: bool
) -> Int64s | None:
    """Return the first token of each sample's window; None if that depends on shards that are not complete yet.

    Windows are cut from all tokens in one row, and each belongs to the shard that completes it. As long as more shards
    may come, only the windows of the first epoch are known.
    """
    window_ends = np.maximum(np.cumsum(shard_tokens, dtype=np.int64) - 1, 0) // seq_len
    windows = int(window_ends[-1]) if len(window_ends) else 0
    samples = np.asarray(samples, dtype=np.int64)
    if not complete and samples.size and int(samples.max()) >= windows:
        return None
    if not windows:
        what = f"the data has {sum(shard_tokens)} tokens, less than one sequence of {seq_len + 1}."
        raise UserError(what, fix="Give more data, or lower data.seq_len.")
    epochs, positions = np.divmod(samples, windows)
    if not shuffle:
        return positions * seq_len
    shards = np.searchsorted(window_ends, positions, side="right")
    for shard in np.unique(shards):
        rows = shards == shard
        begin = int(window_ends[shard - 1]) if shard else 0
        keys = order_keys(seed, epochs[rows], group=int(shard) + 1)
        positions[rows] = begin + permute(positions[rows] - begin, int(window_ends[shard]) - begin, keys)
    return positions * seq_len


# ----------------------------------------------------------------------------------------------------
# Reading a stream while it grows.


@dataclass(frozen=True)
class StreamState:
    """What the background process has completed, as its state file says."""

    description: dict[str, Any]

    @property
    def done(self) -> bool:
        return bool(self.description.get("done"))

    @property
    def ready(self) -> bool:
        """Whether training may begin: validation and one shard are complete."""
        return self.done or bool(self.description.get("val_done") and self.train_shards)

    @property
    def failure(self) -> dict[str, Any] | None:
        return self.description.get("failed")

    @property
    def train_shards(self) -> list[dict[str, Any]]:
        return list(self.description.get("splits", {}).get("train", {}).get("shards", []))


def read_state(folder: Path) -> StreamState:
    """Read the state file; return an empty state if there is none, or none that can be read."""
    try:
        return StreamState(dict(json.loads(read_text(folder / STATE))))
    except (OSError, ValueError):
        return StreamState({})


class TokenStream:
    """A folder of shards that grows, and the process that writes it."""

    def __init__(self, folder: Path, task: dict[str, Any]) -> None:
        sizes = {"first_shard": FIRST_SHARD, "largest_shard": LARGEST_SHARD, "val_within": VAL_WITHIN}
        self.folder, self._task = folder, {**task, **sizes, "folder": str(folder)}
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # several loader threads call `start`

    def start(self) -> None:
        """Start the background process, unless it runs or the stream is complete. It exits when this process does."""
        with self._lock:
            if self._process is not None or read_state(self.folder).done:
                return
            with explain_write_errors(self.folder):  # the background process has no one to show the error to
                self.folder.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "redline.data.stream"]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=subprocess.DEVNULL, start_new_session=True)
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(self._task).encode() + b"\n")
            self._process.stdin.flush()

    def wait(self, is_enough: Callable[[StreamState], bool]) -> StreamState:
        """Wait for a state that is enough, or for the final one. Raise the failure of the background process here."""
        while True:
            alive = self._process is not None and self._process.poll() is None
            state = read_state(self.folder)
            if state.done or is_enough(state):
                return state
            if self._process is None:
                self.start()
            elif not alive:
                raise self._failure(state)
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Kill the background process. What it has completed stays, and it can continue later."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.communicate()
                self._process = None

    def _failure(self, state: StreamState) -> UserError:
        source = str(self._task["source"])
        if state.failure:
            failure = state.failure
            return UserError(str(failure["what"]), where=failure["where"] or source, fix=failure["fix"])
        assert self._process is not None
        what = f"the process that prepares the text was killed (exit code {self._process.returncode})."
        return UserError(what, where=source, fix="Resume the run: the preparation continues where it stopped.")


class StreamSplit(TokenSplit):
    """The training tokens that are complete so far."""

    def __init__(self, stream: TokenStream, vocab_size: int, eot: int, fingerprint: str, tokenizer: str) -> None:
        super().__init__([], vocab_size=vocab_size, eot=eot, utf8_bytes=None, fingerprint=fingerprint)
        self.stream, self._tokenizer = stream, tokenizer
        self._opened: list[TokenFile] = []
        self._lock = threading.Lock()
        self._so_far: TokenSplit = self

    def take(self, state: StreamState) -> None:
        """Map the shards that were completed since the last call."""
        with self._lock:
            if len(state.train_shards) <= len(self._opened):
                return
            new = shard_files(self.stream.folder, self.vocab_size, {"shards": state.train_shards})
            new = new[len(self._opened) :]
            for file in new:
                check_shard(file, self._tokenizer)
            self._opened += new
            pieces = [*self._so_far.pieces, *(file.map() for file in new)]
            self._so_far = TokenSplit(
                pieces, vocab_size=self.vocab_size, eot=self.eot, utf8_bytes=None, fingerprint=self.fingerprint
            )

    @property
    def files(self) -> tuple[TokenFile, ...]:
        return tuple(self._opened)

    def __len__(self) -> int:
        return int(self._so_far.piece_starts[-1])

    # The methods of the class, not of the object: while nothing is complete `_so_far` is this split itself.

    def read(self, start: int, count: int) -> npt.NDArray[np.unsignedinteger]:
        return TokenSplit.read(self._so_far, start, count)

    def windows(self, starts: Int64s, length: int) -> Int64s:
        return TokenSplit.windows(self._so_far, starts, length)


class StreamIndex:
    """The order of samples in a `StreamSplit`. It waits for the shards that the samples lie in."""

    def __init__(self, split: StreamSplit, seq_len: int, seed: int, shuffle: bool = True) -> None:
        self._split, self._seq_len, self._seed, self._shuffle = split, seq_len, seed, shuffle
        self._state = read_state(split.stream.folder)

    def starts(self, samples: Int64s) -> Int64s:
        """Return the first token of each sample's window, once that is known."""
        state = self._state
        if not state.done:
            self._split.stream.start()  # training needs all of the stream
        while (starts := self._starts(samples, state)) is None:
            known = len(state.train_shards)
            state = self._state = self._split.stream.wait(lambda later: len(later.train_shards) > known)  # noqa: B023
        self._split.take(state)
        return starts

    def _starts(self, samples: Int64s, state: StreamState) -> Int64s | None:
        sizes = [int(shard["tokens"]) for shard in state.train_shards]
        return stream_starts(
            samples, sizes, complete=state.done, seq_len=self._seq_len, seed=self._seed, shuffle=self._shuffle
        )


# ----------------------------------------------------------------------------------------------------
# Writing a stream, in the background process.


class StreamWriter:
    """Writes the shards of one stream and keeps its state file up to date."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.task, self.folder, self.reading = task, Path(task["folder"]), Reading(**task["reading"])
        self.stats = ReadStats(task["source"])
        self.tokenizer = self._load_tokenizer()
        before = read_state(self.folder).description
        before = before if before.get("val_done") else {}  # training has not begun: start again from the beginning
        self.val_done = bool(before)
        # The place in the text after the last complete shard: pieces before it, and tokens of the last of these
        # pieces that belong to the next shard.
        self.place: dict[str, int] = before.get("place", {"pieces": 0, "carry": 0})
        splits = before.get("splits", {TRAIN: {"shards": []}, VAL: {"shards": []}})
        self.counts = {
            split: {name: int(entry.get(name, 0)) for name in ("tokens", "bytes", "documents")}
            for split, entry in splits.items()
        }
        self.counts_at_place = dict(self.counts[TRAIN])
        self.writers = {split: self._writer(split, splits[split]) for split in (TRAIN, VAL)}
        self.shards = len(self.writers[TRAIN].files)

    def _load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer; train it if the spec is train:N and no earlier process has."""
        spec, own = str(self.task["tokenizer"]), self.folder / DEFINITION
        if own.is_file():
            tokenizer = load_tokenizer(str(own))
            tokenizer.name = spec
            return tokenizer

        def texts() -> Iterator[str]:
            return training_texts([self.task["source"]], self.reading, max_bytes=_TOKENIZER_BYTES, from_start=True)

        tokenizer = load_tokenizer(spec, texts)
        part = own.with_suffix(".part")
        tokenizer.save(part)
        if part.is_file():  # the bytes tokenizer has no definition
            part.rename(own)
        return tokenizer

    def _writer(self, split: str, entry: dict[str, Any]) -> ShardWriter:
        first, largest = int(self.task["first_shard"]), int(self.task["largest_shard"])
        return ShardWriter(
            self.folder,
            split,
            vocab_size=self.tokenizer.vocab_size,
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            shard_tokens=lambda number: min(largest, first << min(number, 32)),
            files=shard_files(self.folder, self.tokenizer.vocab_size, entry),
        )

    def write(self) -> None:
        """Write everything after `place`. A piece that lies in two shards is encoded again, for its second part."""
        carry, number = self.place["carry"], self.place["pieces"]
        for piece, ids, utf8_bytes in encode_pieces(self._pieces(), self.tokenizer, int(self.task["workers"])):
            ids = np.concatenate([[self.tokenizer.eot], ids]) if piece.begins else ids
            if piece.split == REST and not self.val_done:
                self.writers[VAL].finish()
                self.val_done = True
                self._record()
            split = VAL if piece.split == VAL else TRAIN
            if carry and split == TRAIN:
                self.writers[TRAIN].append(ids[-carry:])
                carry = 0
                continue
            self.writers[split].append(ids)
            count_piece(self.counts[split], piece, len(ids) - piece.begins, utf8_bytes)
            if split == TRAIN:
                number += 1
                self._record_new_shards(number)
        self._finish()

    def _pieces(self) -> Iterator[Piece]:
        """Yield the pieces for validation unless it is complete, and those for training that are not all in shards."""
        documents = source_documents(self.task["source"], self.stats, self.reading.text_key)
        unique = without_duplicates(documents, self.stats, drop=self.reading.dedup)
        split = split_documents(unique, self.reading.val_fraction, val_within=int(self.task["val_within"]))
        written = self.place["pieces"] - (self.place["carry"] > 0)
        val_done, number = self.val_done, 0
        for piece in cut_pieces(split):
            if piece.split == VAL:
                needed = not val_done
            else:
                number += 1
                needed = number > written
            if needed:
                yield piece

    def _record_new_shards(self, pieces: int) -> None:
        writer = self.writers[TRAIN]
        if len(writer.files) > self.shards:
            self.shards = len(writer.files)
            self.place = {"pieces": pieces, "carry": writer.pending}
            self.counts_at_place = dict(self.counts[TRAIN])
            self._record()

    def _record(self, **more: Any) -> None:
        files = {split: writer.files for split, writer in self.writers.items()}
        counts = {TRAIN: self.counts_at_place, VAL: self.counts[VAL]}
        state = description(self.tokenizer, files, counts, self.stats)
        state |= {"val_done": self.val_done, "place": self.place, **more}
        write_atomically(self.folder / STATE, json.dumps(with_digest(state, self.folder), indent=1) + "\n")

    def _finish(self) -> None:
        """Complete the last shards and write meta.json, which makes the folder an ordinary prepared folder."""
        files = {split: writer.finish() for split, writer in self.writers.items()}
        if not files[TRAIN]:
            raise nothing_to_train_on(self.stats)
        self.counts_at_place, self.val_done = self.counts[TRAIN], True
        meta = description(self.tokenizer, files, self.counts, self.stats)
        write_atomically(self.folder / "meta.json", json.dumps(with_digest(meta, self.folder), indent=1) + "\n")
        self._record(done=True)


def write_stream(task: dict[str, Any]) -> int:
    """Write the stream; return the exit code. Failures go into the state file, where the run reads them."""
    folder = Path(task["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w", opener=open_regular) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run may be preparing the same text: wait until it is complete
        if read_state(folder).done:
            return 0
        try:
            StreamWriter(task).write()
        except UserError as error:
            return _record_failure(folder, error.what, error.where, error.fix)
        except OSError as error:
            what, fix = f"the preparation failed: {error}.", "Free some disk space, then resume the run."
            return _record_failure(folder, what, None, fix)
    return 0


def _record_failure(folder: Path, what: str, where: str | None, fix: str | None) -> int:
    state = read_state(folder).description | {"failed": {"what": what, "where": where, "fix": fix}}
    write_atomically(folder / STATE, json.dumps(with_digest(state, folder), indent=1) + "\n")
    return 1


def _exit_with_parent() -> None:
    # os.read, not sys.stdin: a thread that waits inside Python's buffer holds its lock, and the interpreter would hang
    # on that lock at exit.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


def main() -> None:
    task = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    sys.exit(write_stream(task))


if __name__ == "__main__":
    main()
