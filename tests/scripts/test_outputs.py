"""Outputs in pages: found, compared with what the commands print, and rewritten."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PAGE = """# A page

```console
$ redline plan pretrain-350m --gpu h100
  model      350.4M parameters
…
  horizon    53,406 steps · 7B tokens
$ redline train small.yaml --run runs/small
step 50   25%  loss 6.5950  25.7k tok/s  ETA 12s
$ redline doctor
```
"""


@pytest.fixture
def outputs(module: Callable[[str], ModuleType]) -> Any:
    return module("outputs")


def test_commands_are_found_with_their_output(outputs: Any) -> None:
    plan, train, doctor = outputs.shown(PAGE)
    assert plan.words[:3] == ["redline", "plan", "pretrain-350m"]
    assert len(plan.output) == 3
    assert (plan.fixed, train.fixed, doctor.fixed) == (True, False, False)


@pytest.mark.parametrize(
    ("command", "output", "fixed"),
    [
        ("redline plan x --gpu h100", "  model", True),
        ("redline plan x --gpu cpu", "  model", False),
        ("redline plan x --gpu h100 data.source=./tokens", "  model", False),
        ("redline plan x --gpu h100 --probe", "  model", False),
        ("redline keys train.lr", "train.lr:", True),
        ("redline train x train.lrr=1", "redline: x: 1 problem", True),
        ("redline eval first", "  loss 5", False),
        ("make wheel", "[sdist]", False),
    ],
)
def test_what_depends_on_the_code_alone(outputs: Any, command: str, output: str, fixed: bool) -> None:
    assert outputs.Shown(command, (output,)).fixed is fixed


def test_the_form_of_a_line_has_no_numbers(outputs: Any) -> None:
    mine = "step 50   25%  loss 6.5950  25.7k tok/s  0.4 GiB  lr 1.26e-04  grad 0.76  ETA 1m29s"
    yours = "step 3   2%  loss 11.0  152.2 tok/s  650 MiB  lr 6e-03  grad 3.2  ETA 4.1s"
    assert outputs.form(mine) == outputs.form(yours) == "step # #% loss # # tok/s # lr # grad # ETA #"
    assert outputs.form("step 50 loss 1") != outputs.form("step 50 val loss 1")
    assert outputs.label("eval  step 0  val loss 6.9") == "eval step"


def test_shown_lines_must_come_in_their_order(outputs: Any) -> None:
    printed = ["a 1", "b 2", "c 3"]
    assert outputs.missing(["a 1", "…", "c 3"], printed) == []
    assert outputs.missing(["c 3", "a 1"], printed) == ["a 1"]
    assert outputs.missing(["a 9"], printed) == ["a 9"]
    assert outputs.missing(["a 9"], printed, outputs.form) == []


def test_lines_are_brought_up_to_date(outputs: Any) -> None:
    plan, train, _ = outputs.shown(PAGE)
    answers = {
        plan: ["  model      351.0M parameters", "  batch      128", "  horizon    60,000 steps · 8B tokens"],
        train: ["eval  step 0", "step 50   25%  loss 6.1  31k tok/s  ETA 9s"],
    }
    text, problems = outputs.rewritten(PAGE, answers)
    assert problems == []
    assert text == PAGE.replace("350.4M", "351.0M").replace("53,406 steps · 7B", "60,000 steps · 8B").replace(
        "loss 6.5950  25.7k tok/s  ETA 12s", "loss 6.1  31k tok/s  ETA 9s"
    )
    assert outputs.rewritten(text, answers) == (text, [])


def test_a_line_that_is_gone_is_named(outputs: Any) -> None:
    plan = outputs.shown(PAGE)[0]
    text, problems = outputs.rewritten(PAGE, {plan: ["  model      350.4M parameters"]})
    assert text == PAGE
    assert len(problems) == 1
    assert "horizon" in problems[0]


def test_a_stale_output_fails_the_check(
    module: Callable[[str], ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    docs: Any = module("docs")
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs/a.md"
    right = "# A\n\n```console\n$ redline keys train.lrr\n{}\n```\n"
    line = "redline: redline has no key 'train.lrr'. Did you mean 'train.lr'?"
    page.write_text(right.format(line.replace("train.lr'?", "train.lrrr'?")))
    monkeypatch.setattr(docs, "pages", lambda: [page])
    monkeypatch.setattr(docs, "generated_files", dict)
    root = docs.ROOT
    monkeypatch.setattr(docs.outputs, "run", lambda command, place, _, run=docs.outputs.run: run(command, place, root))
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["docs.py", "--check"])
    assert docs.main() == 1
    assert "docs/a.md is out of date. Run `python scripts/docs.py`." in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["docs.py"])
    assert docs.main() == 0
    assert page.read_text() == right.format(line)
