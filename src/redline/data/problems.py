"""Arithmetic word problems without a download: each is a function of (seed, number, level).

A problem is a story about how many things someone has. All of its numbers are whole, and none is negative.
"""

from __future__ import annotations

import re

from redline.data.problem_story import BEGINNINGS, ENDS, EVENTS, Chance, Level, Story
from redline.data.problem_words import DISTRACTORS, THINGS
from redline.data.record import Record
from redline.errors import UserError, did_you_mean
from redline.units import parse_count

PREFIX = "problems:"
COUNT, MOST = 20_000, 1_000_000
TRAIN, TEST = "train", "test"
_SEED = 0
_TEST_SHARE = 8  # one in so many questions is of the test split
_FORM = f"{PREFIX}LEVEL, {PREFIX}LEVEL:COUNT or {PREFIX}LEVEL:COUNT@{TEST}"
_PATTERN = re.compile(r"(?P<level>[^:@]+)(:(?P<count>[^:@]+))?(@(?P<split>\w+))?")

LEVELS = {
    "easy": Level(steps=(1, 2), start=(2, 20), change=(1, 12), factor=(2, 5), most=60),
    "medium": Level(steps=(3, 3), start=(10, 99), change=(10, 60), factor=(2, 6), most=999),
    "hard": Level(steps=(4, 6), start=(100, 900), change=(20, 400), factor=(2, 12), most=9999, distractors=(1, 3)),
}


def problem(seed: int, number: int, level: str) -> Record:
    """The problem of this number. Different numbers give, rarely, the same one."""
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
    """Something happens that takes one step or two, and at most so many."""
    while True:
        steps = 2 if left > 1 and story.chance.below(4) == 0 else 1
        if story.chance.of(EVENTS[steps])(story, steps == left):
            return steps


def _distract(story: Story) -> None:
    """Numbers that nobody asked about, anywhere between the first sentence and the last."""
    unused = list(DISTRACTORS)
    for _ in range(story.chance.between(story.level.distractors)):
        sentence = unused.pop(story.chance.below(len(unused)))
        thing = story.chance.of([thing for thing in THINGS if thing != story.thing])
        number, who = story.chance.between((5, 60)), story.chance.of(story.names)
        told = sentence.format(who=who, number=number, other=thing.count(number))
        story.sentences.insert(1 + story.chance.below(len(story.sentences) - 1), told)


def is_problems(source: str) -> bool:
    return source.startswith(PREFIX)


def problems(source: str) -> list[Record]:
    """As many as `source` asks for, all different; none of the training split is in the test split of any count."""
    level, count, split = _parsed(source)
    found: dict[str, Record] = {}
    number = 0
    while len(found) < count:
        record = problem(_SEED, number, level)
        number += 1
        if (record.key % _TEST_SHARE == 0) == (split == TEST):
            found.setdefault(record.question, record)
    return list(found.values())


def problem_count(source: str) -> int:
    return _parsed(source)[1]


def _parsed(source: str) -> tuple[str, int, str]:
    found = _PATTERN.fullmatch(source.removeprefix(PREFIX))
    if found is None or found["split"] not in (None, TRAIN, TEST):
        raise UserError("is no source of word problems.", where=source, fix=f"Write {_FORM}.")
    level = found["level"]
    if level not in LEVELS:
        hint = did_you_mean(level, LEVELS)
        raise UserError(f"{level!r} is no level.", where=source, fix=f"There are {', '.join(LEVELS)}. {hint}".rstrip())
    try:
        count = parse_count(found["count"]) if found["count"] else COUNT
    except ValueError:
        count = 0
    if not 1 <= count <= MOST:
        fix = f"Write {_FORM} with at most {MOST:,}."
        raise UserError(f"{found['count']!r} is no count of problems.", where=source, fix=fix)
    return level, count, found["split"] or TRAIN
