"""Errors that users can act on (what is wrong, where, and how to fix it), exit codes, and the redaction of secrets.

Also the fixes for what is missing on a machine: an extra, a package, torch, or a supported system.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_PREEMPTED = 75
EXIT_INTERRUPTED = 130

# Words in the name of an environment variable that mark its value as a secret: HF_TOKEN, DB_PASS, GITHUB_PAT.
_SECRET = frozenset(
    {"TOKEN", "KEY", "APIKEY", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "PASS", "PAT", "CREDENTIAL", "CREDENTIALS"}
)
# Ends of names that are written without a separator: PGPASSWORD, SSHPASS, GITHUBTOKEN.
_SECRET_ENDS = ("PASSWORD", "PASSWD", "PASSPHRASE", "APIKEY", "SECRET", "TOKEN", "SSHPASS")
_SECRET_END = "_PWD"  # noqa: S105  # DB_PWD, MYSQL_PWD; PWD and OLDPWD are working directories
_SHORTEST_SECRET = 8  # characters; a shorter value would also match ordinary words
_LOGIN = re.compile(r"(?<=:/)(/?)[^\s/@]+:[^\s/@]*@")  # https://user:password@
# https://bucket/file?X-Amz-Signature=…: everyone with such an address can read the file (X-Goog-… and sig likewise).
_SIGNATURE = re.compile(
    r"([?&](?:x-(?:amz|goog)-(?:signature|credential|security-token)|awsaccesskeyid|signature|sig)=)[^&\s\"']+", re.I
)


class UserError(Exception):
    """An error that the user can fix. It is printed without a traceback."""

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
    """All problems of a recipe."""

    exit_code = EXIT_USAGE

    def __init__(self, where: str, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        fixes = dict.fromkeys(problem.fix for problem in self.problems if problem.fix)
        super().__init__("; ".join(p.line() for p in self.problems), where=where, fix=" ".join(fixes) or None)

    def message(self) -> str:
        if len(self.problems) == 1:
            return f"{self.where}: {self.problems[0].line()}"
        lines = "\n".join(f"  {p.line()}" for p in self.problems)
        return f"{self.where}: {len(self.problems)} problems\n{lines}"


class UsageError(UserError):
    """A mistake on the command line."""

    exit_code = EXIT_USAGE


@cache  # redact() checks every variable for every text
def is_secret_name(variable: str) -> bool:
    """Return whether an environment variable of this name holds a token, a key or a password."""
    words = [word.rstrip("0123456789") for word in re.split(r"[^A-Z0-9]+", variable.upper())]
    by_word = not _SECRET.isdisjoint(words) or any(word.endswith(_SECRET_ENDS) for word in words)
    return by_word or variable.upper().endswith(_SECRET_END)


def secret_variables() -> dict[str, str]:
    """Return the environment's secrets by name, the longest value first: one may contain another."""
    secrets = {
        name: value for name, value in os.environ.items() if len(value) >= _SHORTEST_SECRET and is_secret_name(name)
    }
    return dict(sorted(secrets.items(), key=lambda item: -len(item[1])))


def redact(text: str) -> str:
    """Return the text without the values of secret environment variables and without logins or signatures in addresses.

    Everything that is written to a file or printed goes through here: other libraries quote such values in their
    error messages.
    """
    for value in secret_variables().values():
        text = text.replace(value, "***")
    return _SIGNATURE.sub(r"\1***", _LOGIN.sub(r"\1***@", text))


def redact_all(value: Any) -> Any:
    """Return plain data with every text in it passed through `redact`."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: redact_all(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_all(item) for item in value]
    return value


TORCH_REQUIREMENT = "torch>=2.11,<2.14"  # as in pyproject.toml


def install_hint(extra: str) -> str:
    """Return the command that installs an extra: `make setup` in a checkout (it may have no pip), else pip."""
    return f"`make setup EXTRAS={extra}`" if is_checkout() else f"`{_installer()} 'redline[{extra}]'`"


def package_hint(package: str) -> str:
    """Return the command that installs a package of no extra."""
    return f"`{_installer()} {package}`"


def dependency_hint(requirement: str) -> str:
    """Return the command that restores a package that redline always requires."""
    return "`rm -rf .venv && make setup`" if is_checkout() else f"`{_installer()} '{requirement}'`"


def is_checkout() -> bool:
    """Return whether this package is the source tree of a checkout, and not an installed wheel."""
    checkout = Path(__file__).resolve().parents[2]
    return (checkout / "Makefile").is_file() and (checkout / "scripts" / "setup.py").is_file()


def _installer() -> str:
    """Return the command that installs packages into this environment. One made by `uv tool install` has no pip."""
    in_uv_tool = (Path(sys.prefix) / "uv-receipt.toml").is_file()
    return f"uv pip install --python {sys.prefix}" if in_uv_tool else "pip install"


def missing_torch() -> UserError:
    """Return the error for a command that computes, where torch is not installed."""
    what = "torch is not installed. Planning and reading runs work without it; this does not."
    return UserError(what, fix=f"Install it: {dependency_hint(TORCH_REQUIREMENT)}.")


def torch_is_installed() -> bool:
    from importlib.util import find_spec

    return find_spec("torch") is not None


def require_torch() -> None:
    """Raise UserError if torch is not installed. Call it before a command writes anything."""
    if not torch_is_installed():
        raise missing_torch()


def refuse_windows() -> None:
    """Raise UsageError on Windows, before a module is imported that exists on Unix only, such as fcntl."""
    if sys.platform == "win32":
        fix = "Install WSL 2 (`wsl --install` in PowerShell), and install and run redline inside it."
        raise UsageError("redline does not run on Windows itself; it runs on Linux, and so under WSL 2.", fix=fix)


def did_you_mean(word: str, known: Iterable[str], *, prefix: str = "") -> str:
    """Return a suggestion of the most similar known word, or "" if none is similar."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"Did you mean {prefix + close[0]!r}?" if close else ""
