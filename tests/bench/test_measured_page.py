"""docs/figures.md: every result file is on it, figures follow from the files, and changed code is noticed."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import figures, staleness
from benchmarks.figures import BEGIN, END, FIGURES, PAGE, README, README_ROWS, RESULTS

PACKAGE = Path(__file__).parents[2] / staleness.PACKAGE
NAMES = sorted(path.stem for path in RESULTS.glob("*.json"))


def test_the_page_and_the_table_of_readme_are_what_the_script_writes() -> None:
    since = figures.stored_since(PAGE.read_text(encoding="utf-8"))
    stale = [path.name for path, text in figures.generated_files(since).items() if path.read_text("utf-8") != text]
    assert stale == [], "run `python -m benchmarks.figures`"


def test_every_result_file_is_on_the_page_with_its_command_and_modules() -> None:
    assert {figure.file for figure in FIGURES.values()} == set(NAMES)
    since = figures.stored_since(PAGE.read_text(encoding="utf-8"))
    assert set(since) == set(NAMES)
    assert staleness.UNKNOWN not in since.values()
    missing = {module for name in NAMES for module in figures.depends_of(name) if not (PACKAGE / module).exists()}
    assert missing == set()


def test_readme_has_at_most_ten_rows() -> None:
    assert len(README_ROWS) <= 10
    assert len(figures.readme_table().splitlines()) == 2 + len(README_ROWS)


def test_a_changed_result_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    name = FIGURES["bf16"].file
    before = figures.readme_table()
    changed = {**figures.read(name), "rows": [{**row} for row in figures.read(name)["rows"]]}
    changed["rows"][0]["tokens_per_s"] = 123_456.0
    monkeypatch.setattr(figures, "read", lambda file, read=figures.read: changed if file == name else read(file))
    assert "123,456" in figures.readme_table()
    assert "123,456" not in before


def test_only_the_part_between_the_markers_of_readme_is_replaced() -> None:
    page = f"# Title\n\n{BEGIN}\nold\n{END}\n\nrest\n"
    new = figures.with_table(page)
    assert new.startswith("# Title\n\n")
    assert new.endswith("\n\nrest\n")
    assert "old" not in new
    assert figures.with_table(new) == new
    assert figures.with_table("no markers\n") == "no markers\n"
    assert README.read_text("utf-8").count(BEGIN) in (0, 1)


def test_a_result_may_name_its_modules_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    own: dict[str, Any] = {"depends": ["kernels/muon.py"], "git": {"commit": "0" * 40}}
    monkeypatch.setattr(figures, "read", lambda _: own)
    assert figures.depends_of("throughput-x") == ("kernels/muon.py",)
    assert figures.code_since("throughput-x") == "unknown", "there is no such commit"


BEFORE = '''
"""A module."""
def scale(values, by):
    """Multiply."""
    return [value * by for value in values]
class Sum:
    def __init__(self): self.total = 0
    def add(self, value): self.total = self.total + value
LIMIT = 3
'''
UNCHANGED = '''
class Total:
    """Moved, with another name, a comment and types."""
    def __init__(self) -> None: self.total = 0
    def add(self, number: int) -> None: self.total = self.total + number  # a comment
LIMIT: int = 3
'''
SCALED = "def scale_all(numbers, factor):\n    return [number * factor for number in numbers]\n"


def repository(folder: Path, *versions: dict[str, str]) -> list[str]:
    """Make a repository with a commit for each version of the package, and return the commits."""
    commits = []

    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    for version in versions:
        for path in (folder / staleness.PACKAGE).glob("*.py"):
            path.unlink()
        for name, text in version.items():
            path = folder / staleness.PACKAGE / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        git("add", "-A")
        git("commit", "-qm", "a version")
        commits.append(git("rev-parse", "HEAD"))
    return commits


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(staleness, "ROOT", tmp_path)
    for function in (staleness._package, staleness._compared):
        function.cache_clear()
    yield tmp_path
    for function in (staleness._package, staleness._compared):
        function.cache_clear()


def test_moves_and_renames_are_no_change(elsewhere: Path) -> None:
    first, _ = repository(elsewhere, {"old.py": BEFORE}, {"total.py": UNCHANGED, "scale.py": SCALED})
    assert staleness.changes_since(first, ["total.py", "scale.py"]) == "unchanged"


@pytest.mark.parametrize(
    ("old", "new"),
    [("value * by", "value + by"), ("self.total + value", "self.total - value"), ("LIMIT = 3", "LIMIT = 4"),
     ("return [", "return sorted(["), ("self.total = 0", "self.total = 1")],
)  # fmt: skip
def test_other_changes_are_counted(elsewhere: Path, old: str, new: str) -> None:
    changed = BEFORE.replace(old, new).replace("in values]", "in values])" if "sorted" in new else "in values]")
    first, _ = repository(elsewhere, {"old.py": BEFORE}, {"new.py": changed})
    assert staleness.changes_since(first, ["new.py"]) == "changed: 1 of 4 definitions"


def test_a_call_of_another_known_function_is_a_change(elsewhere: Path) -> None:
    both = "def add(x): return x + 1\ndef sub(x): return x - 1\n"
    first, _ = repository(
        elsewhere,
        {"a.py": f"{both}def use(x): return add(x)\n"},
        {"a.py": f"{both}def use(x): return sub(x)\n"},
    )
    assert staleness.changes_since(first, ["a.py"]) == "changed: 1 of 3 definitions"


def test_without_a_history_nothing_is_known(elsewhere: Path) -> None:
    assert staleness.changes_since("0" * 40, ["a.py"]) == "unknown", "a wheel has no repository"
    assert staleness.first_commit(elsewhere / "result.json") is None
    repository(elsewhere, {"a.py": BEFORE})
    staleness._package.cache_clear()
    staleness._compared.cache_clear()
    assert staleness.changes_since("0" * 40, ["a.py"]) == "unknown", "a shallow clone lacks the commit"
