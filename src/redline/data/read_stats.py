"""Statistics of one reading of a source: rows that cannot be used, files that are not text, duplicate documents.

`rows.py`, `sources.py` and `splits.py` fill them; `meta.json` stores them; `omission_messages` describes them.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from redline.errors import UserError

_CHECK_FROM_ROWS = 1000  # a source whose first rows are all unusable is refused after this many
_MAX_SLOTS = 1 << 25
# A reason may quote a row, and a row may come from anyone: each reason is kept short and printable, and few are kept.
_MAX_CHARACTERS, _MAX_REASONS, _OTHER_REASONS = 200, 100, "other reasons"
_EXAMPLES = 5
EMPTY = "empty "  # the prefix of a reason that says that a question or an answer is empty


def printable(text: str) -> str:
    """Return a reason or a piece of advice as it is stored and printed: without lone surrogates, and short."""
    plain = text[: _MAX_CHARACTERS + 1].encode("utf-8", "backslashreplace").decode("utf-8")
    return plain if len(plain) <= _MAX_CHARACTERS else f"{plain[:_MAX_CHARACTERS]}…"


@dataclass
class ReadStats:
    """Counts of one reading of a source, from its beginning."""

    source: str
    total: int | None = None  # bytes of its files on disk, if known
    bytes: float = 0.0  # of the files on disk, read so far
    rows: int = 0
    bad_rows: Counter[str] = field(default_factory=Counter)  # by reason
    first_bad_row: str | None = None
    examples: list[str] = field(default_factory=list)  # the first few bad rows: place and reason
    fix: str = ""  # for the first bad row
    binary_files: int = 0
    first_binary_file: str | None = None
    not_utf8_files: int = 0  # among the binary files: text in another encoding
    first_not_utf8_file: str | None = None
    duplicates: int = 0

    def read(self, count: float) -> None:
        """Add `count` bytes to those read so far."""
        self.bytes += count

    def bad_row(self, place: str, reason: str, fix: str) -> None:
        """Count a row that cannot be used; raise UserError once many rows were read and none of them is usable."""
        reason = printable(reason)
        if not self.bad_rows:
            self.first_bad_row, self.fix = f"{place}: {reason}", printable(fix)
        if len(self.examples) < _EXAMPLES:
            self.examples.append(f"{place}: {reason}")
        known = reason in self.bad_rows or len(self.bad_rows) < _MAX_REASONS
        self.bad_rows[reason if known else _OTHER_REASONS] += 1
        if self.rows == self.bad_rows.total() >= _CHECK_FROM_ROWS:
            self.refuse_mostly_bad()

    def binary_file(self, place: str, reason: str) -> None:
        """Count a file that is not text."""
        self.binary_files += 1
        self.first_binary_file = self.first_binary_file or f"{place}: {reason}"

    def not_utf8_file(self, place: str) -> None:
        """Count a text file in another encoding, separately from binary ones: leaving it out is probably a mistake."""
        self.binary_files += 1
        self.not_utf8_files += 1
        self.first_not_utf8_file = self.first_not_utf8_file or place

    @property
    def empty_rows(self) -> int:
        """Rows whose question or answer is empty."""
        return sum(count for reason, count in self.bad_rows.items() if reason.startswith(EMPTY))

    def refuse_mostly_not_utf8(self, files: int) -> None:
        """Raise UserError if more than half of the files are text in another encoding."""
        count = self.not_utf8_files
        if 2 * count > files:
            what = f"{count:,} of {files:,} files are not UTF-8; the first is {self.first_not_utf8_file}."
            raise UserError(what, where=self.source, fix="Convert them, for example with `iconv -t UTF-8`.")

    def refuse_mostly_bad(self) -> None:
        """Raise UserError if more than half of the rows cannot be used: the format or the key is probably wrong."""
        bad = self.bad_rows.total()
        if 2 * bad > self.rows:
            what = f"{bad:,} of {self.rows:,} rows cannot be used; the first is {self.first_bad_row}."
            raise UserError(what, where=self.source, fix=self.fix)

    def counts(self) -> dict[str, Any]:
        """Return the counts for meta.json and the summary."""
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


def omission_messages(counts: Any) -> tuple[str, ...]:
    """Describe which rows and files were left out, one sentence for each kind.

    `counts` comes from a meta.json, which anyone may have written: every value is checked before it is used.
    """
    if not isinstance(counts, dict):
        return ()
    bad, rows, binary = (counts.get(key) for key in ("bad_rows", "rows", "binary_files"))
    messages = []
    if isinstance(bad, int) and isinstance(rows, int) and bad > 0:
        first = printable(str(counts.get("first_bad_row")))
        messages.append(f"{bad:,} of {rows:,} rows are left out; the first is {first}")
    not_utf8 = counts.get("not_utf8_files")
    not_utf8 = not_utf8 if isinstance(not_utf8, int) and not_utf8 > 0 else 0
    for number, why, place in (
        (not_utf8, "not UTF-8", counts.get("first_not_utf8_file")),
        (binary - not_utf8 if isinstance(binary, int) else 0, "not text", counts.get("first_binary_file")),
    ):
        if number > 0:
            are = "files are" if number > 1 else "file is"
            messages.append(f"{number:,} {are} left out ({why}); the first is {printable(str(place))}")
    return tuple(messages)


class DigestSet:
    """A set of 8-byte digests in at most 256 MiB: enough for 16.7 million documents; later ones are not remembered.

    Open addressing in one array, because a Python set takes eight times the memory.
    """

    def __init__(self, max_slots: int = _MAX_SLOTS) -> None:
        self._max_slots = max_slots
        self._slots = array("Q", bytes(8 << 10))
        self._used = 0

    def add(self, digest: bytes) -> bool:
        """Add the digest; return whether the set already had it."""
        value = int.from_bytes(digest, "little") or 1  # 0 marks an empty slot
        slot = self._slot_of(value)
        if self._slots[slot] == value:
            return True
        if 2 * (self._used + 1) > len(self._slots):  # at most half full, so that probing stays short
            if len(self._slots) >= self._max_slots:
                return False
            self._grow()
            slot = self._slot_of(value)
        self._slots[slot] = value
        self._used += 1
        return False

    def _slot_of(self, value: int) -> int:
        """Return the slot that holds the value, or the empty one where it belongs."""
        slots, mask = self._slots, len(self._slots) - 1
        slot = value & mask
        while slots[slot] and slots[slot] != value:
            slot = (slot + 1) & mask
        return slot

    def _grow(self) -> None:
        old, self._slots = self._slots, array("Q", bytes(16 * len(self._slots)))
        for value in filter(None, old):
            self._slots[self._slot_of(value)] = value


def nothing_to_train_on(stats: ReadStats) -> UserError:
    """Return the error for a source of which nothing is left for training."""
    fix = "Check that it holds text, give more of it, or hold less out (data.val_fraction)."
    return UserError("no text is left for training.", where=stats.source, fix=fix)


# ----------------------------------------------------------------------------------------------------
# Progress of a preparation, for the progress bar.


class Progress(NamedTuple):
    stage: str  # "training the tokenizer", "preparing NAME", …
    done: int  # bytes of the source's files, read so far
    total: int | None  # of all of them; None when unknown
    tokens: int  # written so far


ProgressCallback = Callable[[Progress], None]
