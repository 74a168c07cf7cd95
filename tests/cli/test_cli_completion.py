"""Shells complete verbs, options, recipes, keys and runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from redline.cli.completion import candidates
from redline.recipe.load import shipped


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs, and a command called redline on the path."""
    for name in ("first", "second"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "lock.json").write_text("{}")
    program = tmp_path / "bin" / "redline"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m redline "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["tr"], ["train"]),
        (["train", "quickst"], ["quickstart"]),
        (["train", "quickstart", "train.step"], ["train.steps="]),
        (["train", "train.step"], ["train.steps="]),
        (["plan", "pretrain-350m", "--gpu", "h2"], ["h200"]),
        (["train", "--resu"], ["--resume"]),
        (["train", "--resume", ""], ["first", "latest", "second"]),
        (["report", "first", "sec"], ["second"]),
        (["runs", ""], ["prune"]),
        (["runs", "prune", "--keep", "b"], ["best"]),
        (["completion", "f"], ["fish"]),
        (["export", "first", "--out", ""], []),
        (["nonsense", "x"], []),
        (["train", "problems-hdp", "hierarchical_diffusion.clip_h"], ["hierarchical_diffusion.clip_high="]),
    ],
)
def test_what_a_word_may_become(place: Path, typed: list[str], expected: list[str]) -> None:
    assert candidates(typed) == expected


def test_a_recipe_comes_first_and_once(place: Path) -> None:
    assert candidates(["train", ""]) == sorted(shipped())
    assert not {*candidates(["train", "quickstart", ""])} & {*shipped()}


def test_without_runs_nothing_is_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert candidates(["report", ""]) == []


ASKED = {
    "bash": """source <(redline completion bash)
ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _redline redline; echo "${COMPREPLY[*]}"; }
ask redline repo; ask redline train quickstart train.step; ask redline report ''""",
    "zsh": """autoload -Uz compinit; compinit -D -u; source <(redline completion zsh)
compadd() { while [[ $1 != -- ]]; do shift; done; shift; print -r -- "$@" }
words=(redline repo); CURRENT=2; _redline
words=(redline train quickstart train.step); CURRENT=4; _redline
words=(redline report ''); CURRENT=3; _redline""",
    "fish": """redline completion fish | source
complete -C 'redline repo'; complete -C 'redline train quickstart train.step'
complete -C 'redline report ' | string match -r '^(?:first|latest|second)$' | string join ' '""",
}
FLAGS = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}


@pytest.mark.parametrize("shell", ASKED)
def test_the_shell_itself_completes(place: Path, shell: str) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    command = [program, *FLAGS[shell], "-c", ASKED[shell]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["report", "train.steps=", "first latest second"], done.stderr


def test_nothing_is_no_line(inside: Any) -> None:
    """bash would take an empty one for the only word there is, and complete no file."""
    assert inside("completion", "words", "--", "train", "no-such-recip").out == ""


def test_an_unknown_shell_is_refused(inside: Any) -> None:
    answer = inside("completion", "powershell")
    assert answer.code == 2
    assert "'powershell' is not bash or zsh or fish" in answer.said
