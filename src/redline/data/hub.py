"""Datasets of a hub by their id, row by row as they arrive, through the optional `datasets` package."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from redline.data.origin import DatasetId
from redline.data.rows import usable_text
from redline.data.tally import Tally
from redline.data.text import Document
from redline.errors import UserError, install_hint

_OFFLINE = ("OfflineModeIsEnabled", "ConnectionError", "ConnectTimeout", "ReadTimeout", "LocalEntryNotFoundError")
_UNKNOWN = ("DatasetNotFoundError", "RepositoryNotFoundError", "RevisionNotFoundError")


def hub_documents(source: str, dataset: DatasetId, text_key: str, tally: Tally) -> Iterator[Document]:
    rows = open_dataset(source, dataset)
    while True:
        try:
            row = next(rows, None)
        except Exception as error:  # the package, the network and each file format raise their own kinds
            raise dataset_error(source, dataset, error) from None
        if row is None:
            return
        if not tally.rows and text_key not in row:
            what = f"there is no column {text_key!r}; the columns are {', '.join(row)}."
            raise UserError(what, where=source, fix="Name the one that holds the text with data.text_key (--text-key).")
        tally.rows += 1
        place = f"{source}:{tally.rows}"
        text = usable_text(row, text_key, place, tally)
        if text is not None:
            yield Document(place, text)


def open_dataset(source: str, dataset: DatasetId) -> Iterator[dict[str, Any]]:
    try:
        import datasets
    except ImportError:
        what = "is no file or folder here, and reading it as a dataset id needs the datasets package."
        raise UserError(what, where=source, fix=f"Check the path, or install it: {install_hint('data')}.") from None
    try:
        opened = datasets.load_dataset(dataset.name, dataset.config, split=dataset.split, streaming=True)
        return iter(opened)
    except Exception as error:
        raise dataset_error(source, dataset, error) from None


def dataset_error(source: str, dataset: DatasetId, error: Exception) -> UserError:
    """What the package's error means to the one who typed the id."""
    names = {kind.__name__ for one in _chain(error) for kind in type(one).__mro__}
    text = " ".join(str(one) for one in _chain(error))
    if "GatedRepoError" in names or "gated" in text:
        fix = "Accept its terms on its page, then log in: `hf auth login`, or set HF_TOKEN."
        return UserError("this dataset is gated: its owner wants to know who reads it.", where=source, fix=fix)
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") or names & {*_OFFLINE}:
        fix = "Go online (and unset HF_HUB_OFFLINE), or give a path to files on this machine."
        return UserError("is no file or folder here, and the hub cannot be reached for it.", where=source, fix=fix)
    if names & {*_UNKNOWN}:
        fix = "Check the spelling (owner/name); a private one needs HF_TOKEN."
        return UserError("is no file or folder here, and no dataset of that name is on the hub.", where=source, fix=fix)
    first_line = next(iter(str(error).splitlines()), "") or type(error).__name__
    fix = "An id is written owner/name:config@split."
    return UserError(f"the dataset {dataset.name} cannot be read: {first_line.rstrip('.')}.", where=source, fix=fix)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what caused it."""
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__ or one.__context__
