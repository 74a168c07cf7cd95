"""Tokenizers that are lists of pieces: they cut a text as the models that were trained with them did."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latents import piece_vocabulary
from redline.data.chat_template import piece_file, piece_tokenizer
from redline.errors import UserError
from redline.jobs.latent_prefix.data import PromptTokenizer

pytest.importorskip("transformers")
REAL = Path(__file__).parents[3] / "shared/data/stories260k/tok512.json"


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[Any]]]:
    path = tmp_path_factory.mktemp("pieces") / "tok.json"
    path.write_text(json.dumps(piece_vocabulary()))
    return path, piece_vocabulary()


def joined_by_score(text: str, vocabulary: list[list[Any]]) -> list[int]:
    """What a reader of such a list does: characters, or their bytes; then the best neighbours, until none is left."""
    numbers = {piece: number for number, (piece, _) in enumerate(vocabulary)}
    scores = [score for _, score in vocabulary]
    pieces = [
        piece
        for character in f" {text}"
        for piece in ([character] if character in numbers else [f"<0x{byte:02X}>" for byte in character.encode()])
    ]
    while True:
        pairs = [(a + b, place) for place, (a, b) in enumerate(pairwise(pieces))]
        known = [(-scores[numbers[piece]], place) for piece, place in pairs if piece in numbers]
        if not known:
            return [numbers[piece] for piece in pieces]
        _, place = min(known)
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]


words = st.text(st.sampled_from(" abderhntu.\né😀"), min_size=1, max_size=40)


@settings(max_examples=200)
@given(words)
def test_a_text_is_cut_by_score_and_comes_back(vocabulary: tuple[Path, list[list[Any]]], text: str) -> None:
    made = piece_tokenizer(vocabulary[0])
    ids = made(text, add_special_tokens=False)["input_ids"]
    assert ids == joined_by_score(text, vocabulary[1])
    assert made.decode(ids) == text
    assert made(text)["input_ids"] == [1, *ids], "a mark before every text"


@pytest.mark.skipif(not REAL.exists(), reason="the real vocabulary is not here")
def test_a_real_vocabulary() -> None:
    made, rows = piece_tokenizer(REAL), json.loads(REAL.read_text())
    text = "Once upon a time, there was a little girl named Lily. “She” liked the park…\nThe end."
    assert made(text, add_special_tokens=False)["input_ids"] == joined_by_score(text, rows)
    assert made.decode(made(text)["input_ids"], skip_special_tokens=True) == text


def test_an_answer_has_one_space_before_it(vocabulary: tuple[Path, list[list[Any]]]) -> None:
    reader = PromptTokenizer(vocabulary[0].parent, "the: ")
    assert reader.answer("red") == [*joined_by_score("red", vocabulary[1]), 2]
    assert reader.begin == [1]
    assert reader.decode(reader.answer("red")) == "red"


@pytest.mark.parametrize(
    "content",
    ["{", "3", "[3]", '[["a", "b"]]', '[["a", 0.0], ["a", 0.0]]', '[["", 0.0]]', '[["a", 0.0]]', '{"a": 1}'],
)
def test_what_is_no_such_list_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tok9.json").write_text(content)
    with pytest.raises(UserError, match=r"not a list of pieces.*tokenizer\.json"):
        PromptTokenizer(tmp_path, "Answer: ")


def test_a_usual_tokenizer_comes_first(tmp_path: Path) -> None:
    (tmp_path / "tok512.json").write_text("[]")
    assert piece_file(tmp_path) == tmp_path / "tok512.json"
    (tmp_path / "tokenizer.json").write_text("{}")
    assert piece_file(tmp_path) is None


def test_a_reader_is_known_by_how_it_begins_and_ends_a_text(tiny_base: Path, tmp_path: Path) -> None:
    """What a teacher has read, and what a run learns, depends on both."""
    shutil.copytree(tiny_base, tmp_path / "base")
    plain = PromptTokenizer(tmp_path / "base", "Answer: ")
    assert PromptTokenizer(tiny_base, "Answer: ").fingerprint == plain.fingerprint
    assert PromptTokenizer(tiny_base, "So: ").fingerprint != plain.fingerprint
    config = json.loads((tmp_path / "base/tokenizer_config.json").read_text())
    config |= {"eos_token": "<|im_start|>", "chat_template": None}
    (tmp_path / "base/tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "base/chat_template.jinja").unlink(missing_ok=True)
    (tmp_path / "base/special_tokens_map.json").unlink(missing_ok=True)
    changed = PromptTokenizer(tmp_path / "base", "Answer: ")
    assert changed.eos_ids != plain.eos_ids
    assert changed.fingerprint != plain.fingerprint
