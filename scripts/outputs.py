"""The outputs that pages show of commands: found, compared with what the commands print now, and brought up to date.

A page shows commands in blocks of the language `console`: `$ redline …`, then as many lines of the output as matter. A
shown line `…` stands for lines that are left out. Two kinds of outputs are kept current:

- *fixed*: the command prints the same on every machine (help, keys, recipes, plans for a named card, mistakes).
  `python scripts/docs.py` rewrites these, and `--check` compares them letter by letter.
- *measured*: losses, speeds and times of a run. `python scripts/docs.py --measure PAGE …` runs all commands of a page
  in one folder and rewrites them; tests compare their form, in which every number is `#`.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"[+\-]?\d[\d,]*(?:\.\d+)?(?:e[+\-]?\d+)?")
LEFT_OUT = "…"
MACHINES = ("auto", "cpu")


@dataclass(frozen=True)
class Shown:
    """A command of a page with the lines that the page shows of its output."""

    command: str  # as it is written, without the prompt
    output: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        return shlex.split(self.command, comments=True)

    @property
    def fails(self) -> bool:
        return bool(self.output) and self.output[0].startswith("redline: ")

    @property
    def fixed(self) -> bool:
        """Return whether the output depends on nothing but the code."""
        if self.words[:1] != ["redline"] or not self.output:
            return False
        verb, *words = self.words[1:] or [""]
        if self.fails or {"--help", "--version"} & set(words) or verb in ("keys", "recipes", "completion"):
            return True
        named = "--gpu" in words and words[words.index("--gpu") + 1] not in MACHINES
        return verb == "launch" or (verb == "plan" and named and "--probe" not in words and "data." not in self.command)


def shown(text: str) -> list[Shown]:
    """Return the commands of a page's console blocks."""
    found = []
    for block in BLOCK.finditer(text):
        if block["language"] == "console":
            for part in re.split(r"^\$ ", block["text"], flags=re.MULTILINE)[1:]:
                command, *output = part.rstrip("\n").split("\n")
                found.append(Shown(command, tuple(output)))
    return found


def form(line: str) -> str:
    """Return what a line has in common with that of another machine, run or model."""
    line = re.sub(r"[━┈█░▏▎▍▌▋▊▉]+", "", NUMBER.sub("#", line))
    line = re.sub(r"(?<=#)(?:[kMBT](?![a-zA-Z])| ?[KMG]iB)", "", line)
    line = re.sub(r"#(?:d|h|m|s)(?:#(?:h|m|s))*(?![a-zA-Z])", "#", line)
    return " ".join(line.split())


def label(line: str) -> str:
    """Return the words of a line's form that stand before its first number."""
    return form(line).partition("#")[0].partition(" = ")[0].strip()


def missing(output: Sequence[str], printed: Sequence[str], key: Callable[[str], str] = str) -> list[str]:
    """Return the shown lines that do not follow, in their order, in what was printed."""
    rest, absent = iter([key(line.rstrip()) for line in printed]), []
    remaining = list(rest)
    for line in output:
        if line.strip() in (LEFT_OUT, ""):
            continue
        wanted = key(line.rstrip())
        if wanted in remaining:
            remaining = remaining[remaining.index(wanted) + 1 :]
        else:
            absent.append(line)
    return absent


def renewed(output: Sequence[str], printed: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the shown lines as they are printed now, and those that have no counterpart any more.

    A line's counterpart is the next printed line that is equal, else of the same form, else with the same first words.
    """
    new, lost, start = [], [], 0
    for line in output:
        if line.strip() in (LEFT_OUT, ""):
            new.append(line)
            continue
        for key in (str, form, label):
            wanted = key(line.rstrip())
            at = next((n for n in range(start, len(printed)) if key(printed[n].rstrip()) == wanted and wanted), None)
            if at is not None:
                new.append(printed[at].rstrip())
                start = at + 1
                break
        else:
            lost.append(line)
            new.append(line)
    return new, lost


def run(command: Shown, folder: Path, root: Path) -> list[str]:
    """Run a command of redline in `folder`; return what it printed to both streams, stderr first."""
    environment = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1", "PYTHONPATH": str(root / "src")}
    words = [sys.executable, "-m", "redline", *command.words[1:]]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)
    return [*done.stderr.splitlines(), *done.stdout.splitlines()]


def prepare(folder: Path, pages: Sequence[str]) -> None:
    """Write what the pages assume into a folder: the recipe files and scripts they show, notes and tokens."""
    import pydoc_data.topics

    (folder / "notes").mkdir(exist_ok=True)
    for name, text in pydoc_data.topics.topics.items():
        (folder / "notes" / f"{name}.txt").write_text(text, encoding="utf-8")
    (folder / "tokens").mkdir(exist_ok=True)
    (folder / "tokens" / "train.bin").write_bytes(b"".join(n.to_bytes(2, "little") for n in range(20_000)))
    for text in pages:
        for block in BLOCK.finditer(text):
            name = re.match(r"# ([\w-]+\.(?:yaml|py))\n", block["text"])
            if name and block["language"] in ("yaml", "python"):
                (folder / name[1]).write_text(block["text"], encoding="utf-8")


def rewritten(text: str, answers: dict[Shown, list[str]]) -> tuple[str, list[str]]:
    """Return the page with the outputs of these commands as they are now, and a sentence for each line that is gone."""
    problems: list[str] = []

    def block(match: re.Match[str]) -> str:
        if match["language"] != "console":
            return match[0]
        body = match["text"]
        for command in shown(match[0]):
            if command in answers and command.output:
                printed = [line.rstrip() for line in answers[command]]
                if command.fails and printed and printed[0].startswith("redline: "):
                    lines, lost = printed, []  # a mistake is shown whole
                else:
                    lines, lost = renewed(command.output, printed)
                problems.extend(f"`{command.command}` no longer prints `{line.strip()}`" for line in lost)
                body = body.replace(
                    "\n".join([f"$ {command.command}", *command.output]), "\n".join([f"$ {command.command}", *lines])
                )
        return f"```console\n{body}```"

    return BLOCK.sub(block, text), problems
