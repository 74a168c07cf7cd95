from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.data import tokenizer as tokenizer_module
from redline.data.sources import Document
from redline.data.time_limit import within_seconds
from redline.data.tokenizer import Tokenizer, load_tokenizer, named_vocabulary
from redline.errors import UserError

GPT2 = os.environ.get("REDLINE_GPT2", "")
ANY_TEXT = st.text() | st.text(alphabet=" \n\t'ab1<|>")
BYTES = load_tokenizer("bytes")
SMALL = load_tokenizer(
    "train:320", lambda: ["the quick brown fox jumps over the lazy dog " * 3, "def f(x):\n    return x\n"]
)


@given(ANY_TEXT)
def test_bytes_round_trip(text: str) -> None:
    ids = BYTES.encode(text)
    assert BYTES.decode(ids) == text
    assert BYTES.eot not in ids


@given(ANY_TEXT)
def test_trained_round_trip(text: str) -> None:
    ids = SMALL.encode(text)
    assert SMALL.decode(ids) == text
    assert SMALL.eot not in ids


@pytest.mark.parametrize("tokenizer", [BYTES, SMALL], ids=["bytes", "train"])
def test_end_of_text_in_a_document_is_text(tokenizer: Tokenizer) -> None:
    hostile = "before<|endoftext|>after"
    ids = tokenizer.encode(hostile)
    assert tokenizer.eot not in ids
    assert tokenizer.decode(ids) == hostile
    assert tokenizer.decode([tokenizer.eot, *tokenizer.encode("x")]) == "<|endoftext|>x"


def test_batch_equals_one_by_one(trained: Tokenizer, documents: list[Document]) -> None:
    texts = [document.text for document in documents[:9]]
    assert trained.encode_batch(texts) == [trained.encode(text) for text in texts]
    assert BYTES.encode_batch(["é", ""]) == [[0xC3, 0xA9], []]


def test_trained_has_the_size_asked_for_and_compresses(trained: Tokenizer, documents: list[Document]) -> None:
    assert trained.vocab_size == 300
    text = documents[6].text
    assert len(trained.encode(text)) < 0.8 * len(text.encode())


def test_training_is_deterministic_across_processes() -> None:
    program = (
        "from redline.data.tokenizer import load_tokenizer\n"
        "texts = [f'some words {i} and {i * i} more words\\n' * 5 for i in range(200)]\n"
        "print(load_tokenizer('train:400', lambda: texts).fingerprint)"
    )
    once, again = (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    )
    assert once == again
    assert len(once.strip()) == 16


