"""A benchmark's result as three files: JSON, a Markdown page and an SVG picture."""

from __future__ import annotations

from pathlib import Path

from benchmarks.pages import markdown
from benchmarks.pictures import draw
from redline.bench import record
from redline.cache import write_atomically


class Record(record.Record):
    siblings = (".md", ".svg")

    def save(self) -> None:
        super().save()
        if self.out is not None:
            picture = self.out.with_suffix(".svg")
            page = markdown(self.result(), picture.name if picture.exists() else None)
            write_atomically(self.out.with_suffix(".md"), page)

    def finish(self) -> list[Path]:
        if self.out is not None and (svg := draw(self.result())) is not None:
            write_atomically(self.out.with_suffix(".svg"), svg)
        return super().finish()
