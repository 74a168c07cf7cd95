"""The teacher's states on disk: each frozen model reads each text once, and never again.

Kept are the last hidden states at the K places where an answer's first tokens are predicted; the frozen head makes the
logits of them when they are needed. A folder is named by everything that decides them (model, quantisation, precision,
tokenizer, rows, K, anchor), and says so inside, so that states of another model are never taken for these.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from redline.cache import (
    cache_dir,
    check_regular,
    explain_write_errors,
    read_text,
    sync,
    temporary_sibling,
    write_atomically,
)
from redline.data.tokens import digest_of
from redline.errors import UserError
from redline.jobs.latent_prefix.data import PairData, Rows
from redline.jobs.latent_prefix.frozen import Frozen
from redline.units import format_seconds

_ABOUT = "about.json"
_AT_ONCE = 512  # rows in one file
_FORM = 2
_TELL_S = 10.0  # between two words on how far it is

Int64s = npt.NDArray[np.int64]
Tell = Callable[[str], None]


class TeacherStates:
    """[rows, K, D], of those rows that have been asked for."""

    def __init__(self, about: dict[str, Any], rows: int, k: int, width: int, dtype: torch.dtype) -> None:
        self.about, self.k, self.width, self.dtype = {"form": _FORM, **about}, k, width, dtype
        self.folder = cache_dir() / "teachers" / digest_of(self.about)
        self._file = np.full(rows, -1, dtype=np.int64)  # which file holds a row, and where in it
        self._place = np.zeros(rows, dtype=np.int64)
        self._states: list[npt.NDArray[Any]] = []
        self._open()

    @property
    def known(self) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = self._file >= 0
        return found

    def _open(self) -> None:
        described = self.folder / _ABOUT
        try:
            there = json.loads(read_text(described))
        except (FileNotFoundError, NotADirectoryError):
            return
        except (OSError, ValueError) as error:
            raise self._damaged(described, type(error).__name__) from None
        if there != self.about:
            differing = ", ".join(key for key in self.about if there.get(key) != self.about[key]) or "its form"
            raise self._damaged(described, f"it is of another {differing}")
        for path in sorted(self.folder.glob("*.rows.npy")):
            self._add(path)

    def _add(self, rows_file: Path) -> None:
        states_file = rows_file.with_name(rows_file.name.replace(".rows.", ".states."))
        try:
            rows, states = np.load(check_regular(rows_file)), np.load(check_regular(states_file), mmap_mode="r")
        except (OSError, ValueError) as error:
            raise self._damaged(states_file, type(error).__name__) from None
        wanted = (len(rows), self.k, self.width)
        if states.shape != wanted or (len(rows) and not 0 <= rows.min() <= rows.max() < len(self._file)):
            raise self._damaged(states_file, "another size than it should have")
        self._file[rows], self._place[rows] = len(self._states), np.arange(len(rows))
        self._states.append(states)

    def _damaged(self, path: Path, why: str) -> UserError:
        what = f"is not what this run's teacher wrote ({why})."
        return UserError(what, where=str(path), fix=f"Delete {self.folder}: it is made again.")

    def take(self, rows: Int64s) -> Tensor:
        """[B, K, D], of rows that are known."""
        assert self.known[rows].all(), "the teacher has not read these"
        found = np.stack([self._states[self._file[row]][self._place[row]] for row in rows.tolist()])
        tensor = torch.from_numpy(found)
        return tensor.view(torch.bfloat16) if self.dtype == torch.bfloat16 else tensor

    @torch.no_grad()
    def make(
        self, model: Frozen, rows: Rows, answers: list[list[int]], wanted: Iterable[int], context: int, tell: Tell
    ) -> None:
        """Reads what is not known yet of `wanted`."""
        missing = [row for row in sorted(set(wanted)) if self._file[row] < 0]
        if not missing:
            return
        tell(f"{model.spec.title} reads {len(missing):,} texts, once: what it says of them is learnt from")
        begun = told = time.monotonic()
        for first in range(0, len(missing), _AT_ONCE):
            if first and (now := time.monotonic()) - told > _TELL_S:
                told, left = now, (now - begun) / first * (len(missing) - first)
                tell(f"{first:,} of {len(missing):,} texts are read, {format_seconds(left)} to go")
            some = missing[first : first + _AT_ONCE]
            self._write(np.array(some, dtype=np.int64), self._read(model, rows, answers, some, context))

    def _read(self, model: Frozen, rows: Rows, answers: list[list[int]], some: list[int], context: int) -> Tensor:
        found = torch.zeros(len(some), self.k, self.width, dtype=self.dtype)
        said = [answers[row][: self.k] for row in some]
        asked = [text_prompt(model, rows.pairs[row].text, context - self.k) for row in some]
        for place, hidden in model.text_states(asked, said):
            found[place, : len(hidden)] = hidden.to("cpu", self.dtype)
        return found

    def _write(self, rows: Int64s, states: Tensor) -> None:
        """The rows' file last: what has none does not exist."""
        with explain_write_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / _ABOUT).exists():
            write_atomically(self.folder / _ABOUT, json.dumps(self.about, indent=1))
        name = f"{int(rows[0]):09d}-{digest_of(rows.tolist())[:12]}"
        raw = states.contiguous()
        arrays = {
            f"{name}.states.npy": (raw.view(torch.int16) if raw.dtype == torch.bfloat16 else raw).numpy(),
            f"{name}.rows.npy": rows,
        }
        for file, array in arrays.items():
            temporary = temporary_sibling(self.folder / file)
            with open(temporary, "wb") as out:
                np.save(out, array, allow_pickle=False)
            sync(temporary)
            temporary.replace(self.folder / file)
        self._add(self.folder / f"{name}.rows.npy")


def read_all(
    model: Frozen, pairs: PairData, place: int, seen: int | None, options: Any, dtype: torch.dtype, tell: Tell
) -> TeacherStates:
    """What a run of so many samples will see of the data (all of them if not given), read by one of its models.

    `place` is the model's, among those that the rows have answers for.
    """
    base, reader, train = model.spec.base, model.reader, pairs.train
    assert base is not None
    assert reader is not None
    about = {
        "model": base.fingerprint,
        "quant": [model.spec.quantised, model.spec.double],
        "precision": str(dtype),
        "tokenizer": reader.fingerprint,
        "rows": pairs.rows_fingerprint,
        "k": options.first_tokens,
        "anchor": options.anchor,
    }
    states = TeacherStates(about, len(train), options.first_tokens, model.decoder.shape.d_model, dtype)
    every = seen is None or seen >= len(pairs.index)
    rows = range(len(train)) if every else pairs.index.sequences(np.arange(seen)).tolist()
    states.make(model, train, train.answers[place], rows, base.context, tell)
    return states


def text_prompt(model: Frozen, text: str, room: int, most: int | None = None) -> list[int]:
    """The tokens of a text and the anchor; a text that is too long for the model loses its end."""
    assert model.reader is not None
    whole = model.reader.prompt(text, most)
    over = len(whole) - room
    if over <= 0:
        return whole
    anchor = len(model.reader.anchor)
    return [*whole[: len(whole) - anchor - over], *whole[len(whole) - anchor :]]
