"""Word problems agree with their solutions: a reader of the question alone gets the same number."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.data.problems import LEVELS, THINGS, Record, problem, problems
from redline.errors import UserError

THEN = re.compile(r"^(Then|Later|After that,|The next day,|In the evening,|A week later,|Now) ")
GAINS = "buys|gets|finds|picks|bakes|earns|saves"
LOSSES = "gives away|loses|sells|eats|lends out|spends|donates"
EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)\b")
PLURAL = {thing.one: thing.many for thing in THINGS} | {thing.many: thing.many for thing in THINGS}

any_problem = st.builds(
    lambda seed, number, level: (level, problem(seed, number, level)),
    st.integers(0, 2**63),
    st.integers(0, 10**9),
    st.sampled_from(sorted(LEVELS)),
)


def thing_of(first: str) -> str:
    """Return the first thing that the story counts."""
    words = re.findall(r"\w+", first)
    return next(PLURAL[word] for word in words if word in PLURAL)


class Reader:
    """Solves a question sentence by sentence, without access to the code that generated it."""

    def __init__(self, question: str) -> None:
        sentences = re.findall(r"[^.?]+[.?]", question)
        self.thing = thing_of(sentences[0])
        self.has: dict[str, int] = {}
        self.unread: list[str] = []
        self.answer: int | None = None
        for sentence in sentences:
            text = THEN.sub("", sentence.strip())
            if not self.read(" ".join(PLURAL.get(word, word) for word in re.split(r"\b ", text[:-1]))):
                self.unread.append(text)

    def match(self, pattern: str, text: str) -> tuple[str, ...] | None:
        groups = re.fullmatch(pattern.replace("THINGS", self.thing), text)
        return None if groups is None else groups.groups()

    def read(self, text: str) -> bool:
        has = self.has
        if groups := self.match(r"(\w+) has (\d+) THINGS", text):
            has[groups[0]] = int(groups[1])
        elif groups := self.match(r"(\w+) (?:has|gets) (\d+) \w+ with (\d+) THINGS in each", text):
            has[groups[0]] = has.get(groups[0], 0) + int(groups[1]) * int(groups[2])
        elif groups := self.match(r"(\w+) has (\d+) (\w+) THINGS and (\d+) (\w+) THINGS", text):
            assert groups[2] != groups[4]
            has[groups[0]] = int(groups[1]) + int(groups[3])
        elif groups := self.match(rf"(\w+) (?:{GAINS}) (\d+) THINGS every day for (\d+) days", text):
            has[groups[0]] = has.get(groups[0], 0) + int(groups[1]) * int(groups[2])
        elif groups := self.match(rf"(\w+) (?:{LOSSES}) (\d+) THINGS every day for (\d+) days", text):
            has[groups[0]] -= int(groups[1]) * int(groups[2])
        elif groups := self.match(rf"(\w+) (?:{GAINS}) (\d+) more THINGS", text):
            has[groups[0]] += int(groups[1])
        elif groups := self.match(rf"(\w+) (?:{LOSSES}) (\d+) THINGS", text):
            has[groups[0]] -= int(groups[1])
        elif groups := self.match(rf"(\w+) (?:{LOSSES}) half of the THINGS", text):
            has[groups[0]] = self.whole(Fraction(has[groups[0]], 2))
        elif groups := self.match(r"(\w+) has (\d+) (more|fewer) THINGS than (\w+)", text):
            has[groups[0]] = has[groups[3]] + int(groups[1]) * (1 if groups[2] == "more" else -1)
        elif groups := self.match(r"(\w+) has (\d+) times as many THINGS as (\w+)", text):
            has[groups[0]] = int(groups[1]) * has[groups[2]]
        elif groups := self.match(
            r"(\w+) (?:shares all the THINGS equally among|puts all the THINGS into \w+,) (\d+) (?:friends|in each)",
            text,
        ):
            self.answer = self.whole(Fraction(has[groups[0]], int(groups[1])))
        elif groups := self.match(r"(\w+) sells all the THINGS for (\d+) dollars each", text):
            self.answer = has[groups[0]] * int(groups[1])
        elif groups := self.match(r"How many THINGS do (\w+) and (\w+) have together", text):
            self.answer = has[groups[0]] + has[groups[1]]
        elif groups := self.match(r"How many THINGS does (\w+) have(?: now)?", text):
            self.answer = has[groups[0]]
        else:
            return text.startswith("How many") and self.answer is not None
        assert all(count >= 0 for count in has.values())
        return True

    @staticmethod
    def whole(number: Fraction) -> int:
        assert number.denominator == 1
        return number.numerator


def check_equations(record: Record) -> None:
    """Check that each line computes correctly, from numbers of the question or of earlier lines."""
    known = {int(number) for number in re.findall(r"\d+", record.question)}
    known |= {2} if "half" in record.question else set()
    for line in record.execution.splitlines():
        equations = EQUATION.findall(line)
        assert len(equations) == 1, line
        (a, sign, b, result) = (int(equations[0][0]), equations[0][1], int(equations[0][2]), int(equations[0][3]))
        assert {a, b} <= known, line
        computed = {"+": a + b, "-": a - b, "*": a * b, "/": Fraction(a, b or 1)}[sign]
        assert computed == result, line
        known.add(result)
    assert result == int(record.answer)


@given(any_problem)
def test_the_question_alone_gives_the_answer(drawn: tuple[str, Record]) -> None:
    level, record = drawn
    reader = Reader(record.question)
    assert reader.answer == int(record.answer) >= 0, record
    assert (1 if level == "hard" else 0) <= len(reader.unread) <= (3 if level == "hard" else 0), reader.unread
    check_equations(record)


@given(any_problem)
def test_levels_differ_in_steps_and_sizes(drawn: tuple[str, Record]) -> None:
    level, record = drawn
    steps = record.execution.splitlines()
    assert len(steps) in {"easy": (1, 2), "medium": (3,), "hard": (4, 5, 6)}[level]
    plan = record.plan.splitlines()
    assert len(plan) == len(steps)
    assert all(line.endswith("?") for line in plan)
    numbers = [int(number) for number in re.findall(r"\d+", record.question + record.execution)]
    assert max(numbers) <= {"easy": 60, "medium": 999, "hard": 9999}[level]


@given(any_problem)
def test_english(drawn: tuple[str, Record]) -> None:
    _, record = drawn
    for text in (record.question, record.plan, record.execution):
        assert "  " not in text
        assert all(line[:1].isupper() and line.endswith((".", "?")) for line in text.splitlines())
        for number, word in re.findall(r"\b(\d+) (?:more |fewer )?(\w+)", text):
            if word in PLURAL:
                assert (word == PLURAL[word]) == (number != "1"), text
    assert re.search(r"[.] [A-Z][^.]*[?]$", record.question)
    assert record.question.count("?") == 1


def test_a_problem_is_a_function_of_its_number() -> None:
    """Problems are equal on every machine and Python. Changing the stories would change the data of existing runs."""
    record = problem(0, 0, "easy")
    assert record == problem(0, 0, "easy") != problem(1, 0, "easy") != problem(1, 1, "easy")
    assert record == Record(
        "Hana has 3 cherries. Then Hana gets 3 more cherries. How many cherries does Hana have now?",
        "How many cherries does Hana have after getting more?",
        "Hana has 3 + 3 = 6 cherries.",
        "6",
    )


def test_problems_are_many_and_of_all_kinds() -> None:
    questions = [problem(0, number, "easy").question for number in range(21_000)]
    assert len(set(questions)) >= 20_000
    for part in ("every day", "in each", "more", "fewer", "times as many", "half of", "equally", "together", "dollars"):
        assert sum(part in question for question in questions) > 200, part
    answers = [int(problem(0, number, "easy").answer) for number in range(3000)]
    assert max(answers.count(value) for value in set(answers)) < 300, "no answer is a good guess"


def test_a_source_has_the_requested_number_and_a_disjoint_test_split() -> None:
    records = problems("problems:easy:300")
    assert len({record.question for record in records}) == len(records) == 300
    assert problems("problems:easy:200") == problems("problems:easy:200@train") == records[:200]
    assert len(problems("problems:medium:1k")) == 1000
    held_out = problems("problems:easy:500@test")
    assert len({record.question for record in held_out}) == 500
    trained = {record.question for record in problems("problems:easy")}
    assert len(trained) == 20_000
    assert trained.isdisjoint(record.question for record in held_out)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("problems:esay", r"'esay' is not a level\. Use one of easy, medium, hard\. Did you mean 'easy'\?"),
        ("problems:", r"not valid\. Write problems:LEVEL"),
        ("problems:easy:none", r"'none' is not a number.*problems:LEVEL, .* 1,000,000"),
        ("problems:easy:0", "'0' is not a number"),
        ("problems:easy:2M", "'2M' is not a number"),
        ("problems:easy@dev", "not valid"),
        ("problems:easy:5:6", "not valid"),
    ],
)
def test_invalid_sources_are_refused(source: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        problems(source)
