"""The samples of one source as flat arrays on disk: made once, mapped into memory afterwards.

A folder of the cache is named after everything that its samples depend on. It appears whole or not at all, is checked
against its digests when it is opened, and is made again if they do not agree.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from redline.cache import atomic_dir, cache_dir, check_regular, discard_dir, read_text, regular, writing
from redline.data.chat import EMPTY, Conversation, RowTally, read_conversations
from redline.data.origin import origin_of
from redline.data.progress import Progress, ProgressCallback
from redline.data.sources import source_bytes
from redline.data.template import KEY, ChatTokenizer, Coded, Rendered, TemplateRefusalError
from redline.data.tokens import digest_of

# How rows become samples. Whoever changes that raises the number, so that old folders are not taken.
SCHEMA = "redline-answers-1"
_AT_ONCE = 512  # conversations
_FIX = f"Look at the row, or give another template ({KEY})."
_DTYPES = {
    "tokens": np.int32,
    "learnt": np.bool_,
    "offsets": np.int64,
    "keys": np.uint64,
    "rows": np.int64,
    "first": np.int32,
    "count": np.int32,
}


@dataclass(frozen=True)
class AnswerStore:
    """Sample i has tokens[offsets[i] : offsets[i + 1]]. A row gives one sample, or one for each of its answers."""

    tokens: npt.NDArray[np.int32]
    learnt: npt.NDArray[np.bool_]
    offsets: npt.NDArray[np.int64]
    keys: npt.NDArray[np.uint64]  # stand for what the row says: equal for equal rows
    rows: npt.NDArray[np.int64]  # which usable row of the source it is from
    first: npt.NDArray[np.int32]  # the first token that is learnt
    count: npt.NDArray[np.int32]  # of tokens that are learnt
    counts: dict[str, Any]  # what became of the rows
    fingerprint: str

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.offsets)


def open_store(
    source: str, tokenizer: ChatTokenizer, learn: str, progress: ProgressCallback | None = None
) -> AnswerStore:
    """The source's samples; from the cache when they are there."""
    folder = cache_dir() / "answers" / digest_of([SCHEMA, origin_of(source), tokenizer.identity, learn])
    if folder.exists():
        try:
            return _read(folder)
        except (OSError, ValueError, KeyError, TypeError):
            discard_dir(folder)
    with writing(folder):
        try:
            with atomic_dir(folder) as temporary:
                _write(temporary, source, tokenizer, learn, progress)
        except OSError:
            if not folder.exists():  # else another process was faster, with the same content
                raise
        return _read(folder)


def _read(folder: Path) -> AnswerStore:
    meta = json.loads(read_text(folder / "meta.json"))
    body = {key: value for key, value in meta.items() if key != "digest"}
    described = (
        meta["digest"] == digest_of(body) if "digest" in meta else meta.keys() <= {"schema", "digests", "counts"}
    )
    if not described or meta["schema"] != SCHEMA or meta["digests"] != _digests(folder):
        raise ValueError("damaged")
    arrays: dict[str, Any] = {name: np.load(check_regular(folder / f"{name}.npy"), mmap_mode="r") for name in _DTYPES}
    return AnswerStore(**arrays, counts=meta["counts"], fingerprint=digest_of(meta["digests"]))


def _digests(folder: Path) -> dict[str, str]:
    found = {}
    for name in _DTYPES:
        with open(folder / f"{name}.npy", "rb", opener=regular) as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _write(folder: Path, source: str, tokenizer: ChatTokenizer, learn: str, progress: ProgressCallback | None) -> None:
    tally = RowTally(source, source_bytes(source))
    files = {name: _Growing(folder / f"{name}.npy", np.dtype(kind)) for name, kind in _DTYPES.items()}
    try:
        files["offsets"].append(np.zeros(1))
        for samples in _coded(source, tokenizer, learn, tally):
            _append(files, samples)
            if progress:
                progress(Progress(f"preparing {source}", int(tally.bytes), tally.total, files["tokens"].length))
    finally:
        for file in files.values():
            file.close()
    tally.refuse_mostly_bad()
    counts = {**tally.counts(), "empty": tally.empty, "examples": tally.examples}
    meta = json.loads(json.dumps({"schema": SCHEMA, "digests": _digests(folder), "counts": counts}))
    (folder / "meta.json").write_text(json.dumps({**meta, "digest": digest_of(meta)}), encoding="utf-8")


Sample = tuple[int, int, Coded]  # number and key of its row


def _coded(source: str, tokenizer: ChatTokenizer, learn: str, tally: RowTally) -> Iterator[list[Sample]]:
    tokenizer.begin_source()
    numbered = enumerate(read_conversations(source, tally))
    while some := list(itertools.islice(numbered, _AT_ONCE)):
        texts: list[Rendered] = []
        origins: list[tuple[int, Conversation]] = []
        for number, conversation in some:
            try:
                rendered = tokenizer.render(conversation, learn)
            except TemplateRefusalError as reason:
                tally.bad_row(conversation.place, f"the chat template ({tokenizer.template_name}): {reason}", _FIX)
                continue
            texts += rendered
            origins += [(number, conversation)] * len(rendered)
        found = []
        for (number, conversation), coded in zip(origins, tokenizer.code(texts, learn), strict=True):
            if coded.learnt.any():
                found.append((number, conversation.key(), coded))
            else:
                tally.bad_row(conversation.place, f"{EMPTY}answer once it is tokenised", _FIX)
        if found:
            yield found


def _append(files: dict[str, _Growing], samples: list[Sample]) -> None:
    coded = [sample[2] for sample in samples]
    before = files["tokens"].length
    files["tokens"].append(np.concatenate([one.tokens for one in coded]))
    files["learnt"].append(np.concatenate([one.learnt for one in coded]))
    files["offsets"].append(before + np.cumsum([len(one.tokens) for one in coded]))
    files["keys"].append(np.array([key for _, key, _ in samples], dtype=np.uint64))
    files["rows"].append(np.array([number for number, _, _ in samples]))
    files["first"].append(np.array([one.learnt.argmax() for one in coded]))
    files["count"].append(np.array([one.learnt.sum() for one in coded]))


class _Growing:
    """A .npy file of one dimension that is written piece by piece; numpy leaves room in its header for the length."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.dtype, self.length = dtype, 0
        self._file: BinaryIO = open(path, "wb")  # noqa: SIM115, closed by close()
        self._header()
        self._begin = self._file.tell()

    def append(self, values: npt.NDArray[Any]) -> None:
        self._file.write(np.ascontiguousarray(values, dtype=self.dtype).tobytes())
        self.length += len(values)

    def close(self) -> None:
        self._file.seek(0)
        self._header()
        assert self._file.tell() == self._begin
        self._file.close()

    def _header(self) -> None:
        description = np.lib.format.dtype_to_descr(self.dtype)
        header = {"descr": description, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, header)
