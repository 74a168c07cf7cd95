"""Errors for people: what is wrong, where, and how to fix it."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_PREEMPTED = 75
EXIT_INTERRUPTED = 130

_SECRET = frozenset({"TOKEN", "KEY", "APIKEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIALS"})  # words of a name
_SHORTEST_SECRET = 8  # characters; what is shorter would be found in innocent words
_LOGIN = re.compile(r"(?<=:/)(/?)[^\s/@]+:[^\s/@]*@")  # https://user:password@


class UserError(Exception):
    """A mistake or a circumstance that the user can mend. Printed without a traceback."""

    exit_code = EXIT_FAILED

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.what, self.where, self.fix = what, where, fix
        super().__init__(self.message())

    def message(self) -> str:
        place = f"{self.where}: " if self.where else ""
        advice = f" {self.fix}" if self.fix else ""
        return f"{place}{self.what}{advice}"


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a recipe."""

    key: str
    what: str
    fix: str = ""

    def line(self) -> str:
        return f"{self.key}: {self.what}" + (f" {self.fix}" if self.fix else "")


class RecipeError(UserError):
    """Everything that is wrong with a recipe, at once."""

    exit_code = EXIT_USAGE

    def __init__(self, where: str, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("; ".join(p.line() for p in self.problems), where=where)

    def message(self) -> str:
        if len(self.problems) == 1:
            return f"{self.where}: {self.problems[0].line()}"
        lines = "\n".join(f"  {p.line()}" for p in self.problems)
        return f"{self.where}: {len(self.problems)} problems\n{lines}"


class UsageError(UserError):
    exit_code = EXIT_USAGE


def without_secrets(text: str) -> str:
    """The text without what the environment calls a token, a key or a password, and without logins in addresses.

    For whatever is written down or printed: other libraries quote such things in the texts of their errors.
    """
    named = [value for name, value in os.environ.items() if not _SECRET.isdisjoint(name.upper().split("_"))]
    for value in sorted(named, key=len, reverse=True):
        if len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, "***")
    return _LOGIN.sub(r"\1***@", text)


def install_hint(extra: str) -> str:
    """How to get an extra here: by the checkout's own set-up, for a venv may have no pip, or with pip."""
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "Makefile").is_file() and (checkout / "scripts" / "setup.py").is_file():
        return f"`make setup EXTRAS={extra}`"
    return f"`pip install 'redline[{extra}]'`"


def did_you_mean(word: str, known: Iterable[str], *, prefix: str = "") -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"Did you mean {prefix + close[0]!r}?" if close else ""
