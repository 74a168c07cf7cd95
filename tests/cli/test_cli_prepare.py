"""`redline prepare`: tokens, summary, preview of documents, and error messages."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from redline.cli.progress import PreparationBar
from redline.data.sources import Progress
from redline.data.tokens import open_tokens


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("REDLINE_GPT2", raising=False)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    good = [json.dumps({"text": f"Row {i} has a text.\n" * 9, "body": "b"}) for i in range(80)]
    path.write_text("\n".join([*good, good[0], "{bad", '{"body": "x"}']) + "\n")
    return path


def test_a_folder_becomes_tokens(inside: Any, corpus: Path, tmp_path: Path) -> None:
    answer = inside("prepare", str(corpus), "--out", "tokens", "--tokenizer", "train:300", "--val-fraction", "0.1")
    assert answer.code == 0, answer.err
    data = open_tokens(tmp_path / "tokens")
    assert data.val is not None
    assert f"{len(data.train):,} tokens" in answer.out
    assert data.fingerprint in answer.out
    assert len(answer.err.splitlines()) == 1, "where there is no terminal: one last line"
    assert "tokens in" in answer.err


def test_the_number_of_workers_does_not_change_the_tokens(inside: Any, rows: Path) -> None:
    words = ("prepare", str(rows), "--tokenizer", "train:300", "--json")
    answers = [json.loads(inside(*words, "--out", f"o{n}", "--workers", str(n)).out) for n in (1, 2)]
    assert answers[0]["fingerprint"] == answers[1]["fingerprint"]
    assert answers[0]["train"]["tokens"] == answers[1]["train"]["tokens"]


@pytest.mark.parametrize("dedup", [False, True])
def test_omissions_are_reported(inside: Any, rows: Path, dedup: bool) -> None:
    words = ["prepare", str(rows), "--tokenizer", "bytes", *(["--dedup"] if dedup else [])]
    summary = json.loads(inside(*words, "--out", "a", "--json").out)
    counts = summary["counts"]
    assert (counts["rows"], counts["bad_rows"], counts["duplicates"]) == (83, 2, 1)
    assert counts["first_bad_row"] == "rows.jsonl:82: not JSON"
    assert summary["train"]["documents"] + summary["val"]["documents"] == 81 - dedup
    text = inside(*words, "--out", "b").out
    assert "2 of 83 skipped; the first is rows.jsonl:82: not JSON" in text
    assert ("1 dropped" if dedup else "1 counted and kept") in text


def test_a_preview_writes_nothing(inside: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("né 🙂\nsecond line\n" * 30)
    answer = inside("prepare", "a.txt", "--tokenizer", "bytes", "--preview", "2", "--ids")
    assert answer.code == 0, answer.err
    assert "<|endoftext|>│n│é│ │🙂│↵" in answer.out
    assert "256='<|endoftext|>'  110='n'  195+169='é'" in answer.out
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    shown = json.loads(inside("prepare", "a.txt", "--tokenizer", "bytes", "--preview", "1", "--json").out)["preview"]
    assert shown[0]["ids"][:5] == [256, 110, 195, 169, 32]
    assert "".join(shown[0]["texts"][1:7]) == "né 🙂\ns"


def test_a_preview_of_a_long_document_counts_its_first_piece(inside: Any, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("a line of text\n" * 100_000)
    answer = inside("prepare", "long.txt", "--tokenizer", "bytes", "--preview", "1", "--val-fraction", "0")
    assert "document 1: more than 1,048," in answer.out


def test_a_warning_if_no_text_is_held_out(inside: Any, tmp_path: Path) -> None:
    (tmp_path / "same.jsonl").write_text(100 * '{"text": "the same"}\n')
    assert "held out     nothing" in inside("prepare", "same.jsonl", "--out", "a", "--tokenizer", "bytes").out
    none = inside("prepare", "same.jsonl", "--out", "b", "--tokenizer", "bytes", "--val-fraction", "0")
    assert "held out" not in none.out
    small = ("quickstart", "data.tokenizer=bytes", "data.seq_len=16", "train.device=cpu", "--dry-run")
    assert "--val-fraction" in inside("train", *small, "data.source=a").message
    assert "data.val_fraction" in inside("train", *small, "data.source=same.jsonl").message
    assert "train.target_loss" in inside("train", *small, "data.source=a", "train.target_loss=3").message


def test_a_warning_for_keys_that_have_no_effect_on_tokens(inside: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text to learn from, " * 200)
    assert inside("prepare", "a.txt", "--out", "a", "--tokenizer", "bytes").code == 0
    small = ("quickstart", "data.tokenizer=bytes", "data.seq_len=16", "train.device=cpu")
    asked = ("data.dedup=true", "data.val_fraction=0.2")
    for command in (("train", *small, "--dry-run"), ("plan", *small)):
        answers = [inside(*command, f"data.source={source}", *asked) for source in ("a", "a.txt")]
        tokens, text = (answer.out + answer.message for answer in answers)
        assert "data.dedup has no effect" in tokens
        assert "data.val_fraction has no effect" in tokens
        assert "data.text_key" not in tokens
        assert "has no effect" not in text
    assert "has no effect" not in inside("plan", *small, "data.source=a").out


def test_sizes_of_a_tokenizer_are_numbers_and_its_file_lies_beside_the_tokens(inside: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text to learn from, " * 200)
    assert inside("prepare", "a.txt", "--out", "a", "--tokenizer", "train:1000").code == 0
    small = ("train", "quickstart", "data.seq_len=16", "train.device=cpu", "--dry-run")
    assert inside(*small, "data.source=a", "data.tokenizer=train:1k").code == 0
    (tmp_path / "a/tokenizer.json").rename(tmp_path / "own.json")
    assert inside("prepare", "a.txt", "--out", "b", "--tokenizer", "own.json").code == 0
    (tmp_path / "own.json").unlink()
    refused = inside(*small, "data.source=b")
    assert "Set data.tokenizer=b/tokenizer.json" in refused.err
    assert inside(*small, "data.source=b", "data.tokenizer=b/tokenizer.json").code == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_leaves_no_partial_folder(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "a.txt").write_text("some text to learn from, " * 200_000)
    command = [sys.executable, "-m", "redline", "prepare", "a.txt", "--out", "out/a", "--tokenizer", "train:4096"]
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may be run under nohup; what they start is not
    process = subprocess.Popen([*command, "--workers", "1"], cwd=tmp_path, stderr=subprocess.DEVNULL)
    signal.signal(signal.SIGHUP, before)
    while process.poll() is None and not (tmp_path / "out").exists():
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(timeout=60) == 1
    assert list((tmp_path / "out").iterdir()) == []


def test_a_terminal_shows_token_boundaries_in_colour(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from redline.cli.preview import show_document
    from redline.data.prepare import Preview, Span

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    spans = [Span("<|endoftext|>", (256,)), Span("ab", (1,)), Span("\x1bc", (2,)), Span("\t\n", (3,))]
    show_document(Preview(spans, 900, False), 1, ids=False)
    out = capsys.readouterr().out
    assert "900 tokens, the first 4 shown" in out
    assert out.count("\x1b[") >= 4, "each token has a background"
    assert "·c" in out, "what would move the cursor is shown as a dot"
    assert "→↵" in out


def test_the_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("redline.cli.progress._REDRAW_S", 0.0)
    with PreparationBar() as bar:
        bar(Progress("training the tokenizer", 0, None, 0))
        for done in (10, 60, 100):
            bar(Progress("preparing notes", done * 10**6, 100 * 10**6, done * 1000))
    err = capsys.readouterr().err
    assert "preparing notes" in err
    assert "/100.0 MB" in err
    assert "100k tokens in" in err.splitlines()[-1]


def test_cached_data_show_no_progress(capsys: Any) -> None:
    with PreparationBar():
        pass
    assert capsys.readouterr().err == ""


def write_parquet(path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pa.table({"body": ["a"], "title": ["b"]}), path)


@pytest.fixture
def mistakes(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "junk.txt").write_bytes(bytes(range(256)) * 10)
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"\x89PNG\0")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("keep me")
    (tmp_path / "some.txt").write_text("text enough\n" * 50)
    (tmp_path / "keys.jsonl").write_text('{"body": "x"}\n' * 3)
    write_parquet(tmp_path / "table.parquet")
    yield tmp_path
    assert (tmp_path / "full" / "mine").read_text() == "keep me"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["junk.txt"], 1, "junk.txt: the file is binary"),
        (["latin.txt"], 1, "latin.txt: not UTF-8 text (byte 3). Convert it, e.g. with `iconv"),
        (["empty.txt"], 1, "empty.txt: the file is empty. Give a file that holds text."),
        (["folder"], 1, "folder: the folder holds no text. Give a folder of text files."),
        (["pictures"], 1, "pictures: the folder holds no text: all of its 1 files are binary."),
        (["nothing.txt"], 1, "nothing.txt: no such file or folder. Check the path"),
        (["table.parquet"], 1, "the columns are body, title"),
        (["keys.jsonl"], 1, "3 of 3 rows cannot be used; the first is keys.jsonl:1: no 'text' field"),
        (["owner/name"], 1, "owner/name: no such file or folder"),
        (["some.txt", "--out", "full"], 1, "full: the path exists"),
        (["some.txt", "--out", "."], 1, ".: the path exists"),
        (["some.txt", "--tokenizer", "gpt2"], 1, "GPT-2 tokenizer's files are not on this machine"),
        (["some.txt", "--tokenizer", "train:9"], 1, "Write train:N with N of at least 257"),
        (["some.txt", "--tokenizer", "no.json"], 1, "no.json: no such tokenizer."),
        (["some.txt", "--val-fraction", "1.5"], 2, "--val-fraction"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes(inside: Any, mistakes: Path, words: list[str], code: int, sentence: str) -> None:
    options = [] if "--out" in words else ["--out", "out"]
    tokenizer = [] if "--tokenizer" in words else ["--tokenizer", "bytes"]
    answer = inside("prepare", *words, *options, *tokenizer)
    assert answer.code == code
    assert sentence in answer.message
    assert len(answer.err.splitlines()) == 1 or code == 2


def test_a_folder_or_a_preview_is_required(inside: Any, corpus: Path) -> None:
    answer = inside("prepare", str(corpus))
    assert answer.code == 2
    assert "--out" in answer.message


def test_tokens_are_refused_as_a_source(inside: Any, corpus: Path, tmp_path: Path) -> None:
    inside("prepare", str(corpus), "--out", "tokens", "--tokenizer", "bytes")
    answer = inside("prepare", "tokens", "--out", "again", "--tokenizer", "bytes")
    assert answer.code == 2
    assert "data.source=tokens" in answer.message


@pytest.mark.parametrize(
    ("name", "message", "sentence"),
    [
        ("DatasetNotFoundError", "Dataset 'a/b' is a gated dataset on the Hub", "the dataset is gated"),
        ("DatasetNotFoundError", "Dataset 'a/b' doesn't exist", "no such dataset on the hub"),
        ("OfflineModeIsEnabled", "offline", "the hub cannot be reached"),
    ],
)
def test_unavailable_datasets(
    inside: Any, monkeypatch: pytest.MonkeyPatch, name: str, message: str, sentence: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")

    def load_dataset(*words: Any, **options: Any) -> Any:
        raise type(name, (Exception,), {})(message)

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    answer = inside("prepare", "a/b", "--out", "out", "--tokenizer", "bytes")
    assert answer.code == 1
    assert f"a/b: {sentence}" in answer.message.replace("no such file or folder, and ", "")


def test_train_takes_every_kind_of_source(inside: Any, recipe: str, rows: Path, corpus: Path) -> None:
    both = f"data.source=[{{source: {rows}, weight: 3}}, {corpus}]"
    for overrides in ([f"data.source={rows}"], [both], [f"data.source={rows}", "data.stream=true"]):
        answer = inside(
            "train", recipe, *overrides, "train.steps=2", "--run", f"run{len(overrides)}{len(overrides[0])}"
        )
        assert answer.code == 0, answer.err
