"""What is counted while text is read: rows that cannot be used, files that are no text, documents met twice."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from redline.errors import UserError

_NO_GOOD_ROW_UNTIL = 1000
_MOST_SLOTS = 1 << 25
# Reasons may quote rows, and rows may come from anyone: what is kept of them is short, printable and not too many.
_LONGEST, _MOST_REASONS, _OTHER = 200, 100, "other reasons"


def quoted(text: str) -> str:
    """A reason or a piece of advice as it may be kept and printed."""
    plain = text[: _LONGEST + 1].encode("utf-8", "backslashreplace").decode("utf-8")
    return plain if len(plain) <= _LONGEST else f"{plain[:_LONGEST]}…"


@dataclass
class Tally:
    """Counts of one reading of a source, from its beginning."""

    source: str
    total: int | None = None  # bytes of its files on disk, where that is known
    bytes: float = 0.0  # of the files on disk, read so far
    rows: int = 0
    bad_rows: Counter[str] = field(default_factory=Counter)  # by reason
    first_bad_row: str | None = None
    fix: str = ""  # for the first bad row
    binary_files: int = 0
    first_binary_file: str | None = None
    not_utf8_files: int = 0  # among those: text, in another encoding
    first_not_utf8_file: str | None = None
    duplicates: int = 0

    def read(self, count: float) -> None:
        self.bytes += count

    def bad_row(self, place: str, reason: str, fix: str) -> None:
        reason = quoted(reason)
        if not self.bad_rows:
            self.first_bad_row, self.fix = f"{place}: {reason}", quoted(fix)
        self.bad_rows[reason if reason in self.bad_rows or len(self.bad_rows) < _MOST_REASONS else _OTHER] += 1
        if self.rows == self.bad_rows.total() >= _NO_GOOD_ROW_UNTIL:
            self.refuse_mostly_bad()

    def binary_file(self, place: str, reason: str) -> None:
        self.binary_files += 1
        self.first_binary_file = self.first_binary_file or f"{place}: {reason}"

    def not_utf8_file(self, place: str) -> None:
        """Text all the same, which nobody means to lose."""
        self.binary_files += 1
        self.not_utf8_files += 1
        self.first_not_utf8_file = self.first_not_utf8_file or place

    def refuse_mostly_not_utf8(self, files: int) -> None:
        odd = self.not_utf8_files
        if 2 * odd > files:
            what = f"{odd:,} of {files:,} files are not UTF-8; the first is {self.first_not_utf8_file}."
            raise UserError(what, where=self.source, fix="Convert them, e.g. with `iconv -t UTF-8`.")

    def refuse_mostly_bad(self) -> None:
        """More than half of the rows unusable: something is wrong that no one should train on."""
        bad = self.bad_rows.total()
        if 2 * bad > self.rows:
            what = f"{bad:,} of {self.rows:,} rows cannot be used; the first is {self.first_bad_row}."
            raise UserError(what, where=self.source, fix=self.fix)

    def counts(self) -> dict[str, Any]:
        """For meta.json and the summary."""
        return {
            "rows": self.rows,
            "bad_rows": self.bad_rows.total(),
            "bad_rows_by_reason": dict(sorted(self.bad_rows.items())),
            "first_bad_row": self.first_bad_row,
            "binary_files": self.binary_files,
            "first_binary_file": self.first_binary_file,
            "not_utf8_files": self.not_utf8_files,
            "first_not_utf8_file": self.first_not_utf8_file,
            "duplicates": self.duplicates,
        }


def left_out(counts: Any) -> tuple[str, ...]:
    """What `counts` say is not in the data, in sentences; they are read from a file that anyone may have written."""
    if not isinstance(counts, dict):
        return ()
    bad, rows, binary = (counts.get(key) for key in ("bad_rows", "rows", "binary_files"))
    told = []
    if isinstance(bad, int) and isinstance(rows, int) and bad > 0:
        told.append(f"{bad:,} of {rows:,} rows are left out; the first is {quoted(str(counts.get('first_bad_row')))}")
    odd = counts.get("not_utf8_files")
    odd = odd if isinstance(odd, int) and odd > 0 else 0
    for number, why, first in (
        (odd, "not UTF-8", counts.get("first_not_utf8_file")),
        (binary - odd if isinstance(binary, int) else 0, "no text", counts.get("first_binary_file")),
    ):
        if number > 0:
            are = "files are" if number > 1 else "file is"
            told.append(f"{number:,} {are} left out, {why}; the first is {quoted(str(first))}")
    return tuple(told)


class Seen:
    """A set of 8-byte digests in at most 256 MiB: enough for 16.7 million documents; later ones are not remembered.

    Open addressing in one array, because a Python set takes eight times the memory.
    """

    def __init__(self, most_slots: int = _MOST_SLOTS) -> None:
        self._most = most_slots
        self._slots = array("Q", bytes(8 << 10))
        self._used = 0

    def add(self, digest: bytes) -> bool:
        """Whether the digest was there already."""
        value = int.from_bytes(digest, "little") or 1  # 0 marks an empty slot
        place = self._place(value)
        if self._slots[place] == value:
            return True
        if 2 * (self._used + 1) > len(self._slots):
            if len(self._slots) >= self._most:
                return False
            self._grow()
            place = self._place(value)
        self._slots[place] = value
        self._used += 1
        return False

    def _place(self, value: int) -> int:
        """Where the value is, or would go."""
        slots, mask = self._slots, len(self._slots) - 1
        place = value & mask
        while slots[place] and slots[place] != value:
            place = (place + 1) & mask
        return place

    def _grow(self) -> None:
        old, self._slots = self._slots, array("Q", bytes(16 * len(self._slots)))
        for value in filter(None, old):
            self._slots[self._place(value)] = value


def nothing_to_train_on(tally: Tally) -> UserError:
    fix = "Check that it holds text; or give more, or hold less out (data.val_fraction)."
    return UserError("no text is left for training.", where=tally.source, fix=fix)


# ----------------------------------------------------------------------------------------------------
# What a preparation tells of itself while it runs.


class Progress(NamedTuple):
    stage: str  # "training the tokenizer", "preparing NAME", …
    done: int  # bytes of the source's files, read so far
    total: int | None  # of all of them; None when unknown
    tokens: int  # written so far


ProgressCallback = Callable[[Progress], None]
