"""What word problems are about: names, things, what people do with them, and where they keep them."""

from __future__ import annotations

from dataclasses import dataclass

Verb = tuple[str, str]  # "buys", "buying"


@dataclass(frozen=True)
class Thing:
    one: str
    many: str
    gains: tuple[Verb, ...]
    losses: tuple[Verb, ...]
    kinds: tuple[tuple[str, str], ...] = ()  # of which someone may have both

    @property
    def is_money(self) -> bool:
        return not self.kinds

    def count(self, number: int) -> str:
        return f"{number} {self.named(number)}"

    def named(self, number: int) -> str:
        return self.one if number == 1 else self.many


_NAMES = (
    "Ada Adam Alice Amir Anna Ben Carla Chen Clara Dan Diego Elena Emma Eric Fatima Felix Finn Grace Hana Hugo Ida "
    "Ivan Jack Jane Jonas Julia Kai Kofi Lara Leo Lina Lucas Maria Max Mei Mia Nina Noah Nora Olga Omar Oscar Paul "
    "Petra Priya Rosa Ruth Sam Sara Sofia Tariq Theo Tina Tom Uma Vera Victor Wanda Yuki Zoe"
)
NAMES = tuple(_NAMES.split())

CONTAINERS = (
    ("box", "boxes"),
    ("bag", "bags"),
    ("jar", "jars"),
    ("basket", "baskets"),
    ("tin", "tins"),
    ("packet", "packets"),
    ("bowl", "bowls"),
    ("case", "cases"),
)

THEN = ("", "", "Then ", "Later ", "After that, ", "The next day, ", "In the evening, ", "A week later, ")

_BUYS, _GETS, _FINDS, _PICKS, _BAKES = (
    ("buys", "buying"),
    ("gets", "getting"),
    ("finds", "finding"),
    ("picks", "picking"),
    ("bakes", "baking"),
)
_GIVES, _LOSES, _SELLS, _EATS, _LENDS = (
    ("gives away", "giving away"),
    ("loses", "losing"),
    ("sells", "selling"),
    ("eats", "eating"),
    ("lends out", "lending out"),
)
_SIZES, _AGES = ("big", "small"), ("old", "new")
_COLOURS = (("red", "blue"), ("green", "white"), ("black", "yellow"))


def _things(
    words: str, gains: tuple[Verb, ...], losses: tuple[Verb, ...], kinds: tuple[tuple[str, str], ...]
) -> list[Thing]:
    """Of each word its form for many is the word with an s, or stands behind a slash."""
    pairs = [word.split("/") if "/" in word else [word, f"{word}s"] for word in words.split()]
    return [Thing(one, many, gains, losses, kinds) for one, many in pairs]


THINGS = (
    *_things(
        "apple pear plum lemon orange mango peach/peaches fig cherry/cherries strawberry/strawberries",
        (_PICKS, _BUYS, _GETS),
        (_EATS, _GIVES, _SELLS),
        (_SIZES, ("ripe", "green")),
    ),
    *_things(
        "cookie muffin bun pie waffle cupcake pretzel pancake",
        (_BAKES, _BUYS, _GETS),
        (_EATS, _GIVES, _SELLS),
        (_SIZES, ("plain", "sweet")),
    ),
    *_things(
        "marble sticker stamp shell button bead card badge ribbon balloon",
        (_FINDS, _BUYS, _GETS),
        (_LOSES, _GIVES, _SELLS),
        (*_COLOURS, _SIZES),
    ),
    *_things(
        "pencil pen crayon notebook eraser book magazine ruler",
        (_BUYS, _GETS, _FINDS),
        (_LENDS, _LOSES, _GIVES),
        (*_COLOURS, _AGES),
    ),
    *_things("tulip rose daisy/daisies lily/lilies", (_PICKS, _BUYS, _GETS), (_GIVES, _SELLS), (*_COLOURS[:2], _SIZES)),
    Thing(
        "dollar",
        "dollars",
        (("earns", "earning"), ("saves", "saving"), _GETS, _FINDS),
        (("spends", "spending"), ("donates", "donating"), _LOSES),
    ),
)

# What has nothing to do with the answer. {other} is counted, {who} is a name, {number} a number above one.
DISTRACTORS = (
    "{who} is {number} years old.",
    "{who} has {number} cousins.",
    "The way to the market takes {number} minutes.",
    "{who} has {other}.",
    "There are {number} people in the street.",
    "It is a warm day, with {number} degrees in the shade.",
)
