"""Self-contained HTML: one style, templates that escape, files that are replaced whole."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from redline.cache import check_regular, open_regular
from redline.errors import UserError
from redline.runs.console import clean
from redline.units import format_bytes, format_seconds


def render(template: str, values: Mapping[str, Any]) -> str:
    """The page that a template beside this file makes of the values."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    jinja = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters |= {"clean": clean, "bytes": format_bytes, "seconds": format_seconds}
    return jinja.get_template(template).render(values, written_on=format_date(time.time()))


def write_page(path: Path, page: str, *, named: bool = True) -> Path:
    """Write the page beside its place, then rename it, so that nobody reads half a page. Only HTML is replaced.

    A terminal or a pipe is written to only where the user `named` it: one that lies in a run directory may have been
    put there by someone else, and writing to it would wait forever for a reader.
    """
    if not path.name:  # `.` or `/`
        what = "The report cannot be written: this is a folder."
        raise UserError(what, where=str(path), fix="Name a file with --out.")
    place = path.resolve()  # a link stays one
    unfinished = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    try:
        if _is_stream(path) and not named:
            check_regular(path)
        if _is_stream(path):
            path.write_bytes(page.encode("utf-8", "replace"))
            return path
        _refuse_other(place, path)
        place.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(page.encode("utf-8", "replace"))
        unfinished.replace(place)
    except OSError as error:
        with suppress(OSError):  # where nothing can be written, nothing can be taken away
            unfinished.unlink()
        raise UserError(
            f"The report cannot be written ({error.strerror}).",
            where=str(path),
            fix="Choose a place with --out that can be written.",
        ) from error
    return path


def _is_stream(path: Path) -> bool:
    """A terminal, a pipe, /dev/null: written to, and never renamed over."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _refuse_other(place: Path, asked: Path) -> None:
    if not place.is_file() or not place.stat().st_size:
        return
    with open(place, "rb", opener=open_regular) as file:
        begin = file.read(256).lstrip().lower()
    if not begin.startswith((b"<!doctype html", b"<html")):
        what = "The report cannot be written: a file that is no HTML page is there."
        raise UserError(what, where=str(asked), fix="Choose another place with --out.")


def format_date(seconds: float | None) -> str:
    if seconds is None or not 0 <= seconds < 1e11:  # beyond the year 5000 some clock was wrong
        return ""
    return time.strftime("%d %B %Y, %H:%M UTC", time.gmtime(seconds))
