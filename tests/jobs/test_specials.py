"""Special tokens have the ids after the tokenizer's own, and no text encodes to them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.data.tokenizer import ByteTokenizer, LibraryTokenizer, Tokenizer, load_tokenizer
from redline.errors import UserError
from redline.jobs.diffusion.data import MASK, SPECIALS, SpecialTokenizer, load_run_tokenizer
from redline.recipe.resolve import DataFacts


def test_special_ids_are_in_order_with_the_mask_last(trained: Tokenizer) -> None:
    for base in (trained, ByteTokenizer()):
        tokenizer = SpecialTokenizer(base)
        first = base.vocab_size
        assert [tokenizer.plan, tokenizer.execution, tokenizer.answer, tokenizer.pad] == list(range(first, first + 4))
        assert tokenizer.mask == tokenizer.classes == first + 4 == tokenizer.vocab_size - 1
        assert (tokenizer.eot, tokenizer.name) == (base.eot, base.name)
        assert tokenizer.fingerprint not in (base.fingerprint, SpecialTokenizer(base, [MASK]).fingerprint)
    alone = SpecialTokenizer(ByteTokenizer(), [MASK])
    assert (alone.mask, alone.vocab_size) == (257, 258)
    for wrong in ([], ["<|pad|>"], [MASK, "<|pad|>"], ["<|pad|>", "<|pad|>", MASK]):
        with pytest.raises(ValueError, match=r"distinct names"):
            SpecialTokenizer(ByteTokenizer(), wrong)


@given(st.lists(st.one_of(st.sampled_from(SPECIALS), st.text(st.characters(exclude_categories=["Cs"])))))
def test_text_never_becomes_a_special_token(trained: Tokenizer, parts: list[str]) -> None:
    text = "".join(parts)
    for base in (trained, ByteTokenizer()):
        tokenizer = SpecialTokenizer(base)
        ids = tokenizer.encode(text)
        assert ids == base.encode(text) == tokenizer.encode_array(text).tolist()
        assert all(i < base.vocab_size for i in ids)
        assert tokenizer.decode(ids) == text


def test_decoding_writes_special_tokens_by_name(trained: Tokenizer) -> None:
    tokenizer = SpecialTokenizer(trained)
    ids = [tokenizer.execution, *tokenizer.encode("2 + 3 = 5"), tokenizer.answer, *tokenizer.encode("5"), tokenizer.pad]
    written = "<|execution|>2 + 3 = 5<|answer|>5<|pad|>"
    assert tokenizer.decode(ids) == tokenizer.decode(np.array(ids)) == written
    assert tokenizer.decode([tokenizer.mask, tokenizer.mask]) == "<|mask|><|mask|>"
    assert tokenizer.decode([tokenizer.vocab_size + 7]) == "", "padding ids of the vocabulary decode to nothing"


def test_a_tokenizer_with_the_same_tokens_is_refused(trained: Tokenizer, tmp_path: Path) -> None:
    assert isinstance(trained, LibraryTokenizer)
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(trained.definition())
    backend.add_special_tokens([AddedToken("<|answer|>", special=True)])
    backend.save(str(tmp_path / "own.json"))
    with pytest.raises(UserError, match=r"own\.json: .*<\|answer\|>.*data\.tokenizer"):
        SpecialTokenizer(load_tokenizer(str(tmp_path / "own.json")))
    with pytest.raises(UserError, match=r"<\|plan\|>, <\|execution\|>"):
        SpecialTokenizer(SpecialTokenizer(trained))


@pytest.mark.parametrize("kind", ["bytes", "trained"])
def test_a_run_loads_its_tokenizer(kind: str, trained: Tokenizer, tmp_path: Path) -> None:
    tokenizer = SpecialTokenizer(ByteTokenizer() if kind == "bytes" else trained)
    tokenizer.save(tmp_path / "tokenizer.json")
    facts = DataFacts(tokenizer.vocab_size, 1, 0, "", tokenizer.name, tokenizer.base.fingerprint)
    again = load_run_tokenizer(facts, tmp_path)
    assert (again.fingerprint, again.vocab_size, again.name) == (
        tokenizer.fingerprint,
        tokenizer.vocab_size,
        tokenizer.name,
    )
    text = "A naïve window of 3 tokens."
    assert again.encode(text) == tokenizer.encode(text)
    other = DataFacts(tokenizer.vocab_size, 1, 0, "", tokenizer.name, "other")
    with pytest.raises(UserError, match="tokenizer"):
        load_run_tokenizer(other, tmp_path)
