"""What is known of data before they are prepared: exact where they lie ready, marked as an estimate where not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from redline.data.corpus import open_corpus
from redline.data.estimate import bytes_per_token, expected_facts, vocabulary
from redline.data.tokenizer import Tokenizer, load_tokenizer
from redline.errors import UserError
from redline.recipe.load import load


def data_of(*overrides: str) -> Any:
    return load("pretrain-125m", list(overrides)).recipe.data


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "texts").mkdir()
    for number in range(100):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"The {number}th text is about nothing in particular.\n" * 20)
    return tmp_path / "texts"


@pytest.mark.parametrize("tokenizer", ["bytes", "train:512"])
def test_estimated_before_and_measured_after(texts: Path, tokenizer: str) -> None:
    data = data_of(f"data.source={texts}", f"data.tokenizer={tokenizer}")
    before = expected_facts(data)
    measured = open_corpus(data).facts
    assert (before.estimated, before.fingerprint) == (True, "")
    assert before.vocab_size >= measured.vocab_size, "so little text may not give all the entries asked for"
    assert expected_facts(data) == measured
    if tokenizer == "bytes":
        assert before.vocab_size == measured.vocab_size
        assert before.train_tokens == pytest.approx(measured.train_tokens, rel=0.1)


@pytest.mark.parametrize("tokenizer", ["bytes", "train:512"])
def test_mixtures_are_summed(texts: Path, tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "more.txt").write_text("More of it, in one file.\n" * 400)
    data = data_of(f"data.source=[{texts}, {tmp_path / 'more.txt'}]", f"data.tokenizer={tokenizer}")
    assert expected_facts(data).estimated
    measured = open_corpus(data).facts
    facts = expected_facts(data)
    assert (facts.train_tokens, facts.val_tokens, facts.estimated) == (
        measured.train_tokens,
        measured.val_tokens,
        False,
    )


def test_raw_tokens_are_counted_by_their_size(tmp_path: Path) -> None:
    np.zeros(10_000, dtype="<u2").tofile(tmp_path / "train.bin")
    for source in (tmp_path, tmp_path / "train.bin"):
        data = data_of(f"data.source={source}", "data.tokenizer=gpt2")
        facts, opened = expected_facts(data), open_corpus(data).facts
        assert (facts.train_tokens, facts.val_tokens, facts.estimated) == (
            opened.train_tokens,
            opened.val_tokens,
            False,
        )


def test_a_prepared_folder_says_it_itself(texts: Path) -> None:
    folder = open_corpus(data_of(f"data.source={texts}", "data.tokenizer=bytes")).tokens.source
    assert not expected_facts(data_of(f"data.source={folder}", "data.tokenizer=bytes")).estimated


@pytest.mark.parametrize("source", ["owner/name", "/no/such/folder", "[embedded, owner/name]"])
def test_what_is_not_here_is_unknown(source: str) -> None:
    facts = expected_facts(data_of(f"data.source={source}", "data.tokenizer=gpt2"))
    assert (facts.train_tokens, facts.vocab_size, facts.estimated) == (0, 50257, True)


def test_vocabularies_are_read_without_the_library(trained: Tokenizer, tmp_path: Path) -> None:
    trained.save(tmp_path / "tokenizer.json")
    for spec in (str(tmp_path), str(tmp_path / "tokenizer.json"), "bytes", "train:300"):
        expected = {"bytes": 257}.get(spec, trained.vocab_size)
        assert vocabulary(spec) == expected
    assert vocabulary("gpt2") == 50257
    (tmp_path / "bad.json").write_text("{}")
    for spec, problem in (("bad.json", "cannot be read"), ("none.json", "no such tokenizer")):
        with pytest.raises(UserError, match=problem):
            vocabulary(str(tmp_path / spec))


def test_bytes_per_token_grow_with_the_vocabulary() -> None:
    rates = [bytes_per_token(f"train:{size}", size) for size in (257, 512, 4096, 16384, 200_000)]
    assert rates == sorted(rates)
    assert 1.0 <= rates[0] < rates[-1] < 5
    assert bytes_per_token("bytes", 257) == 1.0


def test_it_is_light() -> None:
    program = (
        "import redline.recipe.resolve, sys\n"
        "import redline.data.estimate\n"
        "print(*{'numpy', 'torch', 'tokenizers', 'tiktoken', 'pyarrow'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
    assert load_tokenizer("bytes").vocab_size == 257
