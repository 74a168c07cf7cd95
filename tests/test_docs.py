"""The commands and tables of the pages agree with the program."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from typer.main import get_command

from redline.cli.main import app
from redline.errors import RecipeError, UserError
from redline.jobs.base import JOBS, options_of
from redline.recipe.aliases import ALIASES
from redline.recipe.load import known_keys, load, parse_yaml
from redline.recipe.schema import RESUMABLE, Recipe

ROOT = Path(__file__).parents[1]
PAGES = [page for page in (*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md") if page.is_file()]
VERBS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
LONGEST_PAGE = 120
REFERENCE = {
    "figures.md",
    "how-do-i.md",
    "keys.md",
    "numbers.md",
    "recipe.md",
    "recipes.md",
    "seeds.md",
    "sizes.md",
}  # to look something up, not to read
LONGEST_ANSWER = 10  # lines


@dataclass(frozen=True)
class Example:
    page: str
    words: tuple[str, ...]
    output: tuple[str, ...]  # as the page shows it

    @property
    def fails(self) -> bool:
        return bool(self.output) and self.output[0].startswith("redline: ")

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def examples() -> list[Example]:
    examples = []
    for page in PAGES:
        for block in blocks(page.read_text(encoding="utf-8"), "console"):
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, *output = part.rstrip("\n").split("\n")
                words = shlex.split(command, comments=True)
                if words and words[0] == "redline":
                    examples.append(Example(page.name, tuple(words[1:]), tuple(output)))
    return examples


def table(page: str, heading: str) -> list[list[str]]:
    """Return the cells of each row of the table whose first line begins with `heading`."""
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(heading))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


EXAMPLES = examples()
FAILING = [example for example in EXAMPLES if example.fails]
PLANS = [example for example in EXAMPLES if example.words[0] == "train" and "--sweep" not in example.words]
DRY_RUNS = [example for example in PLANS if "--dry-run" in example.words and not example.fails]
HELP = [example for example in EXAMPLES if {"--help", "-h", "--version"} & set(example.words)]
TYPED = [example for example in EXAMPLES if example not in (*HELP, *FAILING)]


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Return a folder with what the pages assume: notes, tokens, and the recipe files that they show."""
    folder = tmp_path_factory.mktemp("docs")
    shutil.copytree(corpus, folder / "notes")
    (folder / "tokens").mkdir()
    np.arange(20_000, dtype="<u2").tofile(folder / "tokens" / "train.bin")
    for page in PAGES:
        for block in blocks(page.read_text(encoding="utf-8"), "yaml"):
            if name := re.match(r"# ([\w-]+\.yaml)\n", block):
                (folder / name[1]).write_text(block, encoding="utf-8")
    return folder


