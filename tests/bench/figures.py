"""Find the figures that a page quotes from result files, and check that the files contain them.

A figure belongs to a result file if its table row, its sentence, or the paragraph above its table names the file;
"the same" in a table's last column repeats the file of the row above. A figure agrees if some number of the file, or a
derivation of it that is declared here, rounds to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
LONG = {"evaluations", "losses", "events", "kernels", "products", "choices", "attention_causal"}
_FILE = re.compile(r"[\w.-]+\.json")
_NUMBER = re.compile(
    r"(?<![\w.,/=^:-])[+−-]?(?P<whole>\d{1,3}(?:,\d{3})+|\d+)(?P<fraction>\.\d+)?"
    r"(?P<unit>k|M|B|×| ?%)?(?![\w/])"
)
_YEARS = {"2025", "2026"}
SCALES = {"k": 1e3, "M": 1e6, "B": 1e9, "%": 1e-2}
LEAST = 100.0  # smaller whole numbers without a unit are counts and sizes rather than measurements
CHECKED_BY_PLAN_TABLE = "before fitting"  # a column of tables that another test compares whole


@dataclass(frozen=True)
class Figure:
    text: str  # as it is written
    value: float
    rounding: float  # half a unit of its last digit

    def agrees(self, number: float) -> bool:
        return abs(abs(number) - self.value) <= self.rounding * (1 + 1e-6)


@dataclass(frozen=True)
class Quote:
    """A row or a sentence, and the result files that it quotes."""

    where: str
    text: str
    files: tuple[str, ...]


def figures(text: str) -> Iterator[Figure]:
    """Yield the figures of a text: numbers with decimals, thousands or a unit; not those in code, names and dates."""
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|[\w.-]+\.(?:json|md|py|svg)|\d+ (?:×|of) \d+(?: × \d+)*|T = \d+", " ", text)
    text = text.replace("**", "").replace("~", "")
    for match in _NUMBER.finditer(text):
        whole, fraction, unit = match["whole"], match["fraction"] or "", (match["unit"] or "").strip()
        if whole in _YEARS or not (fraction or "," in whole or unit or float(whole) >= LEAST):
            continue
        scale = SCALES.get(unit, 1.0)
        yield Figure(
            f"{whole}{fraction}{unit}",
            float(whole.replace(",", "") + fraction) * scale,
            0.5 * scale * _last_place(whole.replace(",", ""), fraction, grouped="," in whole),
        )


def _last_place(whole: str, fraction: str, *, grouped: bool) -> float:
    """Return the unit of the last digit. Final zeros of a number like 218,700 do not count, beyond three digits."""
    if fraction:
        return 10.0 ** -(len(fraction) - 1)
    zeros = len(whole) - len(whole.rstrip("0")) if grouped else 0
    return 10.0 ** max(0, min(zeros, len(whole) - 3))


def quotes(page: str, text: str) -> Iterator[Quote]:
    """Yield the rows and sentences of a page that name result files."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    above: tuple[str, ...] = ()  # the files that the paragraph above names
    for block in re.split(r"\n\s*\n", text):
        lines = block.strip().splitlines()
        table = [line for line in lines if line.startswith("|")]
        if table and CHECKED_BY_PLAN_TABLE not in table[0]:
            before = _files(" ".join(line for line in lines if not line.startswith("|"))) or above
            yield from _rows(page, table, _files(table[0]) or before)
        prose = " ".join(line for line in lines if not line.startswith(("|", "#")))
        for sentence in re.split(r"(?<=[.:;])\s+(?=[A-Z(`*\[])", prose):
            if files := _files(sentence):
                yield Quote(f"{page}: {sentence[:60]}", sentence, files)
        above = _files(prose) if prose and not table else ()


def _rows(page: str, table: list[str], above: tuple[str, ...]) -> Iterator[Quote]:
    files: tuple[str, ...] = ()
    for line in table[2:]:
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if named := _files(line):
            files = named
        elif cells[-1] not in ("the same", "the same |"):
            files = ()
        if files or above:
            yield Quote(f"{page}: {line[:60]}", line, files or above)


def _files(text: str) -> tuple[str, ...]:
    names = dict.fromkeys(name for name in _FILE.findall(text) if (RESULTS / name).exists())
    return tuple(names)


@cache
def content(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


@cache
def numbers(name: str) -> tuple[float, ...]:
    """Return the numbers of a result file: its fields, those in its texts, and errors and shares of every row."""
    return tuple(dict.fromkeys(_collected(content(name))))


def _collected(node: Any) -> Iterator[float]:
    if isinstance(node, bool):
        return
    if isinstance(node, int | float):
        yield float(node)
    elif isinstance(node, str):
        yield from (float(match) for match in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:e-?\d+)?(?![\w.])", node)[:40])
    elif isinstance(node, list):
        for item in node:
            yield from _collected(item)
    elif isinstance(node, dict):
        yield from _derived(node)
        for key, item in node.items():
            is_curve = key in LONG or (key == "steps" and isinstance(item, list))
            ends = [*item[:1], *item[-1:]] if is_curve and isinstance(item, list) else item
            yield from _collected({} if is_curve and isinstance(item, dict) else ends)


def _derived(row: dict[str, Any]) -> Iterator[float]:
    """Yield what follows from a row alone: the plan's errors, and the share of the ceiling."""
    planned, measured = row.get("planned"), row.get("measured")
    if isinstance(planned, dict) and isinstance(measured, dict):
        for key in ("memory_gib", "tokens_per_s"):
            if planned.get(key) and measured.get(key):
                yield planned[key] / measured[key] - 1
    if row.get("ceiling_tokens_per_s") and row.get("tokens_per_s"):
        yield row["tokens_per_s"] / row["ceiling_tokens_per_s"]


Derivation = Callable[[], float]


def unsupported(quote: Quote, declared: Iterable[tuple[str, str, Derivation]], ignored: Iterable[str]) -> list[str]:
    """Return the figures of a quote that neither its files nor the derivations declared for them contain.

    `declared` has a file, a figure as it is written, and how it follows from the file. `ignored` are texts with numbers
    that are no measurements, for example shapes.
    """
    text = quote.text
    for words in ignored:
        text = text.replace(words, " ")
    known = [number for name in quote.files for number in numbers(name)]
    derived = {written: value for name, written, value in declared if name in quote.files}
    missing = []
    for figure in figures(text):
        values = [derived[figure.text]()] if figure.text in derived else known
        if not any(figure.agrees(number) for number in values):
            missing.append(figure.text)
    return missing
