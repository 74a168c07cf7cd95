"""The teacher's hidden states on disk: each frozen model reads each text once per machine.

The teacher of KD_K is the same frozen model reading the text itself, so its predictions never change. The cache holds
its last hidden states at the K positions that predict an answer's first tokens: 32 KB per example at 4096 × 4 in bf16.
Full logits would be 1 MB; instead the frozen head is applied to the states when they are needed. The name of a cache
folder is a digest of everything that determines the states: model, quantisation, precision, tokenizer, rows, K, anchor.
A file inside repeats them, so that the states of another model are never used by mistake.
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
from redline.jobs.latent_prefix.data import PairData, PairRows
from redline.jobs.latent_prefix.frozen import FrozenModel
from redline.units import format_seconds

_ABOUT = "about.json"
_FILE_ROWS = 512  # rows per file
_FORMAT = 2
_PROGRESS_S = 10.0  # seconds between two progress messages

Int64s = npt.NDArray[np.int64]
Log = Callable[[str], None]


class TeacherStates:
    """Hidden states [rows, K, D] of the rows that the teacher has read so far."""

    def __init__(self, about: dict[str, Any], rows: int, k: int, width: int, dtype: torch.dtype) -> None:
        self.about, self.k, self.width, self.dtype = {"form": _FORMAT, **about}, k, width, dtype
        self.folder = cache_dir() / "teachers" / digest_of(self.about)
        self._file = np.full(rows, -1, dtype=np.int64)  # the file that holds a row; -1: the row has not been read
        self._offset = np.zeros(rows, dtype=np.int64)  # the row's offset in that file
        self._states: list[npt.NDArray[Any]] = []
        self._open()

    @property
    def known(self) -> npt.NDArray[np.bool_]:
        """Which rows have been read."""
        known: npt.NDArray[np.bool_] = self._file >= 0
        return known

    def _open(self) -> None:
        described = self.folder / _ABOUT
        try:
            found = json.loads(read_text(described))
        except (FileNotFoundError, NotADirectoryError):
            return
        except (OSError, ValueError) as error:
            raise self._damaged(described, type(error).__name__) from None
        if found != self.about:
            differing = ", ".join(key for key in self.about if found.get(key) != self.about[key]) or "form"
            raise self._damaged(described, f"it was written with another {differing}")
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
            raise self._damaged(states_file, "wrong shape or row numbers")
        self._file[rows], self._offset[rows] = len(self._states), np.arange(len(rows))
        self._states.append(states)

    def _damaged(self, path: Path, why: str) -> UserError:
        what = f"is not a usable cache of this run's teacher ({why})."
        return UserError(what, where=str(path), fix=f"Delete {self.folder}; the next run writes it again.")

    def states(self, rows: Int64s) -> Tensor:
        """Return the states [B, K, D] of rows that have been read."""
        assert self.known[rows].all(), "the teacher has not read these rows"
        arrays = [self._states[self._file[row]][self._offset[row]] for row in rows.tolist()]
        tensor = torch.from_numpy(np.stack(arrays))
        # numpy has no bfloat16, so these states are stored as int16.
        return tensor.view(torch.bfloat16) if self.dtype == torch.bfloat16 else tensor

    @torch.no_grad()
    def read_missing(
        self,
        model: FrozenModel,
        rows: PairRows,
        answers: list[list[int]],
        wanted: Iterable[int],
        context: int,
        log: Log,
    ) -> None:
        """Let the teacher read those rows of `wanted` that it has not read yet."""
        missing = [row for row in sorted(set(wanted)) if self._file[row] < 0]
        if not missing:
            return
        log(f"{model.spec.title} reads {len(missing):,} texts once, as the teacher; its states are cached on disk")
        started = logged = time.monotonic()
        for first in range(0, len(missing), _FILE_ROWS):
            if first and (now := time.monotonic()) - logged > _PROGRESS_S:
                logged, left = now, (now - started) / first * (len(missing) - first)
                log(f"teacher: {first:,} of {len(missing):,} texts, {format_seconds(left)} left")
            some = missing[first : first + _FILE_ROWS]
            self._write(np.array(some, dtype=np.int64), self._compute(model, rows, answers, some, context))

    def _compute(
        self, model: FrozenModel, rows: PairRows, answers: list[list[int]], some: list[int], context: int
    ) -> Tensor:
        states = torch.zeros(len(some), self.k, self.width, dtype=self.dtype)
        first_tokens = [answers[row][: self.k] for row in some]
        pairs = [rows.pairs[row] for row in some]
        prompts = [text_prompt(model, pair.text, context - self.k, asked=pair.asked) for pair in pairs]
        for i, hidden in model.text_states(prompts, first_tokens):
            states[i, : len(hidden)] = hidden.to("cpu", self.dtype)
        return states

    def _write(self, rows: Int64s, states: Tensor) -> None:
        """Write the states, then the row numbers: a file of states without row numbers, as a crash leaves it, is
        ignored."""
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


def load_teacher(
    model: FrozenModel, pairs: PairData, place: int, samples: int | None, options: Any, dtype: torch.dtype, log: Log
) -> TeacherStates:
    """Return the states of all rows that a run of so many samples will see (None: all rows), reading what is missing.

    `place` is the index of the model among those that the rows have answers for.
    """
    base, tokenizer, train = model.spec.base, model.tokenizer, pairs.train
    assert base is not None
    assert tokenizer is not None
    about = {
        "model": base.fingerprint,
        "quant": [model.spec.quantised, model.spec.double],
        "precision": str(dtype),
        "tokenizer": tokenizer.fingerprint,
        "rows": pairs.rows_fingerprint,
        "k": options.first_tokens,
        "anchor": options.anchor,
    }
    states = TeacherStates(about, len(train), options.first_tokens, model.decoder.shape.d_model, dtype)
    all_rows = samples is None or samples >= len(pairs.index)
    rows = range(len(train)) if all_rows else pairs.index.sequences(np.arange(samples)).tolist()
    states.read_missing(model, train, train.answers[place], rows, base.context, log)
    return states


def text_prompt(model: FrozenModel, text: str, room: int, most: int | None = None, asked: str = "") -> list[int]:
    """Return the tokens of a text (at most its first `most`), of a question apart from it, and of the anchor.

    The text's end is cut to fit `room`.
    """
    tokenizer = model.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.prompt(text, most, asked)
    excess = len(prompt) - room
    if excess <= 0:
        return prompt
    kept = len(tokenizer.question(asked)) + len(tokenizer.anchor)
    return [*prompt[: len(prompt) - kept - excess], *prompt[len(prompt) - kept :]]
