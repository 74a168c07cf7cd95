"""The stories that word problems tell: how they begin, what may happen, and what is asked in the end.

Each event adds a sentence to the question, a sub-question to the plan and an equation to the execution. It says
whether it could happen with the numbers that the story had.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from redline.data.problem_words import CONTAINERS, NAMES, THEN, Thing

T = TypeVar("T")
Range = tuple[int, int]


@dataclass(frozen=True)
class Level:
    steps: Range
    start: Range  # how many there are at first
    change: Range  # what is added, taken away, or in a box
    factor: Range
    most: int  # of anything
    distractors: Range = (0, 0)


class Chance:
    """Draws that are the same for a key on every machine and with every Python."""

    def __init__(self, *key: object) -> None:
        self._key, self._pool = repr(key).encode(), 0

    def below(self, n: int) -> int:
        if self._pool < 1 << 64:  # too little is left for an even choice
            self._key = hashlib.blake2b(self._key).digest()
            self._pool = int.from_bytes(self._key, "little")
        self._pool, drawn = divmod(self._pool, n)
        return drawn

    def of(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def between(self, bounds: Range) -> int:
        return bounds[0] + self.below(bounds[1] - bounds[0] + 1)


@dataclass
class Story:
    chance: Chance
    level: Level
    thing: Thing
    who: str = ""  # of whom it tells
    value: int = 0  # how many things `who` has
    other: tuple[str, int] | None = None  # whom `who` was just compared with, and how many that one has
    sentences: list[str] = field(default_factory=list)
    plan: list[str] = field(default_factory=list)
    execution: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.who = self.someone()

    def tell(self, sentence: str, after: bool = True) -> None:
        """With `after`, it happens after what was told before."""
        self.sentences.append((self.chance.of(THEN) if after else "") + sentence)

    def step(self, asked: str, equation: str, value: int) -> None:
        self.plan.append(asked)
        self.execution.append(equation)
        self.value, self.other = value, None

    def has(self, value: int, sum_: str, asked: str) -> None:
        """A step after which `who` has another number of things."""
        question = f"How many {self.thing.many} does {self.who} have {asked}?"
        self.step(question, f"{self.who} has {sum_} = {self.thing.count(value)}.", value)

    def ask(self) -> None:
        """The plainest end: how many are there?"""
        changed = self.other is None and len(self.sentences) > 1
        self.sentences.append(f"How many {self.thing.many} does {self.who} have{' now' if changed else ''}?")

    def someone(self) -> str:
        """A name that is not in the story yet."""
        name = self.chance.of([name for name in NAMES if name not in self.names])
        self.names.append(name)
        return name

    @property
    def left(self) -> int:
        """How many more there may be."""
        return self.level.most - self.value


# --- beginnings. Each says how many steps it took.


def _has(story: Story) -> int:
    story.value = story.chance.between(story.level.start)
    story.tell(f"{story.who} has {story.thing.count(story.value)}.", after=False)
    return 0


def _has_boxes(story: Story) -> int:
    boxes, each = story.chance.between(story.level.factor), max(2, story.chance.between(story.level.change))
    many = story.chance.of(CONTAINERS)[1]
    story.tell(f"{story.who} has {boxes} {many} with {story.thing.count(each)} in each.", after=False)
    story.has(boxes * each, f"{boxes} * {each}", f"in the {many}")
    return 1


def _has_daily(story: Story) -> int:
    days, each = story.chance.between(story.level.factor), story.chance.between(story.level.change)
    verb = story.chance.of(story.thing.gains)[0]
    story.tell(f"{story.who} {verb} {story.thing.count(each)} every day for {days} days.", after=False)
    story.has(days * each, f"{days} * {each}", "after these days")
    return 1


def _has_kinds(story: Story) -> int:
    if story.thing.is_money:
        return _has_daily(story)
    one, two = story.chance.of(story.thing.kinds)
    a, b = story.chance.between(story.level.start), story.chance.between(story.level.start)
    named = story.thing.named
    story.tell(f"{story.who} has {a} {one} {named(a)} and {b} {two} {named(b)}.", after=False)
    story.has(a + b, f"{a} + {b}", "in all")
    return 1


# --- events. Each says whether it could happen.


def _gain(story: Story, last: bool) -> bool:
    if story.left < story.level.change[0]:
        return False
    more = story.chance.between((story.level.change[0], min(story.level.change[1], story.left)))
    verb, doing = story.chance.of(story.thing.gains)
    story.tell(f"{story.who} {verb} {more} more {story.thing.named(more)}.")
    story.has(story.value + more, f"{story.value} + {more}", f"after {doing} more")
    return True


def _lose(story: Story, last: bool) -> bool:
    most = story.value if last else story.value - 1  # nothing can be told of someone who has nothing
    if most < story.level.change[0]:
        return False
    fewer = story.chance.between((story.level.change[0], min(story.level.change[1], most)))
    verb, doing = story.chance.of(story.thing.losses)
    story.tell(f"{story.who} {verb} {story.thing.count(fewer)}.")
    story.has(story.value - fewer, f"{story.value} - {fewer}", f"after {doing} some")
    return True


def _lose_half(story: Story, last: bool) -> bool:
    if story.value % 2 or story.value < 4:
        return False
    verb, doing = story.chance.of(story.thing.losses)
    story.tell(f"{story.who} {verb} half of the {story.thing.many}.")
    story.has(story.value // 2, f"{story.value} / 2", f"after {doing} half of them")
    return True


def _compared(story: Story, relation: str, value: int, sum_: str) -> bool:
    """The story goes on about someone else, who has more or fewer of the same."""
    before, had = story.who, story.value
    story.who = story.someone()
    now = "Now " if len(story.sentences) > 1 else ""
    story.sentences.append(f"{now}{story.who} has {relation} {before}.")
    story.step(f"How many {story.thing.many} does {story.who} have?", f"{story.who} has {sum_}.", value)
    story.other = before, had
    return True


def _other_has_more(story: Story, last: bool) -> bool:
    if story.left < story.level.change[0]:
        return False
    more = story.chance.between((story.level.change[0], min(story.level.change[1], story.left)))
    value = story.value + more
    relation = f"{more} more {story.thing.named(more)} than"
    return _compared(story, relation, value, f"{story.value} + {more} = {story.thing.count(value)}")


def _other_has_fewer(story: Story, last: bool) -> bool:
    if story.value - 1 < story.level.change[0]:
        return False
    fewer = story.chance.between((story.level.change[0], min(story.level.change[1], story.value - 1)))
    value = story.value - fewer
    relation = f"{fewer} fewer {story.thing.named(fewer)} than"
    return _compared(story, relation, value, f"{story.value} - {fewer} = {story.thing.count(value)}")


def _other_has_times(story: Story, last: bool) -> bool:
    factor = story.chance.between(story.level.factor)
    value = factor * story.value
    if value > story.level.most:
        return False
    relation = f"{factor} times as many {story.thing.many} as"
    return _compared(story, relation, value, f"{factor} * {story.value} = {story.thing.count(value)}")


def _gain_boxes(story: Story, last: bool) -> bool:
    boxes, each = story.chance.between(story.level.factor), max(2, story.chance.between(story.level.change))
    inside = boxes * each
    if inside > story.left:
        return False
    value, thing, many = story.value, story.thing, story.chance.of(CONTAINERS)[1]
    story.tell(f"{story.who} gets {boxes} {many} with {thing.count(each)} in each.")
    asked = f"How many {thing.many} are in the {many}?"
    story.step(asked, f"In the {many} there are {boxes} * {each} = {thing.count(inside)}.", inside)
    story.has(value + inside, f"{value} + {inside}", f"with those in the {many}")
    return True


def _lose_daily(story: Story, last: bool) -> bool:
    value, thing, days = story.value, story.thing, story.chance.between(story.level.factor)
    most = (value if last else value - 1) // days
    if most < story.level.change[0]:
        return False
    each = story.chance.between((story.level.change[0], min(story.level.change[1], most)))
    verb, doing = story.chance.of(thing.losses)
    story.tell(f"{story.who} {verb} {thing.count(each)} every day for {days} days.")
    gone = days * each
    story.step(f"How many {thing.many} are gone?", f"In {days} days {days} * {each} = {gone} are gone.", gone)
    story.has(value - gone, f"{value} - {gone}", f"after {doing} these")
    return True


Event = Callable[[Story, bool], bool]
EVENTS: dict[int, tuple[Event, ...]] = {  # by the steps they take
    1: (_gain, _gain, _lose, _lose, _lose_half, _other_has_more, _other_has_fewer, _other_has_times),
    2: (_gain_boxes, _lose_daily),
}
BEGINNINGS = (_has, _has, _has_boxes, _has_daily, _has_kinds)


# --- ends of one step, each with the question. The plainest, of no step, asks for what there is.


def _share(story: Story) -> bool:
    parts = [part for part in range(2, story.level.factor[1] * 2 + 1) if story.value and story.value % part == 0]
    if not parts:
        return False
    friends, many = story.chance.of(parts), story.thing.many
    each, asked = story.value // friends, f"How many {many} does each friend get?"
    story.tell(f"{story.who} shares all the {many} equally among {friends} friends. {asked}")
    story.step(asked, f"Each friend gets {story.value} / {friends} = {story.thing.count(each)}.", each)
    return True


def _pack(story: Story) -> bool:
    sizes = [size for size in range(2, story.level.factor[1] * 2 + 1) if story.value and story.value % size == 0]
    if not sizes:
        return False
    size, (one, many) = story.chance.of(sizes), story.chance.of(CONTAINERS)
    filled, asked = story.value // size, f"How many {many} does {story.who} fill?"
    story.tell(f"{story.who} puts all the {story.thing.many} into {many}, {size} in each. {asked}")
    story.step(asked, f"{story.who} fills {story.value} / {size} = {filled} {one if filled == 1 else many}.", filled)
    return True


def _sell(story: Story) -> bool:
    price = story.chance.between(story.level.factor)
    money = story.value * price
    if story.thing.is_money or not story.value or money > story.level.most:
        return False
    asked = f"How many dollars does {story.who} get?"
    story.tell(f"{story.who} sells all the {story.thing.many} for {price} dollars each. {asked}")
    story.step(asked, f"{story.who} gets {story.value} * {price} = {money} dollars.", money)
    return True


def _together(story: Story) -> bool:
    if story.other is None or story.value + story.other[1] > story.level.most:
        return False
    other, had = story.other
    value = story.value + had
    asked = f"How many {story.thing.many} do {other} and {story.who} have together?"
    story.tell(asked, after=False)
    story.step(asked, f"Together they have {had} + {story.value} = {story.thing.count(value)}.", value)
    return True


ENDS = (_share, _pack, _sell, _together, _together)
