"""`redline prepare --verify` detects any change of the tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from redline.data.tokens import HEADER_BYTES


@pytest.fixture
def tokens(inside: Any, corpus: Path, tmp_path: Path) -> Path:
    answer = inside("prepare", str(corpus), "--out", "tokens", "--tokenizer", "bytes", "--verify")
    assert answer.code == 0, answer.err
    return tmp_path / "tokens"


def test_intact_tokens_are_reported_as_such(inside: Any, tokens: Path) -> None:
    answer = inside("prepare", str(tokens), "--verify", "--json")
    assert answer.code == 0, answer.err
    meta = json.loads((tokens / "meta.json").read_text(encoding="utf-8"))
    counted = sum(shard["tokens"] for split in meta["splits"].values() for shard in split["shards"])
    assert json.loads(answer.out)["verified"] == {"files": 2, "tokens": counted}
    assert f"{counted:,} tokens in 2 files" in inside("prepare", str(tokens), "--verify").out


@pytest.mark.parametrize("place", [0, 1000, -1])
def test_one_flipped_bit_is_found(inside: Any, tokens: Path, place: int) -> None:
    shard = tokens / "train-00000.tok"
    content = bytearray(shard.read_bytes())
    content[place if place < 0 else HEADER_BYTES + place] ^= 1
    shard.write_bytes(content)
    answer = inside("prepare", str(tokens), "--verify")
    assert answer.code == 1
    assert "train-00000.tok: the tokens differ from" in answer.message
    assert "Traceback" not in answer.err


def test_every_run_detects_truncated_shards(inside: Any, recipe: str, tokens: Path) -> None:
    shard = tokens / "train-00000.tok"
    shard.write_bytes(shard.read_bytes()[:-2])
    answer = inside("train", recipe, f"data.source={tokens}", "data.tokenizer=bytes", "train.steps=1", "--run", "run")
    assert answer.code == 1
    assert "bytes instead of" in answer.message


@pytest.mark.parametrize(
    ("words", "said"),
    [(["corpus", "--verify"], "corpus"), (["corpus", "--verify", "--preview", "1"], "--verify")],
)
def test_a_folder_without_tokens_cannot_be_verified(inside: Any, corpus: Path, words: list[str], said: str) -> None:
    answer = inside("prepare", str(corpus), *words[1:])
    assert answer.code == 2
    assert said in answer.message
