"""However many processes encode, and by whichever encoder: the same ids in the same order."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.data import prepare as encode
from redline.data.prepare import Piece, encode_pieces, prepare_source
from redline.data.sources import Document, Reading
from redline.data.splits import TRAIN
from redline.data.tokenizer import (
    LibraryTokenizer,
    Tokenizer,
    byte_alphabet,
    byte_level_encoder,
    load_tokenizer,
    named_vocabulary,
)
from redline.errors import UserError

CORPUS = Path(__file__).parents[2] / "docs/data.md"  # any text will do
GPT2 = os.environ.get("REDLINE_GPT2", "")
needs_gpt2 = pytest.mark.skipif(not GPT2, reason="REDLINE_GPT2 does not name the tokenizer's files")
ANY_TEXT = st.text() | st.text(alphabet=" \n\t'abst1<|>é日")
SMALL = load_tokenizer("train:400", lambda: ["the cat's hat isn't that of 12 cats\n\n" * 9, "    def f(x):\n" * 9])


def by_the_library(tokenizer: Tokenizer, text: str) -> list[int]:
    assert isinstance(tokenizer, LibraryTokenizer)
    return list(tokenizer._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)


@given(ANY_TEXT)
def test_the_fast_encoder_gives_the_ids_of_the_library(text: str) -> None:
    assert isinstance(SMALL, LibraryTokenizer)
    assert SMALL._encoder is not None
    assert SMALL.encode(text) == SMALL.encode_array(text).tolist() == by_the_library(SMALL, text)


@settings(max_examples=40)
@given(st.lists(st.text(alphabet="abc ", min_size=1, max_size=20), min_size=1, max_size=12), st.text(alphabet="abc "))
def test_whatever_it_was_trained_on(texts: list[str], text: str) -> None:
    """Few letters: many ways to make the same token, which is where the two could differ."""
    tokenizer = load_tokenizer("train:300", lambda: texts * 3)
    assert tokenizer.encode(text) == by_the_library(tokenizer, text)


def test_where_equality_cannot_be_shown_the_library_encodes(tmp_path: Path) -> None:
    definition = json.loads(SMALL.definition())  # type: ignore[attr-defined]

    def encoder(change: dict[str, object], merges: list[object] | None = None) -> object:
        model = {**definition["model"], "merges": merges or definition["model"]["merges"]}
        (tmp_path / "t.json").write_text(json.dumps({**definition, "model": model, **change}))
        tokenizer = load_tokenizer(str(tmp_path / "t.json"))
        assert by_the_library(tokenizer, "the cat's") == tokenizer.encode("the cat's")
        return byte_level_encoder("t", tokenizer._backend)  # type: ignore[attr-defined]

    assert encoder({}) is not None
    assert encoder({"normalizer": {"type": "NFC"}}) is None
    assert encoder({"pre_tokenizer": {**definition["pre_tokenizer"], "add_prefix_space": True}}) is None
    assert encoder({}, list(reversed(definition["model"]["merges"]))) is None


@needs_gpt2
@pytest.mark.parametrize(
    "files", [["tokenizer.json"], ["encoder.json", "vocab.bpe"], ["r50k_base.tiktoken"]], ids=lambda files: files[0]
)
def test_every_form_of_gpt2_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str]) -> None:
    folder = Path(GPT2) if Path(GPT2).is_dir() else Path(GPT2).parent
    if not all((folder / name).is_file() for name in files):
        pytest.skip(f"{files[0]} is not beside REDLINE_GPT2")
    for name in files:
        shutil.copy(folder / name, tmp_path / name)
    for place in (tmp_path, *(tmp_path / name for name in files)):
        monkeypatch.setenv("REDLINE_GPT2", str(place))
        tokenizer = load_tokenizer("gpt2")
        assert (tokenizer.vocab_size, tokenizer.eot, tokenizer.fingerprint) == named_vocabulary("gpt2")
    text = "Hello world's 日本語\n\n  <|endoftext|> 123" * 3
    assert tokenizer.encode(text) == by_the_library(tokenizer, text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(deadline=None)
@given(ANY_TEXT)
def test_words_are_split_as_tiktoken_splits_them(text: str) -> None:
    """Our merges under tiktoken's own pattern for GPT-2 give our ids."""
    tiktoken = pytest.importorskip("tiktoken")
    public = pytest.importorskip("tiktoken_ext.openai_public", reason="tiktoken has no definitions of its own here")
    model, alphabet = json.loads(SMALL.definition())["model"], byte_alphabet()  # type: ignore[attr-defined]
    ranks = {
        bytes(alphabet[character] for character in token): number
        for token, number in model["vocab"].items()
        if set(token) <= alphabet.keys() and number != SMALL.eot
    }
    theirs = tiktoken.Encoding("ours", pat_str=public.r50k_pat_str, mergeable_ranks=ranks, special_tokens={})
    assert SMALL.encode(text) == theirs.encode_ordinary(text)