@pytest.fixture
def typed(
    notes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Return a function that runs `redline …` in that folder and returns exit code, stdout and stderr."""
    from redline.cli.main import main

    before = dict(os.environ)
    monkeypatch.chdir(notes)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["redline", *words])
        status: Any = 0
        try:
            main()
        except SystemExit as leave:
            status = leave.code or 0
        return (status, *capsys.readouterr())

    yield run
    os.environ.clear()
    os.environ.update(before)


def recipe_and_overrides(words: tuple[str, ...]) -> tuple[str, list[str], dict[str, Any]]:
    parameters = VERBS["train"].make_context("train", list(words[1:])).params
    given = parameters["recipe"] or []
    names = [word for word in given if "=" not in word]
    assert len(names) <= 1
    return names[0] if names else "quickstart", [word for word in given if "=" in word], parameters


def test_there_is_something_to_test() -> None:
    assert {example.words[0] for example in EXAMPLES} >= {*VERBS}, "every verb is shown"
    assert FAILING
    assert DRY_RUNS


@pytest.mark.parametrize("example", TYPED, ids=str)
def test_a_command_is_understood(example: Example, notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(notes)
    verb, *words = example.words
    assert verb in VERBS
    VERBS[verb].make_context(verb, words)  # raises for what is no option, or no value for one
    inner = getattr(VERBS[verb], "commands", {})
    if words and words[0] in inner:
        inner[words[0]].make_context(words[0], words[1:])
    if verb == "train":
        name, overrides, parameters = recipe_and_overrides(example.words)
        assert load(name, overrides).recipe
        if parameters["resume"]:
            assert all(key.startswith(RESUMABLE) for key in overrides)


@pytest.mark.parametrize("example", HELP, ids=str)
def test_help_is_given(example: Example, typed: Any) -> None:
    status, out, _ = typed(*example.words)
    assert status == 0
    assert "redline" in out


@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.words == ("recipes",)], ids=str)
def test_the_list_of_recipes_is_the_one_shown(example: Example, typed: Any) -> None:
    assert typed(*example.words)[:2] == (0, "\n".join(example.output) + "\n")


@pytest.mark.parametrize("example", [e for e in TYPED if e.words[0] == "keys" and e.output], ids=str)
def test_a_key_is_explained_as_shown(example: Example, typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert typed(*example.words)[:2] == (0, "\n".join(example.output).rstrip("\n") + "\n")


@pytest.mark.parametrize("example", FAILING, ids=str)
def test_a_mistake_is_answered_as_shown(example: Example, typed: Any) -> None:
    status, _, err = typed(*example.words)
    assert status in (1, 2)
    assert err == "\n".join(example.output) + "\n"


@pytest.mark.parametrize("example", DRY_RUNS, ids=str)
def test_a_dry_run_prints_a_plan(example: Example, typed: Any) -> None:
    name, overrides, _ = recipe_and_overrides(example.words)
    cheap = ["train.device=cpu"]
    if load(name, overrides).recipe.data.source == "embedded":
        cheap += ["data.source=notes", "data.tokenizer=bytes"]
    status, _, err = typed(*example.words, *cheap)
    assert status == 0
    assert " parameters · " in err
    shown = [line for line in example.output if line.startswith("warning")]
    warnings = [line for line in err.splitlines() if line.startswith("warning")]
    assert [line for line in warnings if "epochs and may" not in line] == shown, "the notes are tiny"
    chosen = {line.split(" = ")[0].strip() for line in err.splitlines() if " = " in line and "GFLOP" not in line}
    assert {line.split(" = ")[0].strip() for line in example.output if re.match(r"  \w+\.\w+ = ", line)} <= chosen


def every_key() -> set[str]:
    own = {f"{job}.{key}" for job in JOBS for key in known_keys(options_of(job))}
    return {*known_keys(Recipe)} | own


def test_every_recipe_key_is_listed_with_its_default() -> None:
    rows = [(code(key)[0], code(default)[0]) for key, default, *_ in table("keys.md", "| key |")]
    listed = dict(rows)
    assert len(rows) == len(listed), "no key twice"
    assert set(listed) == every_key()
    for key, default in listed.items():
        job = key.split(".")[0]
        value: Any = SimpleNamespace(**{job: options_of(job)()}) if job in JOBS else Recipe()
        for part in key.split("."):
            value = getattr(value, part)
        shown = parse_yaml(default, key)
        assert (tuple(shown) if isinstance(shown, list) else shown) == value, key


def test_every_alias_is_listed() -> None:
    rows = table("recipes.md", "| also accepted |")
    assert {alias: code(name)[0] for aliases, name in rows for alias in code(aliases)} == ALIASES


def test_every_auto_is_explained() -> None:
    """The keys whose default is `auto` are those that the plan resolves, and `size`."""
    explained = set()
    for key, _ in table("recipes.md", "| key |"):
        section = code(key)[0].split(".")[0]
        explained |= {name if "." in name else f"{section}.{name}" for name in code(key)}
    automatic = {code(key)[0] for key, default, *_ in table("keys.md", "| key |") if code(default) == ["auto"]}
    assert automatic - explained == set()
    assert explained - automatic == {"model.size"}


def test_an_unknown_key_in_an_example_would_be_found(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(notes)
    with pytest.raises(RecipeError):
        test_a_command_is_understood(Example("", ("train", "small.yaml", "train.stepz=3"), ()), notes, monkeypatch)
    with pytest.raises(Exception, match="--colour"):
        test_a_command_is_understood(Example("", ("sample", "--colour"), ()), notes, monkeypatch)
    with pytest.raises(UserError, match="--weights"):
        test_a_command_is_understood(Example("", ("eval", "--weights", "mean"), ()), notes, monkeypatch)


def test_the_worked_figures_follow_from_the_recipe() -> None:
    from redline.hardware.machine import Machine
    from redline.hardware.specs import SPECS
    from redline.recipe.resolve import DataFacts, resolve

    card = Machine("cuda", "NVIDIA H200", 140 << 30, 16, (9, 0), fast_bf16=True)
    facts = DataFacts(50257, 10**10, 10**6, "", "gpt2", "")
    plan = resolve(load("pretrain-350m").recipe, card, facts)
    page = (ROOT / "docs/numbers.md").read_text(encoding="utf-8")
    peak, useful, causal = SPECS["h200"].bf16, plan.flops.useful, plan.flops.causal
    figures = [
        f"**{plan.shape.parameters:,}**",
        f"{plan.shape.matmul_parameters:,}",
        f"{6 * plan.shape.matmul_parameters:,}",
        f"{useful / 1e9:.3f} GFLOP",
        f"{causal / 1e9:.3f} GFLOP",
        f"{peak / 1e12:.0f} TFLOP/s",
        f"= {peak / causal / 1e3:.0f}k tokens/s",
        f"= {peak / useful / 1e3:.0f}k tokens/s",
        f"{useful / causal:.0%}".replace("%", " %"),
        *(f"{part:.3f} GiB" for part in plan.memory.gib().values()),
    ]
    assert [figure for figure in figures if figure not in page] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name == "docs"], ids=lambda page: page.name)
def test_a_page_is_short_and_its_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST_PAGE or page.name in REFERENCE
    targets = [target for target in re.findall(r"\]\(([^)#]+)", text) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_index_and_site_name_every_page() -> None:
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", index)) == pages - {"README.md"}
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = [name for name in _names(settings["nav"]) if not name.startswith("repository/")]
    assert sorted(listed) == sorted(pages)


def _names(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [name for part in (entry.values() if isinstance(entry, dict) else entry) for name in _names(part)]


def test_every_question_is_answered_briefly_with_a_command() -> None:
    text = (ROOT / "docs/how-do-i.md").read_text(encoding="utf-8")
    questions = re.findall(r"^### (.+)\n((?:(?!##).*\n)+)", text, re.MULTILINE)
    assert len(questions) >= 40
    for question, answer in questions:
        lines = [line for line in answer.splitlines() if line and not line.startswith("```")]
        assert len(lines) <= LONGEST_ANSWER, question
        assert blocks(answer, "console") or blocks(answer, "python"), question
        assert f"[{question}](#" in text, "the index has it"
