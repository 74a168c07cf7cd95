"""Arithmetic word problems, generated without a download: each is a function of (seed, number, level).

A problem is a story about how many things a person has. All of its numbers are whole and not negative. A change of any
text or draw here changes the data of every run on word problems.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from redline.data.chance import Chance, Range
from redline.data.splits import key_of
from redline.errors import UserError, did_you_mean
from redline.units import parse_count

# ----------------------------------------------------------------------------------------------------
# Vocabulary: names, things, what people do with them, and where they keep them.


Verb = tuple[str, str]  # "buys", "buying"


@dataclass(frozen=True)
class Thing:
    one: str
    many: str
    gains: tuple[Verb, ...]
    losses: tuple[Verb, ...]
    kinds: tuple[tuple[str, str], ...] = ()  # pairs of adjectives: a person may have things of both kinds

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
    """Make a thing of each word. The plural is the word with an s, unless it is given after a slash."""
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

# Sentences that have nothing to do with the answer. {other} is a number of things, {who} a name, {number} at least 2.
DISTRACTORS = (
    "{who} is {number} years old.",
    "{who} has {number} cousins.",
    "The way to the market takes {number} minutes.",
    "{who} has {other}.",
    "There are {number} people in the street.",
    "It is a warm day, with {number} degrees in the shade.",
)


# ----------------------------------------------------------------------------------------------------
# Stories: a beginning, events, and a question at the end.
#
# Each event adds a sentence to the question, a sub-question to the plan and an equation to the execution. It returns
# False, and adds nothing, if it is impossible with the numbers of the story so far.


@dataclass(frozen=True)
class Level:
    steps: Range
    start: Range  # the number of things at the beginning
    change: Range  # how many are added, removed, or in a box
    factor: Range
    most: int  # the largest number that may occur
    distractors: Range = (0, 0)


@dataclass
class Story:
    chance: Chance
    level: Level
    thing: Thing
    who: str = ""  # the person that the story is about at the moment
    value: int = 0  # how many things `who` has
    other: tuple[str, int] | None = None  # the person that `who` was just compared with, and how many that person has
    sentences: list[str] = field(default_factory=list)
    plan: list[str] = field(default_factory=list)
    execution: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.who = self.someone()

    def add(self, sentence: str, after: bool = True) -> None:
        """Add a sentence. With `after`, it may begin with "Then" or the like."""
        self.sentences.append((self.chance.of(THEN) if after else "") + sentence)

    def step(self, asked: str, equation: str, value: int) -> None:
        self.plan.append(asked)
        self.execution.append(equation)
        self.value, self.other = value, None

    def has(self, value: int, sum_: str, asked: str) -> None:
        """Add a step after which `who` has `value` things."""
        question = f"How many {self.thing.many} does {self.who} have {asked}?"
        self.step(question, f"{self.who} has {sum_} = {self.thing.count(value)}.", value)

    def ask(self) -> None:
        """End the story with the plain question of how many things there are."""
        changed = self.other is None and len(self.sentences) > 1
        self.sentences.append(f"How many {self.thing.many} does {self.who} have{' now' if changed else ''}?")

    def someone(self) -> str:
        """Draw a name that is not in the story yet."""
        name = self.chance.of([name for name in NAMES if name not in self.names])
        self.names.append(name)
        return name

    @property
    def left(self) -> int:
        """How many more things there may be."""
        return self.level.most - self.value


# --- beginnings. Each returns the number of steps it took.


def _has(story: Story) -> int:
    story.value = story.chance.between(story.level.start)
    story.add(f"{story.who} has {story.thing.count(story.value)}.", after=False)
    return 0


def _has_boxes(story: Story) -> int:
    boxes, each = story.chance.between(story.level.factor), max(2, story.chance.between(story.level.change))
    many = story.chance.of(CONTAINERS)[1]
    story.add(f"{story.who} has {boxes} {many} with {story.thing.count(each)} in each.", after=False)
    story.has(boxes * each, f"{boxes} * {each}", f"in the {many}")
    return 1


def _has_daily(story: Story) -> int:
    days, each = story.chance.between(story.level.factor), story.chance.between(story.level.change)
    verb = story.chance.of(story.thing.gains)[0]
    story.add(f"{story.who} {verb} {story.thing.count(each)} every day for {days} days.", after=False)
    story.has(days * each, f"{days} * {each}", "after these days")
    return 1


def _has_kinds(story: Story) -> int:
    if story.thing.is_money:
        return _has_daily(story)
    one, two = story.chance.of(story.thing.kinds)
    a, b = story.chance.between(story.level.start), story.chance.between(story.level.start)
    named = story.thing.named
    story.add(f"{story.who} has {a} {one} {named(a)} and {b} {two} {named(b)}.", after=False)
    story.has(a + b, f"{a} + {b}", "in all")
    return 1


# --- events. Each returns whether it was possible.


def _gain(story: Story, last: bool) -> bool:
    if story.left < story.level.change[0]:
        return False
    more = story.chance.between((story.level.change[0], min(story.level.change[1], story.left)))
    verb, doing = story.chance.of(story.thing.gains)
    story.add(f"{story.who} {verb} {more} more {story.thing.named(more)}.")
    story.has(story.value + more, f"{story.value} + {more}", f"after {doing} more")
    return True


def _lose(story: Story, last: bool) -> bool:
    most = story.value if last else story.value - 1  # later events need a person who has something
    if most < story.level.change[0]:
        return False
    fewer = story.chance.between((story.level.change[0], min(story.level.change[1], most)))
    verb, doing = story.chance.of(story.thing.losses)
    story.add(f"{story.who} {verb} {story.thing.count(fewer)}.")
    story.has(story.value - fewer, f"{story.value} - {fewer}", f"after {doing} some")
    return True


def _lose_half(story: Story, last: bool) -> bool:
    if story.value % 2 or story.value < 4:
        return False
    verb, doing = story.chance.of(story.thing.losses)
    story.add(f"{story.who} {verb} half of the {story.thing.many}.")
    story.has(story.value // 2, f"{story.value} / 2", f"after {doing} half of them")
    return True


def _add_person(story: Story, relation: str, value: int, sum_: str) -> bool:
    """Continue the story with another person, who has more or fewer of the same things."""
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
    return _add_person(story, relation, value, f"{story.value} + {more} = {story.thing.count(value)}")


def _other_has_fewer(story: Story, last: bool) -> bool:
    if story.value - 1 < story.level.change[0]:
        return False
    fewer = story.chance.between((story.level.change[0], min(story.level.change[1], story.value - 1)))
    value = story.value - fewer
    relation = f"{fewer} fewer {story.thing.named(fewer)} than"
    return _add_person(story, relation, value, f"{story.value} - {fewer} = {story.thing.count(value)}")


def _other_has_times(story: Story, last: bool) -> bool:
    factor = story.chance.between(story.level.factor)
    value = factor * story.value
    if value > story.level.most:
        return False
    relation = f"{factor} times as many {story.thing.many} as"
    return _add_person(story, relation, value, f"{factor} * {story.value} = {story.thing.count(value)}")


def _gain_boxes(story: Story, last: bool) -> bool:
    boxes, each = story.chance.between(story.level.factor), max(2, story.chance.between(story.level.change))
    inside = boxes * each
    if inside > story.left:
        return False
    value, thing, many = story.value, story.thing, story.chance.of(CONTAINERS)[1]
    story.add(f"{story.who} gets {boxes} {many} with {thing.count(each)} in each.")
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
    story.add(f"{story.who} {verb} {thing.count(each)} every day for {days} days.")
    gone = days * each
    story.step(f"How many {thing.many} are gone?", f"In {days} days {days} * {each} = {gone} are gone.", gone)
    story.has(value - gone, f"{value} - {gone}", f"after {doing} these")
    return True


Event = Callable[[Story, bool], bool]
EVENTS: dict[int, tuple[Event, ...]] = {  # by the number of steps
    1: (_gain, _gain, _lose, _lose, _lose_half, _other_has_more, _other_has_fewer, _other_has_times),
    2: (_gain_boxes, _lose_daily),
}
BEGINNINGS = (_has, _has, _has_boxes, _has_daily, _has_kinds)


# --- ends that take one step and ask the question. `Story.ask` is the end without a step.


def _share(story: Story) -> bool:
    parts = [part for part in range(2, story.level.factor[1] * 2 + 1) if story.value and story.value % part == 0]
    if not parts:
        return False
    friends, many = story.chance.of(parts), story.thing.many
    each, asked = story.value // friends, f"How many {many} does each friend get?"
    story.add(f"{story.who} shares all the {many} equally among {friends} friends. {asked}")
    story.step(asked, f"Each friend gets {story.value} / {friends} = {story.thing.count(each)}.", each)
    return True


def _pack(story: Story) -> bool:
    sizes = [size for size in range(2, story.level.factor[1] * 2 + 1) if story.value and story.value % size == 0]
    if not sizes:
        return False
    size, (one, many) = story.chance.of(sizes), story.chance.of(CONTAINERS)
    filled, asked = story.value // size, f"How many {many} does {story.who} fill?"
    story.add(f"{story.who} puts all the {story.thing.many} into {many}, {size} in each. {asked}")
    story.step(asked, f"{story.who} fills {story.value} / {size} = {filled} {one if filled == 1 else many}.", filled)
    return True


def _sell(story: Story) -> bool:
    price = story.chance.between(story.level.factor)
    money = story.value * price
    if story.thing.is_money or not story.value or money > story.level.most:
        return False
    asked = f"How many dollars does {story.who} get?"
    story.add(f"{story.who} sells all the {story.thing.many} for {price} dollars each. {asked}")
    story.step(asked, f"{story.who} gets {story.value} * {price} = {money} dollars.", money)
    return True


def _together(story: Story) -> bool:
    if story.other is None or story.value + story.other[1] > story.level.most:
        return False
    other, had = story.other
    value = story.value + had
    asked = f"How many {story.thing.many} do {other} and {story.who} have together?"
    story.add(asked, after=False)
    story.step(asked, f"Together they have {had} + {story.value} = {story.thing.count(value)}.", value)
    return True


ENDS = (_share, _pack, _sell, _together, _together)


# ----------------------------------------------------------------------------------------------------
# Problems: the question, the plan, the steps of the solution, and the number that is the answer.


@dataclass(frozen=True)
class Record:
    question: str
    plan: str  # sub-questions, one per line; empty if the source has none
    execution: str  # steps, one per line
    answer: str  # a number, as text

    @property
    def key(self) -> int:
        """64 bits that stand for the question, whatever its solution is."""
        return key_of(self.question)


PREFIX = "problems:"
COUNT, MOST = 20_000, 1_000_000
TRAIN, TEST = "train", "test"
_SEED = 0
_TEST_SHARE = 8  # one in so many questions is in the test split
_FORM = f"{PREFIX}LEVEL, {PREFIX}LEVEL:COUNT or {PREFIX}LEVEL:COUNT@{TEST}"
_PATTERN = re.compile(r"(?P<level>[^:@]+)(:(?P<count>[^:@]+))?(@(?P<split>\w+))?")

LEVELS = {
    "easy": Level(steps=(1, 2), start=(2, 20), change=(1, 12), factor=(2, 5), most=60),
    "medium": Level(steps=(3, 3), start=(10, 99), change=(10, 60), factor=(2, 6), most=999),
    "hard": Level(steps=(4, 6), start=(100, 900), change=(20, 400), factor=(2, 12), most=9999, distractors=(1, 3)),
}


def problem(seed: int, number: int, level: str) -> Record:
    """Generate the problem with this number. Two numbers may, rarely, give the same problem."""
    bounds = LEVELS[level]
    chance = Chance(level, seed, number)
    story = Story(chance, bounds, chance.of(THINGS))
    left = chance.between(bounds.steps)
    left -= chance.of(BEGINNINGS)(story)
    ended = False
    while left:
        ended = left == 1 and chance.below(2) == 0 and chance.of(ENDS)(story)
        left -= 1 if ended else _happen(story, left)
    if not ended:
        story.ask()
    _distract(story)
    return Record(" ".join(story.sentences), "\n".join(story.plan), "\n".join(story.execution), str(story.value))


def _happen(story: Story, left: int) -> int:
    """Add an event of one or two steps, at most `left`, and return its number of steps."""
    while True:
        steps = 2 if left > 1 and story.chance.below(4) == 0 else 1
        if story.chance.of(EVENTS[steps])(story, steps == left):
            return steps


def _distract(story: Story) -> None:
    """Insert sentences with irrelevant numbers between the first sentence and the last."""
    unused = list(DISTRACTORS)
    for _ in range(story.chance.between(story.level.distractors)):
        sentence = unused.pop(story.chance.below(len(unused)))
        thing = story.chance.of([thing for thing in THINGS if thing != story.thing])
        number, who = story.chance.between((5, 60)), story.chance.of(story.names)
        distractor = sentence.format(who=who, number=number, other=thing.count(number))
        story.sentences.insert(1 + story.chance.below(len(story.sentences) - 1), distractor)


def is_problems(source: str) -> bool:
    """Return whether `source` names generated word problems."""
    return source.startswith(PREFIX)


def problems(source: str) -> list[Record]:
    """Generate the problems that `source` names, all different. No problem is in both the train and the test split."""
    level, count, split = _parsed(source)
    records: dict[str, Record] = {}
    number = 0
    while len(records) < count:
        record = problem(_SEED, number, level)
        number += 1
        if (record.key % _TEST_SHARE == 0) == (split == TEST):
            records.setdefault(record.question, record)
    return list(records.values())


def problem_count(source: str) -> int:
    """Return the number of problems that `source` names."""
    return _parsed(source)[1]


def _parsed(source: str) -> tuple[str, int, str]:
    """Return the level, the count and the split that `source` names."""
    match = _PATTERN.fullmatch(source.removeprefix(PREFIX))
    if match is None or match["split"] not in (None, TRAIN, TEST):
        raise UserError("the name of the word problems is not valid.", where=source, fix=f"Write {_FORM}.")
    level = match["level"]
    if level not in LEVELS:
        hint = did_you_mean(level, LEVELS)
        fix = f"Use one of {', '.join(LEVELS)}. {hint}".rstrip()
        raise UserError(f"{level!r} is not a level.", where=source, fix=fix)
    try:
        count = parse_count(match["count"]) if match["count"] else COUNT
    except ValueError:
        count = 0
    if not 1 <= count <= MOST:
        fix = f"Write {_FORM} with COUNT between 1 and {MOST:,}."
        raise UserError(f"{match['count']!r} is not a number of problems.", where=source, fix=fix)
    return level, count, match["split"] or TRAIN
