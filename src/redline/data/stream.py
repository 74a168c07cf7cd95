"""Tokens that are still being prepared: a process in the background writes shards, training reads the finished ones.

Shards are visited in order and shuffled within, so which window is the n-th sample follows from (seed, n, sizes of the
shards): a run that waited for a shard and one that found it ready see the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from redline.cache import explain_write_errors, read_text
from redline.data.index import order_keys, permute
from redline.data.shards import TokenFile, check_shard
from redline.data.tokens import TokenSplit, shard_files
from redline.errors import UserError

Int64s = npt.NDArray[np.int64]

STATE = "state.json"
# A small first shard lets training begin soon. The largest bounds how long it may have to wait for one.
FIRST_SHARD = 8_000_000
LARGEST_SHARD = 32_000_000
# Held out are documents that begin within so many characters: validation must be complete before training begins.
VAL_WITHIN = 32_000_000
_LOOK_EVERY_S = 0.1


def stream_starts(
    samples: Int64s, shard_tokens: Sequence[int], *, complete: bool, seq_len: int, seed: int, shuffle: bool
) -> Int64s | None:
    """The first token of each sample's window; None when that depends on shards that are yet to come.

    Windows are those of one row of all tokens; each belongs to the shard that completes it. While there may be more
    shards, only the first epoch's windows are known.
    """
    borders = np.maximum(np.cumsum(shard_tokens, dtype=np.int64) - 1, 0) // seq_len
    windows = int(borders[-1]) if len(borders) else 0
    samples = np.asarray(samples, dtype=np.int64)
    if not complete and samples.size and int(samples.max()) >= windows:
        return None
    if not windows:
        tokens = sum(shard_tokens)
        raise UserError(f"the data hold {tokens} tokens, less than one sequence of {seq_len + 1}.", fix="Give more.")
    epochs, positions = np.divmod(samples, windows)
    if not shuffle:
        return positions * seq_len
    shards = np.searchsorted(borders, positions, side="right")
    for shard in np.unique(shards):
        rows = shards == shard
        begin = int(borders[shard - 1]) if shard else 0
        keys = order_keys(seed, epochs[rows], group=int(shard) + 1)
        positions[rows] = begin + permute(positions[rows] - begin, int(borders[shard]) - begin, keys)
    return positions * seq_len


@dataclass(frozen=True)
class StreamState:
    """What the background process has finished, as its last word says."""

    description: dict[str, Any]

    @property
    def done(self) -> bool:
        return bool(self.description.get("done"))

    @property
    def ready(self) -> bool:
        """Whether training may begin."""
        return self.done or bool(self.description.get("val_done") and self.train_shards)

    @property
    def failure(self) -> dict[str, Any] | None:
        return self.description.get("failed")

    @property
    def train_shards(self) -> list[dict[str, Any]]:
        return list(self.description.get("splits", {}).get("train", {}).get("shards", []))


def read_state(folder: Path) -> StreamState:
    """The last word; nothing when there is none, or none that can be read."""
    try:
        return StreamState(dict(json.loads(read_text(folder / STATE))))
    except (OSError, ValueError):
        return StreamState({})


class TokenStream:
    """A folder of shards that grows, and the process that makes it grow."""

    def __init__(self, folder: Path, job: dict[str, Any]) -> None:
        sizes = {"first_shard": FIRST_SHARD, "largest_shard": LARGEST_SHARD, "val_within": VAL_WITHIN}
        self.folder, self._job = folder, {**job, **sizes, "folder": str(folder)}
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # batches are made by several threads

    def start(self) -> None:
        """Begin, or go on, in the background. It ends when this process does: its standard input closes then."""
        with self._lock:
            if self._process is not None or read_state(self.folder).done:
                return
            with explain_write_errors(self.folder):  # over there nothing could be said about it
                self.folder.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "redline.data.stream_writer"]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=subprocess.DEVNULL, start_new_session=True)
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(self._job).encode() + b"\n")
            self._process.stdin.flush()

    def wait(self, enough: Callable[[StreamState], bool]) -> StreamState:
        """The first state that is enough, or the last one there will be. A failure over there is raised here."""
        while True:
            alive = self._process is not None and self._process.poll() is None
            state = read_state(self.folder)
            if state.done or enough(state):
                return state
            if self._process is None:
                self.start()
            elif not alive:
                raise self._ended(state)
            time.sleep(_LOOK_EVERY_S)

    def close(self) -> None:
        """End the background process; what it finished stays, and it can go on later."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.communicate()
                self._process = None

    def _ended(self, state: StreamState) -> UserError:
        source = str(self._job["source"])
        if state.failure:
            failure = state.failure
            return UserError(str(failure["what"]), where=failure["where"] or source, fix=failure["fix"])
        assert self._process is not None
        what = f"the preparation in the background was ended (exit code {self._process.returncode})."
        return UserError(what, where=source, fix="Resume the run: the preparation goes on where it stopped.")


class StreamSplit(TokenSplit):
    """The training tokens so far."""

    def __init__(self, stream: TokenStream, vocab_size: int, eot: int, fingerprint: str, tokenizer: str) -> None:
        super().__init__([], vocab_size=vocab_size, eot=eot, utf8_bytes=None, fingerprint=fingerprint)
        self.stream, self._tokenizer = stream, tokenizer
        self._opened: list[TokenFile] = []
        self._taking = threading.Lock()
        self._so_far: TokenSplit = self

    def take(self, state: StreamState) -> None:
        """Map the shards that were finished since the last time."""
        with self._taking:
            if len(state.train_shards) <= len(self._opened):
                return
            fresh = shard_files(self.stream.folder, self.vocab_size, {"shards": state.train_shards})
            fresh = fresh[len(self._opened) :]
            for file in fresh:
                check_shard(file, self._tokenizer)
            self._opened += fresh
            pieces = [*self._so_far.pieces, *(file.map() for file in fresh)]
            self._so_far = TokenSplit(
                pieces, vocab_size=self.vocab_size, eot=self.eot, utf8_bytes=None, fingerprint=self.fingerprint
            )

    @property
    def files(self) -> tuple[TokenFile, ...]:
        return tuple(self._opened)

    def __len__(self) -> int:
        return int(self._so_far.borders[-1])

    def read(self, start: int, count: int) -> npt.NDArray[np.unsignedinteger]:
        return TokenSplit.read(self._so_far, start, count)

    def windows(self, starts: Int64s, length: int) -> Int64s:
        return TokenSplit.windows(self._so_far, starts, length)


class StreamIndex:
    """Where samples begin in a `StreamSplit`; waits for the shards they lie in."""

    def __init__(self, split: StreamSplit, seq_len: int, seed: int, shuffle: bool = True) -> None:
        self._split, self._seq_len, self._seed, self._shuffle = split, seq_len, seed, shuffle
        self._state = read_state(split.stream.folder)

    def starts(self, samples: Int64s) -> Int64s:
        state = self._state
        if not state.done:
            self._split.stream.start()  # whoever trains will need all of it
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
