from __future__ import annotations

from pathlib import Path

import pytest

from redline.data.sources import Document, ReadStats, embedded_documents, embedded_files, source_documents
from redline.data.splits import is_held_out, split_documents
from redline.errors import UserError


def read(path: Path) -> list[tuple[str, str]]:
    documents = list(source_documents(str(path), ReadStats(str(path))))
    assert all(isinstance(document, Document) for document in documents), "short ones are held in memory"
    return [(document.name, "".join(document.chunks())) for document in documents]


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
    assert read(source) == [("a.txt", "one"), ("b/z.txt", "two\r\nlines"), ("c.md", "three")]


def test_links_to_folders_are_entered_but_for_those_that_lead_back(tmp_path: Path) -> None:
    source, other = tmp_path / "texts", tmp_path / "other"
    (source / "b").mkdir(parents=True)
    other.mkdir()
    (source / "a.txt").write_text("one")
    (other / "c.txt").write_text("two")
    (source / "linked").symlink_to(other)
    (source / "b/back").symlink_to(source)
    (source / "gone").symlink_to(tmp_path / "nowhere")
    assert read(source) == [("a.txt", "one"), ("linked/c.txt", "two")]


@pytest.mark.parametrize("content", [b"text\0more", b"\xff\xfe\x41", b"caf\xe9"])
def test_what_is_not_text_is_refused_alone_and_left_out_among_others(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "odd.dat").write_bytes(content)
    with pytest.raises(UserError, match=r"odd\.dat: (.* is binary|not UTF-8)"):
        read(tmp_path / "odd.dat")
    with pytest.raises(UserError, match=r"all of its 1 files are binary|1 of 1 files are not UTF-8; the first is odd"):
        read(tmp_path)
    (tmp_path / "good.txt").write_text("fine")
    stats = ReadStats("")
    assert [document.name for document in source_documents(str(tmp_path), stats)] == ["good.txt"]
    assert stats.binary_files == 1
    assert (stats.first_binary_file or stats.first_not_utf8_file or "").startswith("odd.dat")


def test_nothing_to_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.txt").touch()
    for name, problem in (("folder", "no text"), ("empty.txt", "empty"), ("missing", "no such file")):
        with pytest.raises(UserError, match=problem):
            read(tmp_path / name)


def test_split_follows_the_text_and_the_fraction() -> None:
    texts = [Document(f"row {i}", f"document {i}").digest() for i in range(4000)]
    held_out = {text for text in texts if is_held_out(text, 0.05)}
    assert held_out == {text for text in reversed(texts) if is_held_out(text, 0.05)}
    assert 120 < len(held_out) < 280
    assert held_out < {text for text in texts if is_held_out(text, 0.2)}
    assert not any(is_held_out(text, 0.0) for text in texts)
    assert all(is_held_out(text, 1.0) for text in texts)


def test_copies_are_on_one_side() -> None:
    """Whatever they are called, and whichever source they are in."""
    texts = [f"text {number}" for number in range(300)]
    one, other = ([Document(f"{name}:{n}", text) for n, text in enumerate(texts)] for name in ("a.jsonl", "b.jsonl"))
    sides: dict[str, set[str]] = {"train": set(), "val": set()}
    for documents in (one, [*other, *one]):
        for split, document in split_documents(documents, 0.2):
            sides[split].add(document.text)
    assert len(sides["val"]) > 30
    assert not sides["train"] & sides["val"]
