"""Self-contained HTML: one style, templates that escape, files that are replaced whole."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from redline.errors import UserError
from redline.monitor.console import clean
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


def write_page(path: Path, page: str) -> Path:
    """Never half a page: written beside its place, then renamed."""
    if not path.name:  # `.` or `/`
        what = "The report cannot be written: this is a folder."
        raise UserError(what, where=str(path), fix="Name a file with --out.")
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(page.encode("utf-8", "replace"))
        unfinished.replace(path)
    except OSError as error:
        with suppress(OSError):  # where nothing can be written, nothing can be taken away
            unfinished.unlink()
        raise UserError(
            f"The report cannot be written ({error.strerror}).",
            where=str(path),
            fix="Choose a place with --out that can be written.",
        ) from error
    return path


def format_date(seconds: float | None) -> str:
    if seconds is None or not 0 <= seconds < 1e11:  # beyond the year 5000 some clock was wrong
        return ""
    return time.strftime("%d %B %Y, %H:%M UTC", time.gmtime(seconds))
