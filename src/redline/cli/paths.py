"""Where runs live."""

from __future__ import annotations

import os
from pathlib import Path

from redline.errors import UsageError

RUNS = Path("runs")
_LONGEST_NAME, _LONGEST_PATH = 255, 4095  # bytes, of Linux's file systems and system calls
_ROOM_IN_A_RUN = 128  # bytes for the files inside a run directory: checkpoints/step-00000000/model-00000.safetensors


def whole_run(name: str) -> Path:
    """RUN where a run is meant and no checkpoint of it."""
    from redline.monitor.runs import resolve_run

    path, selector = resolve_run(name, RUNS)
    if selector is not None:
        raise UsageError("the whole run is meant here.", where=name, fix=f"Leave out @{selector}.")
    return path


def refuse_too_long(path: Path) -> None:
    """Refuse a run directory whose path the file system cannot hold, before anything looks for it."""
    longest = max((len(os.fsencode(part)) for part in path.parts), default=0)
    whole = len(os.fsencode(path.absolute())) + _ROOM_IN_A_RUN
    if longest <= _LONGEST_NAME and whole <= _LONGEST_PATH:
        return
    shown = str(path)[:60] + "…"
    length = f"a name of {longest:,} bytes" if longest > _LONGEST_NAME else f"a path of {whole:,} bytes"
    limit = _LONGEST_NAME if longest > _LONGEST_NAME else _LONGEST_PATH
    raise UsageError(f"is too long: {length}, where {limit:,} is the most.", where=shown, fix="Choose a shorter --run.")


def refuse_unreadable(path: Path) -> None:
    """safetensors opens no path that is not UTF-8: what a run saved there, nobody could load again."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode("utf-8", "replace")
        fix = "Choose another --run, or rename the folder."
        raise UsageError("this path is not UTF-8, and checkpoints could not be read.", where=shown, fix=fix) from None
