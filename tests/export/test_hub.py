"""Pushing exports and reading `hf://` addresses, against a hub on the loopback interface that also fails."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_hub import TOKEN, FakeHub, Repository, serve
from typer.testing import CliRunner

from redline.errors import RecipeError, UserError
from redline.export.push import push
from redline.hub import parse_address
from redline.models.pretrained import open_base

hub_package = pytest.importorskip("huggingface_hub")
pytest.importorskip("transformers")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """Serve a hub, and point huggingface_hub at it, which has read its environment at import."""
    from huggingface_hub import constants, file_download, hf_api
    from huggingface_hub.utils import _http

    with serve() as fake:
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", fake.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", fake.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(hf_api.api, "endpoint", fake.url)
        monkeypatch.setattr(time, "sleep", lambda _: None)
        assert file_download is not None
        assert _http is not None
        _http.close_session()
        yield fake
        _http.close_session()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    out = tmp_path / "export"
    out.mkdir()
    (out / "README.md").write_text("---\nlibrary_name: transformers\n---\n# A model\n")
    (out / "config.json").write_text("{}")
    (out / "model-00001-of-00002.safetensors").write_bytes(b"first" * 1000)
    (out / "model-00002-of-00002.safetensors").write_bytes(b"second" * 1000)
    return out


def contents(repository: Repository) -> dict[str, bytes]:
    return {name: data for name, data in repository.commits[-1][1].items() if not name.startswith(".")}


def test_a_push_is_one_private_commit(hub: FakeHub, folder: Path) -> None:
    done = push(folder, "me/model", public=False, message="step 2")
    repository = hub.repositories["models", "me/model"]
    assert repository.private
    assert done.private
    assert len(repository.commits) == 2, "making the repository, and the files"
    assert contents(repository) == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert done.commit == repository.commits[-1][0]
    again = push(folder, "me/model", public=False, message="step 2")
    assert again.commit == done.commit, "nothing has changed"
    assert not push(folder, "me/open", public=True, message="x").private


@pytest.mark.parametrize("fault", [500, 503, "reset", "lost"])
@pytest.mark.parametrize("place", ["repos/create", "preupload", "objects/batch", "upload/", "commit/main"])
def test_a_push_survives_a_fault_anywhere(hub: FakeHub, folder: Path, place: str, fault: int | str) -> None:
    hub.faults = [(place, fault)]
    push(folder, "me/model", public=False, message="step 2")
    repository = hub.repositories["models", "me/model"]
    assert not hub.faults, "the fault was met"
    assert len(repository.commits) == 2, "one commit, also if its answer was lost"
    assert contents(repository) == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_push_that_breaks_off_is_continued(hub: FakeHub, folder: Path) -> None:
    hub.faults = [("commit/main", 500)] * 100
    with pytest.raises(UserError, match="broke off") as caught:
        push(folder, "me/model", public=False, message="step 2")
    assert TOKEN not in caught.value.message()
    assert len(hub.repositories["models", "me/model"].commits) == 1, "readers see nothing of it"
    sent = hub.count("PUT", "upload/")
    hub.faults = []
    push(folder, "me/model", public=False, message="step 2")
    assert hub.count("PUT", "upload/") == sent == 2, "the large files are there already"
    assert contents(hub.repositories["models", "me/model"]).keys() == {path.name for path in folder.iterdir()}


def test_refusals_are_sentences(hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.faults = [("repos/create", 403)]
    with pytest.raises(UserError, match="HTTP 403") as caught:
        push(folder, "me/model", public=False, message="x")
    assert TOKEN not in caught.value.message()
    with pytest.raises(UserError, match="is not a repository"):
        push(folder, "just-a-name", public=False, message="x")
    monkeypatch.setattr(hub_package, "get_token", lambda: None)
    with pytest.raises(UserError, match="token"):
        push(folder, "me/model", public=False, message="x")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        push(folder, "me/model", public=False, message="x")


def test_the_command_lists_then_pushes_and_resumes(
    hub: FakeHub, trained: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from redline.cli.main import app

    run, _ = trained("model.qk_norm=false")
    words = ["export", str(run), "--out", str(tmp_path / "out"), "--push", "me/model", "--json"]

    def call(*more: str) -> Any:
        reply = CliRunner().invoke(app, [*words, *more])
        assert TOKEN not in reply.output
        return reply

    listed = json.loads(call("--dry-run").stdout)["pushed"]
    assert listed["files"].keys() >= {"model.safetensors", "README.md", "config.json"}
    assert not hub.requests
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    early = CliRunner().invoke(app, ["export", str(run), "--out", str(tmp_path / "early"), "--push", "me/model"])
    assert early.exit_code != 0
    assert not (tmp_path / "early").exists(), "what a push lacks is said before anything is exported"
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    hub.faults = [("commit/main", 500)] * 100
    assert call().exit_code != 0
    hub.faults = []
    reply = call()
    assert reply.exit_code == 0, reply.output
    assert json.loads(reply.stdout)["pushed"]["commit"] == hub.repositories["models", "me/model"].commits[-1][0]
    other = CliRunner().invoke(app, [*words, "--dtype", "bf16"])
    assert isinstance(other.exception, UserError) or "another export" in other.output


def test_a_pushed_model_is_a_base_and_a_start(
    hub: FakeHub, trained: Callable[..., Any], tmp_path: Path, tiny_base: Path
) -> None:
    from redline.evaluate.init_from import open_initial
    from redline.export.folder import export_run

    run, _ = trained("model.qk_norm=false")
    export_run(run, None, tmp_path / "out")
    push(tmp_path / "out", "me/model", public=False, message="x")
    commit = hub.repositories["models", "me/model"].commits[-1][0]
    initial = open_initial("hf://me/model", tmp_path)
    assert initial.source == f"hf://me/model@{commit}", "the lock names these weights, whatever is pushed later"
    assert initial.fingerprint == open_initial(str(tmp_path / "out"), tmp_path).fingerprint
    assert open_initial(initial.source, tmp_path).fingerprint == initial.fingerprint

    push(tiny_base, "me/base", public=False, message="x")
    base = open_base("hf://me/base@main")
    assert base.fingerprint == open_base(str(tiny_base)).fingerprint
    with pytest.raises(UserError, match="revision"):
        open_base("hf://me/base@v9")
    with pytest.raises(UserError, match="no model of that name"):
        open_base("hf://me/nothing")


def test_a_download_that_breaks_off_is_continued(hub: FakeHub, tiny_base: Path) -> None:
    push(tiny_base, "me/base", public=False, message="x")
    hub.faults = [("model.safetensors", "reset"), ("config.json", 500), ("revision/main", 503)]
    assert open_base("hf://me/base").fingerprint == open_base(str(tiny_base)).fingerprint
    assert not hub.faults


def test_data_of_a_repository(hub: FakeHub) -> None:
    from redline.data.sources import ReadStats, source_documents, source_identity, source_rows

    data = Repository()
    hub.repositories["datasets", "me/texts"] = data
    rows = [{"text": f"document {number}", "question": "q", "answer": "a"} for number in range(5)]
    data.commit({"train.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode(), "README.md": b"# Not data"})
    first = data.commits[-1][0]
    data.commit({"train.jsonl": json.dumps(rows[0]).encode() + b"\n"})
    texts = [document.text for document in source_documents("hf://me/texts", ReadStats("here"))]
    assert texts == ["document 0"]
    old = f"hf://datasets/me/texts@{first}"
    assert len(list(source_documents(old, ReadStats("here")))) == 5
    assert len(list(source_rows(old, ReadStats("here"), ["question", "answer"], fix="", instead=""))) == 5
    assert source_identity(old) != source_identity("hf://me/texts")


def test_addresses_in_recipes() -> None:
    from redline.recipe.load import load

    assert parse_address("hf://me/model@v1") is not None
    assert parse_address("me/model") is None
    assert load("quickstart", ["data.source=hf://me/texts@v1"]).recipe.data.source == "hf://me/texts@v1"
    for wrong in ("data.source=https://me:secret@example.org/x", "data.source=hf://me", "data.tokenizer=hf://me/x"):
        with pytest.raises(RecipeError) as caught:
            load("quickstart", [wrong])
        assert "secret" not in str(caught.value)
