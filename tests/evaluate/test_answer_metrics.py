"""How answers are compared with their references: numbers, texts, and words."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.metrics import (
    RULE,
    answer_match,
    answer_text,
    exact_match,
    f1,
    final_answer,
    gsm8k_answer,
    gsm8k_exact_match,
    normalised,
    number_match,
)

GSM8K = Path(__file__).parents[3] / "shared/data/gsm8k/test.jsonl"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("She sold 48+24 = <<48+24=72>>72 clips.\n#### 72", "72"),
        ("#### 1,234,567", "1234567"),
        ("#### $1,200.50", "1200.5"),
        ("#### 18 dollars a day", "18"),
        ("####\n-5", "-5"),
        ("#### −5", "-5"),  # a true minus sign
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### +7", "7"),
        ("#### 50%", "50"),
        ("#### .5", "0.5"),
        ("#### 0.50", "0.5"),
        ("#### 10.00", "10"),
        ("#### 100", "100"),  # zeros before the point stay
        ("#### -0.0", "0"),
        ("#### 007", "7"),
        ("#### 12345678901234567890123456789012345", "12345678901234567890123456789012345"),
        ("#### 3 #### 4 and 5", "4"),  # behind the last mark, the first number
        ("It was 5, so 10 - 3 is 7.", "7"),  # no mark: the last number, without the full stop
        ("he had 10-5", "5"),  # a subtraction is no sign
        ("he had 10 - 5", "5"),
        ("he is at -5", "-5"),
        ("between 3, 4 or 1,2345", "2345"),  # commas that part no thousands
        ("So 12 of them.\n#### none", None),  # a mark without a number is no answer
        ("####", None),
        ("no number at all", None),
        ("", None),
    ],
)
def test_the_number_of_a_solution(text: str, answer: str | None) -> None:
    assert gsm8k_answer(text) == answer


@settings(deadline=None)
@given(st.decimals(allow_nan=False, allow_infinity=False, places=3), st.sampled_from(["#### {}", "It is ${}.", "{}%"]))
def test_a_number_is_found_however_it_is_written(number: object, form: str) -> None:
    plain = f"{number:f}"
    grouped = f"{number:,f}"
    expected = re.sub(r"\.?0+$", "", plain)
    expected = "0" if expected in ("", "-", "-0") else expected
    assert gsm8k_answer(form.format(plain)) == gsm8k_answer(form.format(grouped)) == expected


def test_exact_match_of_solutions() -> None:
    references = ["a\n#### 1,000", "b\n#### 2", "c\n#### 3", "#### no", "d\n#### 5"]
    predictions = ["It is $1000.00", "#### 3", "so 3", "none either", "5 is wrong: #### "]
    assert gsm8k_exact_match(predictions, references) == 2 / 5
    with pytest.raises(ValueError, match="1 predictions for 2 references"):
        gsm8k_exact_match(["1"], ["1", "2"])
    with pytest.raises(ValueError):
        gsm8k_exact_match([], [])


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<|execution|>48 / 2 = 24<|answer|>24<|pad|><|pad|>", "24"),
        ("<|answer|> $1,200.50 for 3 days", "1200.5"),  # the first number behind the mark
        ("<|answer|>-5", "-5"),
        ("<|answer|>1<|answer|>2", "2"),  # the last mark counts
        ("<|answer|>7\n#### 9", "7"),  # before ####
        ("#### 9 <|answer|>7", "7"),
        ("so 3 #### 9", "9"),
        ("#### 9 and 3", "9"),
        ("first 3, then 9.", "9"),
        ("It is 12.<|answer|><|pad|><|pad|>", None),  # a mark without a number is no answer
        ("<|answer|><|pad|><|execution|>17", None),  # what another part says was not given as the answer
        ("<|answer|>", None),
        ("nothing", None),
    ],
)
def test_the_final_answer_by_the_rule(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


def test_the_rule_names_its_marks_in_their_order() -> None:
    assert RULE.index("<|answer|>") < RULE.index("####") < RULE.index("the last number")


@pytest.mark.skipif(not GSM8K.is_file(), reason="GSM8K is not on this machine")
def test_every_reference_of_gsm8k_is_its_own_answer() -> None:
    answers = [json.loads(line)["answer"] for line in GSM8K.read_text(encoding="utf-8").splitlines()]
    assert gsm8k_exact_match(answers, answers) == 1.0
    assert [gsm8k_answer(a) for a in answers] == [a.split("#### ")[1].replace(",", "") for a in answers]


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Eiffel\tTower.", "eiffel tower"),
        ("An apple a day", "apple day"),
        ("theatre", "theatre"),  # an article is a word, not a beginning
        ("U.S.A.", "usa"),
        ("a", ""),
        ("", ""),
    ],
)
def test_normal_form(text: str, normal: str) -> None:
    assert normalised(text) == normal


def test_exact_match_takes_the_best_reference() -> None:
    assert exact_match(["The Eiffel Tower!", "paris"], [["eiffel tower", "a tower"], "London"]) == 0.5
    assert exact_match(["the"], [""]) == 1.0  # both say nothing


def test_f1_counts_shared_words_as_often_as_both_have_them() -> None:
    assert f1(["red red blue"], ["red green"]) == pytest.approx(2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2))
    assert f1(["red red"], ["red red red"]) == pytest.approx(0.8)
    assert f1(["completely other"], ["red"]) == 0.0
    assert f1(["", "x"], ["", ""]) == 0.5
    assert f1(["a red car"], [["the car", "Red car."]]) == 1.0


@settings(deadline=None)
@given(st.text(), st.text())
def test_f1_is_symmetric_and_never_below_exact_match(one: str, other: str) -> None:
    assert f1([one], [other]) == f1([other], [one])
    assert 0.0 <= exact_match([one], [other]) <= f1([one], [other]) <= 1.0
    assert exact_match([one], [one]) == f1([one], [one]) == 1.0


@pytest.mark.parametrize("answer", ["1/2", "16 m2", "5 of 9", "2:30", "3 hours 20 minutes", "12 km", "-4", "$1,250.50"])
def test_an_answer_behind_its_mark_is_right(answer: str) -> None:
    """Texts with several numbers are compared too: both sides are read by the same rule."""
    said = f"So it is 7 + 5.<|answer|>{answer}<|pad|>"
    assert gsm8k_exact_match([said], [answer]) == 1.0
    assert number_match([said], [["99", answer]]) == 1.0
    assert exact_match([answer_text(said)], [answer]) == 1.0
    assert gsm8k_exact_match([said], ["77"]) == 0.0


def test_numbers_are_not_words() -> None:
    assert exact_match(["5"], [["-5"]]) == 1.0, "by SQuAD's rules"
    assert number_match(["5"], [["-5"]]) == 0.0


@pytest.mark.parametrize(
    ("said", "true", "right"),
    [
        ('{"who": "Ben", "count": 2}', '{"who": "Ben", "count": 2}', True),
        ('{"count":2,\n "who":"Ben"}', '{"who": "Ben", "count": 2}', True),
        (' {"count": 2.0, "who": "Ben"} ', '{"who": "Ben", "count": 2}', True),
        ('"who": "Ben", "count": 2', '{"who": "Ben", "count": 2}', False),
        ("who Ben count 2", '{"who": "Ben", "count": 2}', False),
        ('{"who": "ben", "count": 2}', '{"who": "Ben", "count": 2}', False),
        ('{"who": "Ben", "count": "2"}', '{"who": "Ben", "count": 2}', False),
        ('{"who": "Ben", "count": 2} and more', '{"who": "Ben", "count": 2}', False),
        ('{"on": true}', '{"on": 1}', False),
        ('["a", "b"]', '["b", "a"]', False),
        ('["a", "b"]', '[ "a","b" ]', True),
        ('{"x": NaN}', '{"x": 1}', False),
        ('{"a": 1, "a": 2}', '{"a": 2}', False),
        ("[" * 5000, "[1]", False),
        ("the Answer", "answer!", True),
        ("12", "12", True),
        ("{braces}", "{braces}", True),
    ],
)
def test_json_is_compared_as_json(said: str, true: str, right: bool) -> None:
    assert answer_match([said], [true]) == float(right)
    assert answer_match([said], [["nothing like it", true]]) == float(right)