def test_saved_tokenizer_is_the_same(trained: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    trained.save(path)
    loaded = load_tokenizer(str(path))
    assert loaded.fingerprint == trained.fingerprint
    assert (loaded.vocab_size, loaded.eot) == (trained.vocab_size, trained.eot)
    assert loaded.encode("The loader reads") == trained.encode("The loader reads")
    assert load_tokenizer(str(tmp_path)).fingerprint == trained.fingerprint


def test_fingerprint_ignores_layout_but_not_merges(trained: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    trained.save(path)
    definition = json.loads(path.read_text())
    merges = definition["model"]["merges"]
    definition["model"]["merges"] = [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]
    definition["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(definition))
    older = load_tokenizer(str(path))
    assert older.fingerprint == trained.fingerprint
    assert len(older.encode("never truncated, however long it may be")) > 4
    definition["model"]["merges"].reverse()
    path.write_text(json.dumps(definition))
    assert load_tokenizer(str(path)).fingerprint != trained.fingerprint


@pytest.mark.parametrize("token", ["</s>", "<|end_of_text|>", "<|im_end|>", "<eos>"])
def test_foreign_end_of_text(trained: Tokenizer, tmp_path: Path, token: str) -> None:
    path = tmp_path / "tokenizer.json"
    trained.save(path)
    path.write_text(path.read_text().replace("<|endoftext|>", token))
    assert load_tokenizer(str(path)).eot == trained.eot


def test_tokenizer_without_an_end_of_text_is_refused(trained: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    trained.save(path)
    path.write_text(path.read_text().replace("<|endoftext|>", "<odd>"))
    with pytest.raises(UserError, match="no end-of-text token"):
        load_tokenizer(str(path))


def test_gpt2_is_known_without_its_files(cache: Path) -> None:
    vocabulary = named_vocabulary("gpt2")
    assert vocabulary is not None
    assert vocabulary[:2] == (50257, 50256)
    with pytest.raises(UserError, match="REDLINE_GPT2") as error:
        load_tokenizer("gpt2")
    assert str(cache / "gpt2") in str(error.value)


@pytest.mark.skipif(not GPT2, reason="REDLINE_GPT2 does not name the tokenizer's files")
def test_gpt2_with_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDLINE_GPT2", GPT2)
    tokenizer = load_tokenizer("gpt2")
    assert tokenizer.encode("hello world") == [31373, 995]
    assert (tokenizer.vocab_size, tokenizer.eot, tokenizer.fingerprint) == named_vocabulary("gpt2")


@pytest.mark.parametrize("place", ["variable", "cache", "huggingface"])
def test_gpt2_must_be_gpt2_wherever_it_is_found(
    trained: Tokenizer, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    folder = {
        "variable": tmp_path / "own",
        "cache": cache / "gpt2",
        "huggingface": tmp_path / "huggingface/hub/models--openai-community--gpt2/snapshots/0123",
    }[place]
    folder.mkdir(parents=True)
    trained.save(folder / "tokenizer.json")
    if place == "variable":
        monkeypatch.setenv("REDLINE_GPT2", str(folder))
    with pytest.raises(UserError, match="not GPT-2's") as error:
        load_tokenizer("gpt2")
    assert str(folder) in str(error.value)


def test_named_vocabularies_are_those_of_the_tokenizers() -> None:
    assert (
        named_vocabulary("bytes") == (BYTES.vocab_size, BYTES.eot, BYTES.fingerprint) == (257, 256, BYTES.fingerprint)
    )
    assert named_vocabulary("train:4096") is None


@pytest.mark.parametrize("spec", ["train:", "train:many", "train:256", "train:-5", "no/such/tokenizer.json", "gpt3"])
def test_unknown_tokenizers_are_refused(spec: str) -> None:
    with pytest.raises(UserError, match=r"train:N"):
        load_tokenizer(spec, lambda: ["text"])


def test_unreadable_definition_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": ')
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        load_tokenizer(str(path))
    with pytest.raises(UserError, match="trained on text"):
        load_tokenizer("train:300")


def test_an_end_of_text_that_is_not_marked_as_special_is_text_nevertheless(trained: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    trained.save(path)
    definition = json.loads(path.read_text())
    definition["added_tokens"][0]["special"] = False
    path.write_text(json.dumps(definition))
    loaded = load_tokenizer(str(path))
    text = "hello <|endoftext|> world"
    assert loaded.encode(text) == trained.encode(text)
    assert loaded.fingerprint == trained.fingerprint


def test_an_end_of_text_that_is_a_word_is_refused(tmp_path: Path) -> None:
    words = {"type": "WordLevel", "vocab": {"a": 0, "</s>": 1}, "unk_token": "a"}
    definition = {"version": "1.0", "model": words, "pre_tokenizer": {"type": "WhitespaceSplit"}, "added_tokens": []}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(definition))
    with pytest.raises(UserError, match=r"</s>.*end-of-text token"):
        load_tokenizer(str(path))


def test_a_vast_gap_is_learnt_from_and_encoded(trained: Tokenizer) -> None:
    """A million spaces overflowed the encoder's stack, and learning from a tenth of them took 8 s."""
    text = "before" + " " * 1_100_000 + "after"
    begun = time.monotonic()
    load_tokenizer("train:300", lambda: [text])
    assert time.monotonic() - begun < 5
    assert trained.decode(trained.encode(text)) == text


@pytest.mark.parametrize("letters", ["a", "ACGT", "的一是不了人我在有他"])
def test_one_endless_word_does_not_take_for_ever(letters: str) -> None:
    """Learning takes the square of a word's length: half a megabyte of DNA took more than a minute."""
    chance = random.Random(0)
    text = "".join(chance.choice(letters) for _ in range(200_000))
    begun = time.monotonic()
    tokenizer = load_tokenizer("train:300", lambda: [text])
    assert time.monotonic() - begun < 20
    assert tokenizer.decode(tokenizer.encode(text[:5000])) == text[:5000]


def patterned(folder: Path, pattern: str) -> Path:
    """A tokenizer.json of letters that splits text by this pattern."""
    from tokenizers import Regex, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE(vocab={"<|endoftext|>": 0, "a": 1, "b": 2}, merges=[]))
    backend.add_special_tokens(["<|endoftext|>"])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    path = folder / "tokenizer.json"
    backend.save(str(path))
    return path


def test_a_pattern_that_the_library_gives_up_on_is_a_sentence(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(patterned(tmp_path, r"(a+)+$")))
    assert tokenizer.encode("aab") == [1, 1, 2]
    with pytest.raises(UserError, match="regular expression") as caught:
        tokenizer.encode("a" * 40 + "b")
    assert caught.value.where == str(tmp_path / "tokenizer.json")
    assert "tokenizer.json" in (caught.value.fix or "")


def test_a_pattern_that_backtracks_has_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(str(patterned(tmp_path, r"(?:a|aa)+c")))
    monkeypatch.setattr(tokenizer_module, "_LIMIT_S", 0.1)
    monkeypatch.setattr(tokenizer_module, "_LIMIT_S_PER_CHARACTER", 0.0)
    slow = ("a" * 24 + "b") * 100  # a few seconds of work that no signal ends
    begun = time.process_time()
    with pytest.raises(UserError, match="regular expression"):
        tokenizer.encode(slow)
    assert time.process_time() - begun < 2.0
    assert tokenizer.encode("ab" * 5) == [1, 2] * 5


def test_a_limited_call_returns_and_raises_what_the_call_does() -> None:
    assert within_seconds(lambda: threading.current_thread().daemon, 60.0)
    with pytest.raises(ZeroDivisionError):
        within_seconds(lambda: 1 / 0, 60.0)
