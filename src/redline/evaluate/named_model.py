"""Open the model that a name on the command line stands for: a run, a folder with a model or an adapter, or a hub id.

Nothing here imports torch before the name is resolved, so that a mistyped name is reported at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.errors import UsageError
from redline.hub import parse_address
from redline.runs.summary import is_sweep, resolve_run
from redline.vocabulary import RUNS

if TYPE_CHECKING:
    from redline.evaluate.opened_run import OpenedModel

_HUB_ID = re.compile(r"([\w.-]+)/[\w.-]+")


def open_model(
    name: str,
    *,
    log: Callable[[str], None],
    weights: str | None = None,
    base: str | None = None,
    answers: bool = False,
    settings: Sequence[str] = (),
    text_key: str | None = None,
    **options: Any,
) -> OpenedModel:
    """Open the run `name`; if there is none, the model in files or on the hub.

    `options` are those of both `open_run` and `open_pretrained`. What they log also becomes the `notes` of the result.
    """
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        log(text)

    try:
        path, selector = resolve_run(name, RUNS)
    except UsageError:
        if not _may_be_model(name):
            raise
        if weights is not None:
            raise UsageError("--weights is for a run, not for a model.", where=name, fix="Leave it out.") from None
        if settings:
            raise UsageError("--set is for a run, not for a model.", where=name, fix="Leave it out.") from None
        if text_key is not None:
            raise UsageError("--text-key is for a run that reads text.", where=name, fix="Leave it out.") from None
        from redline.evaluate.opened_run import open_pretrained

        return replace(open_pretrained(name, base=base, log=note, **options), notes=notes)
    from redline.evaluate.opened_run import open_run

    trained = open_run(
        path,
        selector,
        weights=weights,
        base=base,
        text_key=text_key,
        answers=answers,
        settings=settings,
        log=note,
        **options,
    )
    return replace(trained, notes=notes)


def _may_be_model(name: str) -> bool:
    """Return whether the name is an existing path or has the form OWNER/NAME of a hub id.

    A name such as runs/NAME, whose first part is a folder here, is a mistyped run or path and not a hub id.
    """
    if not name or is_sweep(Path(name)):
        return False
    if parse_address(name):
        return True
    hub_id = _HUB_ID.fullmatch(name)
    is_remote = hub_id is not None and hub_id[1] != RUNS.name and not Path(hub_id[1]).exists()
    return is_remote or Path(name).expanduser().exists()