@needs_gpt2
def test_gpt2_is_that_of_tiktoken(monkeypatch: pytest.MonkeyPatch) -> None:
    """tiktoken's own definition, with the ranks from a file because nothing is fetched in a test."""
    tiktoken = pytest.importorskip("tiktoken")
    public = pytest.importorskip("tiktoken_ext.openai_public", reason="tiktoken has no definitions of its own here")
    from tiktoken.load import load_tiktoken_bpe

    file = (Path(GPT2) if Path(GPT2).is_dir() else Path(GPT2).parent) / "r50k_base.tiktoken"
    if not file.is_file():
        pytest.skip("r50k_base.tiktoken is not beside REDLINE_GPT2")
    monkeypatch.setenv("REDLINE_GPT2", GPT2)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    monkeypatch.setattr(public, "load_tiktoken_bpe", lambda _, expected_hash: load_tiktoken_bpe(str(file)))
    theirs, ours = tiktoken.Encoding(**public.r50k_base()), load_tokenizer("gpt2")
    assert (theirs.n_vocab, theirs.eot_token) == (ours.vocab_size, ours.eot)
    texts = CORPUS.read_text(encoding="utf-8").splitlines()
    texts += ["naïve 日本語 👩‍👩‍👧 \t\r\n  don't I'LL 12,345.6 <|endoftext|>", " \u00a0 "]
    for text in texts:
        assert ours.encode(text) == theirs.encode_ordinary(text)
        assert ours.decode(ours.encode(text)) == text


def test_gpt2_fetched_once_is_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The net's part is played by a vocabulary of our own, which is refused for what it is, but found in the cache."""
    from redline.data import tokenizer as gpt2

    ranks = {bytes([byte]): byte for byte in range(256)} | {b"th": 256, b"the": 257}
    monkeypatch.setattr(gpt2, "_fetched_ranks", lambda: ranks)
    for origin in ("tiktoken", str(cache / "gpt2" / "tokenizer.json")):
        with pytest.raises(UserError, match="not GPT-2's") as error:
            load_tokenizer("gpt2")
        assert error.value.where == origin
        monkeypatch.setattr(gpt2, "_fetched_ranks", lambda: None)
    stored = load_tokenizer(str(cache / "gpt2"))
    assert stored.encode("the th") == [257, 32, 256]


def test_a_wrong_variable_or_half_a_tokenizer_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "encoder.json").write_text("{}")
    for place, problem in ((tmp_path, r"vocab\.bpe: a file .* is missing"), (tmp_path / "no", "REDLINE_GPT2")):
        monkeypatch.setenv("REDLINE_GPT2", str(place))
        with pytest.raises(UserError, match=problem):
            load_tokenizer("gpt2")
    (tmp_path / "vocab.bpe").write_text("a b c d\n")
    monkeypatch.setenv("REDLINE_GPT2", str(tmp_path))
    with pytest.raises(UserError, match="not one of GPT-2's tokenizer"):
        load_tokenizer("gpt2")


# --- processes


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers for little text, and many batches of it."""
    monkeypatch.setattr(encode, "_MIN_CHARACTERS_FOR_WORKERS", 1)
    monkeypatch.setattr(encode, "_BATCH_PIECES", 3)


def test_the_number_of_processes_changes_nothing(
    documents: list[Document], eager: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "texts").mkdir()
    for document in documents:
        (tmp_path / "texts" / f"{document.name}.txt").write_text(document.text)
    source, prints = str(tmp_path / "texts"), set()
    pools: list[int] = []
    pool = encode.ProcessPoolExecutor
    monkeypatch.setattr(
        encode, "ProcessPoolExecutor", lambda count, *a, **k: pools.append(count) or pool(count, *a, **k)
    )
    for workers in (1, 2, 3):
        data = prepare_source(source, SMALL, tmp_path / str(workers), Reading(0.1), workers=workers)
        prints.add(data.fingerprint)
    assert len(prints) == 1
    assert pools == [2, 3]


def test_pieces_are_taken_no_faster_than_they_are_encoded(eager: None) -> None:
    taken = 0

    def endless() -> Iterator[Piece]:
        nonlocal taken
        while True:
            taken += 1
            yield Piece(TRAIN, f"piece {taken}", True)

    encoded = encode_pieces(endless(), SMALL, 2)
    got = [next(encoded) for _ in range(30)]
    encoded.close()  # type: ignore[attr-defined]
    assert [one.piece.text for one in got] == [f"piece {i}" for i in range(1, 31)]
    assert all(one.ids.tolist() == SMALL.encode(one.piece.text) for one in got)
    assert taken < 30 + 3 * 8


def test_a_killed_worker_is_a_sentence(eager: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def pieces() -> Iterator[Piece]:
        import multiprocessing

        for number in range(1000):
            if number == 60:
                for child in multiprocessing.active_children():
                    os.kill(child.pid or 0, signal.SIGKILL)
            yield Piece(TRAIN, "text", True)

    with pytest.raises(UserError, match=r"--workers 1"):
        list(encode_pieces(pieces(), SMALL, 2))
    assert not [thread for thread in threading.enumerate() if "QueueManager" in thread.name]
