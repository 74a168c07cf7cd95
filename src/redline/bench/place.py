"""Where results go: nothing is overwritten, and nothing is measured that cannot be kept."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.errors import UsageError

if TYPE_CHECKING:
    from redline.hardware.machine import Machine

BESIDE = (".md", ".svg")  # written with the same stem


def check_out(out: Path | None, *, goes_on: bool = False) -> None:
    """Before torch is even imported. `goes_on`: a result that is there may be added to."""
    if out is None or out.is_dir():
        return
    if out.suffix != ".json":
        fix = "Name a folder that exists, or FILE.json."
        raise UsageError("is neither a folder nor a file that ends in .json.", where=str(out), fix=fix)
    if not out.absolute().parent.is_dir():
        raise UsageError("there is no such folder.", where=str(out.parent), fix="Make it, or choose another --out.")
    taken = [path for path in (out, *map(out.with_suffix, BESIDE)) if path.exists()]
    if taken and not (goes_on and out.exists()):
        raise UsageError("is there already.", where=str(taken[0]), fix="Choose another --out, or remove it.")


def file_for(out: Path | None, benchmark: str, machine: Machine, *, goes_on: bool = False) -> Path | None:
    """The JSON file: as named, or in the folder by benchmark, card and day."""
    if out is not None and out.is_dir():
        out = out / f"{benchmark}-{_short_name(machine)}-{time.strftime('%Y%m%d')}.json"
    check_out(out, goes_on=goes_on)
    return out


def read_earlier(
    out: Path | None, benchmark: str, machine: Machine, rows_have: tuple[str, ...] = ("name",)
) -> dict[str, Any] | None:
    """The result that is there already, if it is one of the same benchmark on the same machine, and whole."""
    if out is None or not out.exists():
        return None
    try:
        result = json.loads(out.read_text(encoding="utf-8"))
        rows, name = result["rows"], result["machine"]["name"]
        whole = isinstance(rows, list) and all(key in row for row in rows for key in rows_have)
        ours = whole and result["benchmark"] == benchmark
    except (OSError, ValueError, KeyError, TypeError):
        ours, name = False, ""
    if not ours:
        fix = "Choose another --out, or remove it."
        raise UsageError(f"is there already, and is no result of {benchmark}.", where=str(out), fix=fix)
    if name != machine.name:
        what = f"was measured on {name}; this is {machine.name}."
        raise UsageError(what, where=str(out), fix="Choose another --out.")
    return dict(result)


def _short_name(machine: Machine) -> str:
    if machine.device == "cpu":
        return "cpu"
    return machine.spec.name if machine.spec else re.sub(r"[^a-z0-9]+", "-", machine.name.lower()).strip("-")
