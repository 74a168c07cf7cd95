"""Shells complete verbs, options, recipes, keys and runs."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from redline.recipe.load import shipped


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two runs, and a command called redline on the path."""
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


@pytest.fixture
def complete(inside: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the completions of the last word, requested as bash does."""

    def ask(*typed: str) -> list[str]:
        with monkeypatch.context() as patch:
            patch.setenv("_REDLINE_COMPLETE", "complete_bash")
            patch.setenv("COMP_WORDS", shlex.join(["redline", *(word for word in typed if word)]))
            patch.setenv("COMP_CWORD", str(len(typed)))
            answer = inside()
        assert answer.code == 0
        assert answer.err == "", "the shell would print it into the command line"
        return answer.out.split()

    return ask


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["tr"], ["train"]),
        (["train", "quickst"], ["quickstart"]),
        (["train", "quickstart", "train.step"], ["train.steps="]),
        (["train", "train.step"], ["train.steps="]),
        (["bench", "throughput", "quickst"], ["quickstart"]),
        (["plan", "pretrain-350m", "--gpu", "h2"], ["h200"]),
        (["train", "--resu"], ["--resume"]),
        (["train", "--resume", ""], ["first", "latest", "second"]),
        (["report", "first", "sec"], ["second"]),
        (["eval", "fir"], ["first"]),
        (["runs", ""], ["prune"]),
        (["runs", "prune", "--keep", "b"], ["best"]),
        (["eval", "--weights", ""], ["ema", "raw"]),
        (["completion", "f"], ["fish"]),
        (["recipes", "quick"], ["quickstart"]),
        (["keys", "pa"], ["parallel"]),
        (["keys", "train.step"], ["train.steps"]),
        (["export", "first", "--out", ""], []),
        (["finetune", "x"], []),
        (["train", "no-such-recip"], []),
        (["train", "problems-hdp", "hierarchical_diffusion.clip_h"], ["hierarchical_diffusion.clip_high="]),
    ],
)
def test_completions_of_the_last_word(place: Path, complete: Any, typed: list[str], expected: list[str]) -> None:
    assert complete(*typed) == expected


def test_recipes_are_completed_until_one_is_given(place: Path, complete: Any) -> None:
    assert complete("train", "") == sorted(shipped())
    assert not {*complete("train", "quickstart", "")} & {*shipped()}


def test_without_runs_nothing_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, complete: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert complete("report", "") == []


def test_completing_imports_no_torch(place: Path) -> None:
    environment = {
        **os.environ,
        "_REDLINE_COMPLETE": "complete_bash",
        "COMP_WORDS": "redline train qu",
        "COMP_CWORD": "2",
    }
    program = (
        "import sys\nfrom redline.cli.main import run\nsys.argv = ['redline']\nrun()\n"
        "print(*{'torch', 'numpy'} & sys.modules.keys(), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["quickstart"]
    assert done.stderr.split() == []


# For each shell a script that completes `redline repo`, `redline train quickstart train.step` and `redline report `,
# and prints the completions of each on a line.
SCRIPTS = {
    "bash": """source <(redline completion bash)
ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _redline_completion redline; echo "${COMPREPLY[*]}"; }
ask redline repo; ask redline train quickstart train.step; ask redline report '' | tr '\\n' ' '""",
    "fish": """redline completion fish | source
complete -C 'redline repo' | string replace -r '\\t.*' ''
complete -C 'redline train quickstart train.step'
complete -C 'redline report ' | string join ' '""",
}
FLAGS = {"bash": ["--norc"], "fish": ["--no-config"]}


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_shell_itself_completes(place: Path, shell: str) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    command = [program, *FLAGS[shell], "-c", SCRIPTS[shell]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines == ["report", "train.steps=", "first latest second"], done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell(inside: Any, shell: str) -> None:
    answer = inside("completion", shell)
    assert answer.code == 0
    assert "_REDLINE_COMPLETE" in answer.out


@pytest.mark.parametrize(
    ("shell", "path"),
    [
        ("bash", ".bash_completions/redline.sh"),
        ("zsh", ".zfunc/_redline"),
        ("fish", ".config/fish/completions/redline.fish"),
    ],
)
def test_the_script_can_be_installed(
    inside: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str, path: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    answer = inside("completion", shell, "--install")
    assert answer.code == 0
    assert str(tmp_path / path) in answer.out
    assert "_REDLINE_COMPLETE" in (tmp_path / path).read_text()


def test_an_unknown_shell_is_refused(inside: Any) -> None:
    answer = inside("completion", "powershell")
    assert answer.code == 2
    assert "powershell" in answer.message
