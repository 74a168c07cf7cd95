"""Generated facts: no fact of the test split in a training text, answers that follow from the text alone, names."""

from __future__ import annotations

import hashlib
import re
from collections import Counter

import pytest

from redline.data.facts import PLACES, THINGS, Fact, document_bytes, documents, fact_count, paragraphs
from redline.data.sources import ReadStats, source_documents, source_identity
from redline.errors import UserError

SENTENCE = re.compile(r"The (\w+) is in the (\w+)\.")
SHORT = re.compile(r"(\w+) (\w+)\.")
ASKED = re.compile(r"Where is the (\w+)\?\n?(?:Answer:)? (\w+)")


def facts_of(line: str) -> list[Fact]:
    return [Fact(*words) for words in SENTENCE.findall(line) or SHORT.findall(line)]


def test_no_held_out_fact_is_in_a_training_text_and_the_test_asks_for_nothing_else() -> None:
    trained = [fact for text in documents("facts:8:400") for fact in facts_of(text.splitlines()[0])]
    trained += [fact for one in paragraphs("facts:8:400") for fact in facts_of(one.context)]
    tested = [fact for one in paragraphs("facts:8:200@test") for fact in facts_of(one.context)]
    assert len(tested) == 1600
    assert not any(fact.held_out for fact in trained)
    assert all(fact.held_out for fact in tested)
    assert not set(trained) & set(tested)
    every = [Fact(thing, place).held_out for thing in THINGS for place in PLACES]
    assert sum(every) / len(every) == pytest.approx(1 / 8, abs=0.02)


@pytest.mark.parametrize("source", ["facts:8:300", "facts:3:300@test"])
def test_a_paragraph_answers_its_question_once(source: str) -> None:
    for one in paragraphs(source):
        facts = facts_of(one.context)
        assert len(facts) == int(source[6])
        assert len({word for fact in facts for word in (fact.thing, fact.place)}) == 2 * len(facts)
        (right,) = [fact.place for fact in facts if fact.question == one.question]
        assert one.answer == right


def test_the_place_of_a_fact_says_nothing_about_whether_it_is_asked() -> None:
    """Neither a word nor a position is right much more often than the others."""
    some = paragraphs("facts:8:2000")
    places = Counter(
        next(n for n, f in enumerate(facts_of(one.context)) if one.answer in vars(f).values()) for one in some
    )
    assert min(places.values()) > 190
    assert max(places.values()) < 320
    words = Counter(one.answer for one in some)
    assert len(words) == 16
    assert 85 < min(words.values()) <= max(words.values()) < 170


def test_documents_hold_up_to_so_many_facts_and_end_with_the_question_of_latentwire() -> None:
    sizes = Counter()
    for text in documents("facts:4:300"):
        stated, again, *rest = text.split("\n")
        facts = {fact.thing: fact.place for fact in facts_of(stated)}
        sizes[len(facts)] += 1
        looked_up = facts_of(again)
        assert len(looked_up) == 2 * len(facts)
        asked = ASKED.findall("\n".join(rest))
        assert len(asked) == len(facts)
        for thing, place in [*asked, *((fact.thing, fact.place) for fact in looked_up)]:
            assert facts[thing] == place
        assert re.search(r"\nQuestion: [^\n]+\?\nAnswer: \w+$", text)
    assert sorted(sizes) == [1, 2, 3, 4]


def test_texts_never_change() -> None:
    """Prepared folders and runs depend on them: with another text the version in `source_identity` must rise."""
    said = "\n".join([*documents("facts:8:50"), *(f"{one}" for one in paragraphs("facts:8:50@test"))])
    assert hashlib.sha256(said.encode()).hexdigest()[:16] == "261fa36e948003c2"
    assert source_identity("facts:8:50") == ["facts:8:50", 1]


def test_they_are_a_source_of_text() -> None:
    stats = ReadStats("facts:2:20")
    read = [document.text for document in source_documents("facts:2:20", stats)]
    assert read == list(documents("facts:2:20"))
    assert (fact_count("facts:2:20"), fact_count("facts:2")) == (20, 20_000)
    assert document_bytes("facts:8:2k") == pytest.approx(sum(map(len, documents("facts:8:2k"))), rel=0.15)


@pytest.mark.parametrize(
    "name", ["facts:", "facts:0", "facts:17", "facts:8:0", "facts:8:2M", "facts:8@train@x", "facts:a:5"]
)
def test_a_wrong_name_is_refused(name: str) -> None:
    with pytest.raises(UserError) as caught:
        list(documents(name))
    assert caught.value.where == name
    assert "facts:SIZE" in caught.value.fix
