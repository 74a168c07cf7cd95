"""Where runs live."""

from __future__ import annotations

import os
from pathlib import Path

from redline.errors import UsageError

RUNS = Path("runs")


def whole_run(name: str) -> Path:
    """RUN where a run is meant and no checkpoint of it."""
    from redline.monitor.runs import resolve_run

    path, selector = resolve_run(name, RUNS)
    if selector is not None:
        raise UsageError("the whole run is meant here.", where=name, fix=f"Leave out @{selector}.")
    return path


def refuse_unreadable(path: Path) -> None:
    """safetensors opens no path that is not UTF-8: what a run saved there, nobody could load again."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode("utf-8", "replace")
        fix = "Choose another --run, or rename the folder."
        raise UsageError("this path is not UTF-8, and checkpoints could not be read.", where=shown, fix=fix) from None
