"""Paragraphs of facts with questions about them, generated without a download.

    Context: The lamp is in the attic. The drum is in the cellar. …
    Question: Where is the drum?
    Answer: cellar

A paragraph is a function of (seed, number, size, split). Its things and places are all different, and drawn evenly:
which words occur says nothing about which belong together, so an answer has to be read. Of all facts one in eight is
held out by its content: a training paragraph has none of them, and a test paragraph has no others.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from redline.data.chance import Chance
from redline.errors import UserError
from redline.units import parse_count

PREFIX = "facts:"
VERSION = 1  # raise it with any change of the texts, so that folders prepared from older ones are not used
COUNT, MOST = 20_000, 1_000_000
MOST_FACTS = 16
TRAIN, TEST = "train", "test"
_SEED = 0
_SAMPLE = 64
_TEST_SHARE = 8  # one in so many facts is in the test split
_FORM = f"{PREFIX}SIZE, {PREFIX}SIZE:COUNT or {PREFIX}SIZE:COUNT@{TEST}"
_PATTERN = re.compile(r"(?P<size>[^:@]+)(:(?P<count>[^:@]+))?(@(?P<split>\w+))?")

_THINGS = "basket book bottle candle coat drum guitar hammer kettle ladder lamp letter mirror scarf shovel violin"
_PLACES = "attic bakery barn cabin cellar forest garage garden kitchen library market mill office school station tower"
THINGS, PLACES = (tuple(words.split()) for words in (_THINGS, _PLACES))


@dataclass(frozen=True)
class Fact:
    thing: str
    place: str

    @property
    def held_out(self) -> bool:
        digest = hashlib.blake2b(f"{self.thing} {self.place}".encode()).digest()
        return digest[0] % _TEST_SHARE == 0

    @property
    def sentence(self) -> str:
        return f"The {self.thing} is in the {self.place}."

    @property
    def short(self) -> str:
        return f"{self.thing} {self.place}."

    @property
    def question(self) -> str:
        return f"Where is the {self.thing}?"


@dataclass(frozen=True)
class Paragraph:
    context: str
    question: str
    answer: str


def is_facts(source: str) -> bool:
    """Return whether `source` names generated facts."""
    return source.startswith(PREFIX)


def paragraphs(source: str) -> list[Paragraph]:
    """Generate the paragraphs that `source` names, each with one question."""
    size, count, split = _parsed(source)
    rows = []
    for number in range(count):
        chance = Chance("paragraph", size, split, _SEED, number)
        facts = _facts(chance, size, split)
        asked = chance.of(facts)
        rows.append(Paragraph(_context(facts), asked.question, asked.place))
    return rows


def documents(source: str) -> Iterator[str]:
    """Yield texts to learn reading from: up to SIZE facts, some of them again in short, and questions about some.

    In short a fact is `lamp attic.`: there the token before says what to look up, where a question says it further
    away. Half of the texts state their facts in short, too. What is looked up is drawn with replacement: of facts that
    are each asked for once, a reader learns to guess among those that are left. The last question has the form that
    LatentWire asks in, `Question: …⏎Answer: …`, and ends the text.
    """
    size, count, split = _parsed(source)
    for number in range(count):
        chance = Chance("document", size, split, _SEED, number)
        facts = _facts(chance, 1 + chance.below(size), split)
        stated = " ".join(fact.short for fact in facts) if chance.below(2) else _context(facts)
        again = " ".join(chance.of(facts).short for _ in facts * 2)
        *asked, last = [chance.of(facts) for _ in facts]
        lines = [f"Context: {stated}", f"Short: {again}", *(f"{fact.question} {fact.place}" for fact in asked)]
        yield "\n".join([*lines, f"Question: {last.question}", f"Answer: {last.place}"])


def _context(facts: list[Fact]) -> str:
    return " ".join(fact.sentence for fact in facts)


def _facts(chance: Chance, count: int, split: str) -> list[Fact]:
    """Draw facts of the split that share no word."""
    things, places = list(THINGS), list(PLACES)
    facts: list[Fact] = []
    while len(facts) < count:
        fact = Fact(chance.of(things), chance.of(places))
        if fact.held_out == (split == TEST):
            facts.append(fact)
            things.remove(fact.thing)
            places.remove(fact.place)
    return facts


def fact_count(source: str) -> int:
    """Return the number of paragraphs that `source` names."""
    return _parsed(source)[1]


def document_bytes(source: str) -> int:
    """Estimate the bytes of the documents, from the first ones."""
    some = [len(text) for _, text in zip(range(_SAMPLE), documents(source), strict=False)]
    return round(sum(some) / len(some) * fact_count(source))


def _parsed(source: str) -> tuple[int, int, str]:
    """Return the size, the count and the split that `source` names."""
    match = _PATTERN.fullmatch(source.removeprefix(PREFIX))
    if match is None or match["split"] not in (None, TRAIN, TEST):
        raise UserError("the name of the facts is not valid.", where=source, fix=f"Write {_FORM}.")
    size = int(match["size"]) if match["size"].isdecimal() else 0
    if not 1 <= size <= MOST_FACTS:
        fix = f"Write {_FORM} with SIZE between 1 and {MOST_FACTS}."
        raise UserError(f"{match['size']!r} is not a number of facts per paragraph.", where=source, fix=fix)
    try:
        count = parse_count(match["count"]) if match["count"] else COUNT
    except ValueError:
        count = 0
    if not 1 <= count <= MOST:
        fix = f"Write {_FORM} with COUNT between 1 and {MOST:,}."
        raise UserError(f"{match['count']!r} is not a number of paragraphs.", where=source, fix=fix)
    return size, count, match["split"] or TRAIN
