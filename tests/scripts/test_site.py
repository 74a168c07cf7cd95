"""The site of the pages: links that leave docs/, requests to other hosts, and what is said of mistakes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def site(module: Callable[[str], ModuleType]) -> Any:
    return module("site_builder")


def test_without_mkdocs_it_says_what_to_run(
    site: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(site, "find_spec", lambda name: None)
    assert site.main() == 1
    said = capsys.readouterr().err
    assert "`make docs`" in said
    assert "Traceback" not in said


def test_links_to_the_repository_lead_into_the_site(site: Any) -> None:
    text = "[a](train.md#resuming) [b](../CONTRIBUTING.md#map) [c](../examples/classifier_job) [d](https://x.org/a)"
    assert site.with_links_of_the_site(text, "docs/plan.md") == (
        "[a](train.md#resuming) [b](repository/CONTRIBUTING.md#map) "
        "[c](repository/examples/classifier_job/README.md) [d](https://x.org/a)"
    )
    back = site.with_links_of_the_site("[a](docs/train.md) [b](docs/nothing.md)", "CONTRIBUTING.md")
    assert back == "[a](../train.md) [b](docs/nothing.md)", "mkdocs names what leads nowhere"


def test_what_pages_link_to_is_taken_along(site: Any) -> None:
    found = site.outside([f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")])
    assert {"CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"} <= set(found)
    assert not [path for path in found if path.startswith("docs/")]


def test_lists_and_tables_get_the_blank_line_that_mkdocs_needs(site: Any) -> None:
    text = "Text:\n- one\n  more\n- two\n| a |\n|---|\n```\nx\n- y\n```\n"
    assert site.for_mkdocs(text) == "Text:\n\n- one\n  more\n- two\n\n| a |\n|---|\n```\nx\n- y\n```\n"
    assert site.for_mkdocs("A\n\n- b\n") == "A\n\n- b\n"
    assert site.for_mkdocs("| `a\\|b` \\| c |\n") == "| `a|b` \\| c |\n"


@pytest.mark.parametrize(
    ("page", "asked"),
    [
        ('<script src="https://cdn.example/x.js"></script>', True),
        ('<link rel="stylesheet" href="//fonts.example/css">', True),
        ("<img src=https://example.org/a.png>", True),
        ("<style>body{background:url(https://example.org/b.png)}</style>", True),
        ('<a href="https://example.org/">read</a>', False),
        ('<link rel="canonical" href="https://example.org/">', False),
        ('<script src="assets/x.js"></script>', False),
    ],
)
def test_a_request_to_another_host_is_found(site: Any, tmp_path: Path, page: str, asked: bool) -> None:
    (tmp_path / "a.html").write_text(page)
    assert bool(site.requests(tmp_path)) is asked


@pytest.mark.parametrize(
    ("file", "change", "named"),
    [
        ("docs/plan.md", "\n[x](nothing.md)\n", "nothing.md"),
        ("docs/plan.md", "\n[x](train.md#no-such-part)\n", "no-such-part"),
        ("docs/unlisted.md", "# Unlisted\n", "unlisted.md"),
    ],
)
def test_a_broken_link_ends_the_build(
    site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, change: str, named: str
) -> None:
    pytest.importorskip("material", reason="the extra docs is not installed")
    root = tmp_path / "checkout"
    for name in ("docs", "scripts", "benchmarks", "examples", "src"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [*ROOT.glob("*.md"), ROOT / "mkdocs.yml", ROOT / "Dockerfile"]:
        shutil.copy(path, root)
    with (root / file).open("a", encoding="utf-8") as page:
        page.write(change)
    monkeypatch.setattr(site, "ROOT", root)
    assert named in "\n".join(site.build(tmp_path / "site"))
