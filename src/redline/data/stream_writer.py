"""The process that prepares a stream: `python -m redline.data.stream_writer`, with its task as a line on stdin.

It ends when that input closes, that is, with the run that started it. Each finished shard is recorded together with
the place in the text where the next one begins, and from there it goes on the next time.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from redline.cache import open_regular, write_atomically
from redline.data.encode import encode_pieces
from redline.data.origin import Reading
from redline.data.prepare import count_piece, description, training_texts
from redline.data.read_stats import Tally, nothing_to_train_on
from redline.data.shards import ShardWriter
from redline.data.sources import source_documents
from redline.data.splits import REST, TRAIN, VAL, Piece, cut_pieces, split_documents, without_duplicates
from redline.data.stream import STATE, read_state
from redline.data.tokenizer import Tokenizer, load_tokenizer
from redline.data.tokens import sealed, shard_files
from redline.errors import UserError

# A stream begins before its text has been read: train:N learns from its beginning.
_TOKENIZER_BYTES = 32 << 20
_DEFINITION = "tokenizer.json"


class StreamWriter:
    """Writes the shards of one stream and keeps its state file up to date."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job, self.folder, self.reading = job, Path(job["folder"]), Reading(**job["reading"])
        self.tally = Tally(job["source"])
        self.tokenizer = self._tokenizer()
        before = read_state(self.folder).description
        before = before if before.get("val_done") else {}  # until then nobody has read anything: begin anew
        self.val_done = bool(before)
        self.place: dict[str, int] = before.get("place", {"pieces": 0, "carry": 0})  # after the last finished shard
        splits = before.get("splits", {TRAIN: {"shards": []}, VAL: {"shards": []}})
        self.counts = {
            split: {name: int(entry.get(name, 0)) for name in ("tokens", "bytes", "documents")}
            for split, entry in splits.items()
        }
        self.recorded = dict(self.counts[TRAIN])  # as they were at `place`
        self.writers = {split: self._writer(split, splits[split]) for split in (TRAIN, VAL)}
        self.shards = len(self.writers[TRAIN].files)

    def _tokenizer(self) -> Tokenizer:
        spec, own = str(self.job["tokenizer"]), self.folder / _DEFINITION
        if own.is_file():
            tokenizer = load_tokenizer(str(own))
            tokenizer.name = spec
            return tokenizer
        tokenizer = load_tokenizer(
            spec, lambda: training_texts([self.job["source"]], self.reading, most=_TOKENIZER_BYTES, beginning=True)
        )
        tokenizer.save(own.with_suffix(".part"))
        if own.with_suffix(".part").is_file():  # bytes have no definition
            own.with_suffix(".part").rename(own)
        return tokenizer

    def _writer(self, split: str, entry: dict[str, Any]) -> ShardWriter:
        first, largest = int(self.job["first_shard"]), int(self.job["largest_shard"])
        return ShardWriter(
            self.folder,
            split,
            vocab_size=self.tokenizer.vocab_size,
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            shard_tokens=lambda number: min(largest, first << min(number, 32)),
            files=shard_files(self.folder, self.tokenizer.vocab_size, entry),
        )

    def write(self) -> None:
        """Everything from `place` on. A piece across a shard's border is encoded again, for what it left over."""
        carry, number = self.place["carry"], self.place["pieces"]
        for piece, ids, utf8_bytes in encode_pieces(self._pieces(), self.tokenizer, int(self.job["workers"])):
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
        """Validation's if it is not complete, and those for training that no finished shard holds whole."""
        documents = source_documents(self.job["source"], self.tally, self.reading.text_key)
        unique = without_duplicates(documents, self.tally, drop=self.reading.dedup)
        split = split_documents(unique, self.reading.val_fraction, val_within=int(self.job["val_within"]))
        done = self.place["pieces"] - (self.place["carry"] > 0)
        val_done, met = self.val_done, 0
        for piece in cut_pieces(split):
            if piece.split == VAL:
                wanted = not val_done
            else:
                met += 1
                wanted = met > done
            if wanted:
                yield piece

    def _record_new_shards(self, pieces: int) -> None:
        writer = self.writers[TRAIN]
        if len(writer.files) > self.shards:
            self.shards = len(writer.files)
            self.place = {"pieces": pieces, "carry": writer.pending}
            self.recorded = dict(self.counts[TRAIN])
            self._record()

    def _record(self, **more: Any) -> None:
        files = {split: writer.files for split, writer in self.writers.items()}
        counts = {TRAIN: self.recorded, VAL: self.counts[VAL]}
        state = description(self.tokenizer, files, counts, self.tally)
        state |= {"val_done": self.val_done, "place": self.place, **more}
        write_atomically(self.folder / STATE, json.dumps(sealed(state, self.folder), indent=1) + "\n")

    def _finish(self) -> None:
        """From now on the folder is one like any other that was prepared."""
        files = {split: writer.finish() for split, writer in self.writers.items()}
        if not files[TRAIN]:
            raise nothing_to_train_on(self.tally)
        self.recorded, self.val_done = self.counts[TRAIN], True
        meta = description(self.tokenizer, files, self.counts, self.tally)
        write_atomically(self.folder / "meta.json", json.dumps(sealed(meta, self.folder), indent=1) + "\n")
        self._record(done=True)


def run(job: dict[str, Any]) -> int:
    folder = Path(job["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w", opener=open_regular) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run may be preparing the same: then wait, and find it done
        if read_state(folder).done:
            return 0
        try:
            StreamWriter(job).write()
        except UserError as error:
            return _fail(folder, error.what, error.where, error.fix)
        except OSError as error:
            return _fail(
                folder, f"the preparation failed: {error}.", None, "Free some disk space, then resume the run."
            )
    return 0


def _fail(folder: Path, what: str, where: str | None, fix: str | None) -> int:
    state = read_state(folder).description | {"failed": {"what": what, "where": where, "fix": fix}}
    write_atomically(folder / STATE, json.dumps(sealed(state, folder), indent=1) + "\n")
    return 1


def _leave_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):  # past Python's buffer, whose lock would be in the way at the end
        pass
    os._exit(1)


def main() -> None:
    job = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    sys.exit(run(job))


if __name__ == "__main__":
    main()
