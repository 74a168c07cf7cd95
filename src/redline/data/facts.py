"""Paragraphs of facts with questions about them, generated without a download.

    Context: Anna left the lamp in the attic. Ben left the drum in the cellar. …
    Question: Where did Ben leave it?
    Answer: cellar

A paragraph is a function of (seed, number, size, split). Its names, things and places are all different, and drawn
evenly: which words occur says nothing about which belong together, so an answer has to be read. Of all facts one in
eight is held out by its content: a training paragraph has none of them, and a test paragraph has no others.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from redline.data.chance import Chance, T
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

_NAMES = "Ada Anna Ben Carla Diego Emma Felix Grace Hugo Ida Jonas Lara Maria Omar Paul Ruth"
_THINGS = "basket book bottle candle coat drum guitar hammer kettle ladder lamp letter mirror scarf shovel violin"
_PLACES = "attic bakery barn cabin cellar forest garage garden kitchen library market mill office school station tower"
NAMES, THINGS, PLACES = (tuple(words.split()) for words in (_NAMES, _THINGS, _PLACES))


@dataclass(frozen=True)
class Fact:
    name: str
    thing: str
    place: str

    @property
    def held_out(self) -> bool:
        digest = hashlib.blake2b(f"{self.name} {self.thing} {self.place}".encode()).digest()
        return digest[0] % _TEST_SHARE == 0

    @property
    def sentence(self) -> str:
        return f"{self.name} left the {self.thing} in the {self.place}."

    @property
    def short(self) -> str:
        return f"{self.name} {self.thing} {self.place}."

    def asked(self, kind: int) -> tuple[str, str]:
        """Return a question about the thing (0) or the place (1), and its answer."""
        if kind:
            return f"Where did {self.name} leave it?", self.place
        return f"What did {self.name} leave?", self.thing


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
        rows.append(Paragraph(_context(facts), *chance.of(facts).asked(chance.below(2))))
    return rows


def documents(source: str) -> Iterator[str]:
    """Yield texts to learn reading from: up to SIZE facts, half of them again in short, and questions about the others.

    In short a fact is `Anna lamp attic.`: there the token before says what to look up, where a question says it further
    away. The last question has the form that LatentWire asks in, `Question: …⏎Answer: …`, and ends the text. Texts of
    few facts are the most frequent.
    """
    size, count, split = _parsed(source)
    for number in range(count):
        chance = Chance("document", size, split, _SEED, number)
        facts = _facts(chance, 1 + chance.below(1 + chance.below(size)), split)
        order = _shuffled(chance, facts)
        half = len(order) // 2
        short = [f"Short: {' '.join(fact.short for fact in order[:half])}"] if half else []
        *asked, (question, answer) = _shuffled(chance, [fact.asked(kind) for fact in order[half:] for kind in (0, 1)])
        lines = [f"Context: {_context(facts)}", *short, *(f"{one} {reply}" for one, reply in asked)]
        yield "\n".join([*lines, f"Question: {question}", f"Answer: {answer}"])


def _context(facts: list[Fact]) -> str:
    return " ".join(fact.sentence for fact in facts)


def _facts(chance: Chance, count: int, split: str) -> list[Fact]:
    """Draw facts of the split that share no word."""
    words = [list(NAMES), list(THINGS), list(PLACES)]
    facts: list[Fact] = []
    while len(facts) < count:
        fact = Fact(*(chance.of(some) for some in words))
        if fact.held_out == (split == TEST):
            facts.append(fact)
            for some, word in zip(words, (fact.name, fact.thing, fact.place), strict=True):
                some.remove(word)
    return facts


def _shuffled(chance: Chance, some: Sequence[T]) -> list[T]:
    left, order = list(some), []
    while left:
        order.append(left.pop(chance.below(len(left))))
    return order


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
