from __future__ import annotations

from pathlib import Path

import pytest

from redline.data.text import embedded_documents, embedded_files, file_documents, is_validation
from redline.errors import UserError


def test_embedded_corpus_is_deterministic_and_about_13_mb() -> None:
    first, second = list(embedded_documents()), list(embedded_documents())
    assert first == second
    assert 10e6 < sum(len(document.text.encode()) for document in first) < 16e6
    assert len({document.name for document in first}) == len(first)


def test_embedded_corpus_is_documentation_and_library_without_tables() -> None:
    names = [file.name for file in embedded_files()]
    assert {"argparse.py", "asyncio/events.py"} <= set(names)
    assert not [name for name in names if "site-packages" in name or name.startswith(("encodings/", "_sysconfigdata"))]
    assert any(document.name.startswith("topics/") for document in embedded_documents())


def test_library_comes_before_tests_of_the_library() -> None:
    tests = [name.startswith("test/") for name in (file.name for file in embedded_files())]
    assert tests == sorted(tests)


def test_folder_is_read_by_path_recursively_without_hidden_or_empty_files(tmp_path: Path) -> None:
    source = tmp_path / "texts"
    (source / "b").mkdir(parents=True)
    (source / ".git").mkdir()
    (source / "c.md").write_text("three")
    (source / "b" / "z.txt").write_bytes(b"\xef\xbb\xbftwo\r\nlines")
    (source / "a.txt").write_text("one")
    (source / "empty.txt").touch()
    (source / ".git" / "config").write_text("no")
    read = [(document.name, document.text) for document in file_documents(source)]
    assert read == [("a.txt", "one"), ("b/z.txt", "two\r\nlines"), ("c.md", "three")]


@pytest.mark.parametrize("content", [b"text\0more", b"\xff\xfe\x41", b"caf\xe9"])
def test_what_is_not_text_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "good.txt").write_text("fine")
    (tmp_path / "odd.dat").write_bytes(content)
    with pytest.raises(UserError, match=r"odd\.dat"):
        list(file_documents(tmp_path))


def test_nothing_to_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.txt").touch()
    for name, problem in (("folder", "no text"), ("empty.txt", "empty"), ("missing", "no such file")):
        with pytest.raises(UserError, match=problem):
            list(file_documents(tmp_path / name))


def test_split_follows_the_name_and_the_fraction() -> None:
    names = [f"document {i}" for i in range(4000)]
    held_out = {name for name in names if is_validation(name, 0.05)}
    assert held_out == {name for name in reversed(names) if is_validation(name, 0.05)}
    assert 120 < len(held_out) < 280
    assert held_out < {name for name in names if is_validation(name, 0.2)}
    assert not any(is_validation(name, 0.0) for name in names)
    assert all(is_validation(name, 1.0) for name in names)
