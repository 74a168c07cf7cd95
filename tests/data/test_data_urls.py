"""Sources behind a URL: the tokens of a local copy, in bounded memory, known by the versions of the files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from redline import remote
from redline.data import downloads
from redline.data.prepare import prepare_cached
from redline.data.sources import Reading, ReadStats, prepared_folder, source_bytes, source_documents, source_identity
from redline.errors import UserError
from stores import BUCKET, ObjectStore, object_store

URL = f"gs://{BUCKET}/text"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[ObjectStore]]:
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "_PAUSE_S", 0.0)
    with object_store() as found:
        downloads.remote_files.cache_clear()
        yield found
        downloads.remote_files.cache_clear()


def put(store: type[ObjectStore], folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            store.objects[f"{BUCKET}/text/{path.relative_to(folder).as_posix()}"] = path.read_bytes()
    downloads.remote_files.cache_clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "local"
    (folder / "more").mkdir(parents=True)
    for number in range(70):
        (folder / "more" / f"{number:02d}.txt").write_text(f"Document {number} of a folder.\n" * 20)
    rows = [json.dumps({"text": f"Row {number} of a table."}) for number in range(30)]
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    (folder / "empty.txt").touch()
    (folder / ".hidden").write_text("not text to train on")
    return folder


def test_a_url_has_the_tokens_of_a_local_copy(store: Any, folder: Path) -> None:
    put(store, folder)
    there, here = prepare_cached(URL, "bytes"), prepare_cached(str(folder), "bytes")
    assert there.fingerprint == here.fingerprint
    assert source_bytes(URL) == sum(path.stat().st_size for path in folder.rglob("[!.]*") if path.is_file())
    reads = [path for kind, path in store.requests if kind == "read"]
    assert len(reads) == len({*reads}) == 72, "each file is read once, hidden and empty ones never"
    store.requests.clear()
    downloads.remote_files.cache_clear()
    assert prepare_cached(URL, "bytes").fingerprint == there.fingerprint
    assert {kind for kind, _ in store.requests} == {"list"}


def test_rows_of_parquet(store: Any, tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "local").mkdir()
    pq.write_table(pa.table({"text": [f"row {n}" for n in range(9)]}), tmp_path / "local/rows.parquet")
    put(store, tmp_path / "local")
    documents = source_documents(f"{URL}/rows.parquet", ReadStats(URL))
    assert [document.text for document in documents] == [f"row {n}" for n in range(9)]  # type: ignore[union-attr]


def test_a_large_file_is_copied_in_chunks(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "CHUNK_BYTES", 1000)
    content = b"A line of some text.\n" * 1000
    store.objects[f"{BUCKET}/text/one.txt"] = content
    answers = [OSError("500 internal error"), "partial", None, ConnectionResetError("reset"), None]

    def fault(kind: str, path: str) -> str | None:
        answer = answers.pop() if kind == "read" and answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer

    store.fault = staticmethod(fault)
    [document] = source_documents(f"{URL}/one.txt", ReadStats(URL))
    assert document.text == content.decode()  # type: ignore[union-attr]
    assert store.largest == 1000
    assert answers == []


def test_the_identity_follows_the_versions(store: Any, folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    put(store, folder)
    before = source_identity(URL)
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "another machine"))
    put(store, folder)
    assert source_identity(URL) == before, "it names no path and no time of this machine"
    assert str(tmp_path) not in json.dumps(before)
    name = prepared_folder(URL, "bytes", Reading()).name
    store.objects[f"{BUCKET}/text/more/00.txt"] = b"Another document of the same folder.\n"
    downloads.remote_files.cache_clear()
    assert source_identity(URL) != before
    assert prepared_folder(URL, "bytes", Reading()).name != name


def test_a_file_that_changes_while_it_is_read_is_refused(store: Any, folder: Path) -> None:
    put(store, folder)
    files = list(downloads.remote_files(URL))
    store.objects[f"{BUCKET}/text/{files[0].name}"] = b"x" * (files[0].size or 0)
    with pytest.raises(UserError, match="changed while it was read"):
        downloads.download(URL, files[0])
    assert not downloads.local_copy(URL, files[0]).exists()


def test_what_is_prepared_needs_no_store(store: Any, folder: Path) -> None:
    put(store, folder)
    before = prepare_cached(URL, "bytes").fingerprint
    downloads.remote_files.cache_clear()

    def refuse(kind: str, path: str) -> None:
        raise ConnectionResetError("no network")

    store.fault = staticmethod(refuse)
    assert prepare_cached(URL, "bytes").fingerprint == before


@pytest.mark.parametrize(
    ("name", "sentence"), [("train.bin", "prepared tokens"), ("train-00000.tok", "prepared tokens"), ("", "no files")]
)
def test_what_is_no_text_is_refused(store: Any, name: str, sentence: str) -> None:
    if name:
        store.objects[f"{BUCKET}/text/{name}"] = b"x"
    with pytest.raises(UserError, match=sentence):
        list(source_documents(URL, ReadStats(URL)))


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("https://me:password-1234@host/a.txt", "login or a signature"),
        ("https://host/a.txt?X-Amz-Signature=password-1234&b=1", "login or a signature"),
        ("https://host/a.txt?token=password-1234", "login or a signature"),
        ("ftp://host/a.txt", "not a URL of a known kind"),
        ("gs://nothing/text", "bucket nothing does not exist"),
    ],
)
def test_addresses_with_secrets_and_mistakes(store: Any, url: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as refused:
        list(source_documents(url, ReadStats(url)))
    assert "password-1234" not in refused.value.message()


def test_a_run_trains_on_a_url(store: Any, world: Any, folder: Path, tmp_path: Path) -> None:
    put(store, folder)
    trainer = world.run(tmp_path / "run", f"data.source={URL}", "train.steps=2")
    local = world.run(tmp_path / "local-run", f"data.source={folder}", "train.steps=2")
    assert trainer.outcome.exit_code == 0
    losses = [[e["loss"] for e in one.monitor.view.events if e["type"] == "step"] for one in (trainer, local)]
    assert losses[0] == losses[1]
