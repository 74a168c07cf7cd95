"""Scores of answers: the number of a GSM8K solution, JSON, SQuAD's exact match and F1."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

RULE = "the number behind the last <|answer|>, else behind the last ####, else the last number"
_MARK = "####"
_ANSWER, _SPECIAL = "<|answer|>", "<|"
# A minus is a sign only if no number or bracket precedes it, otherwise it is a subtraction. Commas separate thousands.
_NUMBER = re.compile(
    r"(?:(?<![\w)%])(?P<sign>[-+−]))?"
    r"(?:\$\s?(?P<inner>[-+−])?)?"
    r"(?<!\d)(?P<digits>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
)
_MINUS = ("-", "−")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def gsm8k_answer(text: str) -> str | None:
    """Return the number after the last `####`, or without that mark the last number; equal numbers as equal texts.

    Return None if no number follows the mark: a number before it is a step, not an answer.
    """
    _, mark, tail = text.rpartition(_MARK)
    numbers = list(_NUMBER.finditer(tail))
    if not numbers:
        return None
    return _canonical(numbers[0] if mark else numbers[-1])


def _canonical(number: re.Match[str]) -> str:
    value = Decimal(number["digits"].replace(",", ""))
    minus = "-" if value and (number["sign"] in _MINUS or number["inner"] in _MINUS) else ""
    written = f"{value:f}"  # exact at any length; arithmetic would round
    return minus + (written.rstrip("0").rstrip(".") if "." in written else written)


def final_answer(text: str) -> str | None:
    """Return the answer by RULE; None if no number follows the mark.

    The text after the mark ends at the next special token, because padding or anything else may follow it.
    """
    _, mark, tail = text.rpartition(_ANSWER)
    if not mark:
        return gsm8k_answer(text)
    number = _NUMBER.search(tail.partition(_SPECIAL)[0])
    return _canonical(number) if number else None


def gsm8k_exact_match(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Return the share of predictions whose number equals that of the reference."""
    return _mean(predictions, references, _same_number)


def number_match(predictions: Sequence[str], references: References) -> float:
    """Return the share of predictions whose number equals that of any of their references."""
    return _mean(predictions, references, lambda answer, reference: _best(answer, reference, _same_number))


def _same_number(prediction: str, reference: str) -> float:
    """Compare numbers. A reference without a mark is read as the text after the prediction's mark.

    Otherwise `1/2` would have two numbers: 1, the first one, after a mark, and 2, the last one, without.
    """
    bare = _ANSWER in prediction and _ANSWER not in reference and "####" not in reference
    answer = final_answer(prediction)
    return float(answer is not None and answer == final_answer(_ANSWER + reference if bare else reference))


def answer_text(text: str) -> str:
    """Return the answer as text: everything after the last mark, or the complete text if it has no mark."""
    _, mark, tail = text.rpartition(_ANSWER)
    return tail.partition(_SPECIAL)[0] if mark else text


def normalised(text: str) -> str:
    """Lower case, without punctuation, articles and superfluous white space (Rajpurkar et al. 2016)."""
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


References = Sequence[str | Sequence[str]]  # for each prediction one, or several, of which the best one counts


def exact_match(predictions: Sequence[str], references: References) -> float:
    return _mean(predictions, references, lambda answer, reference: _best(answer, reference, _equal))


def answer_match(predictions: Sequence[str], references: References) -> float:
    """Return the share of correct answers.

    A reference that is a JSON object or array is compared as JSON, any other text as in `exact_match`. That ignores
    punctuation, so it would accept `"who": "Ben"` without its braces.
    """
    return _mean(predictions, references, lambda answer, reference: _best(answer, reference, _equal_or_same_json))


def _equal_or_same_json(answer: str, reference: str) -> float:
    expected = _parse_json(reference)
    if not isinstance(expected, dict | list):
        return _equal(answer, reference)
    return float(_same_json(_parse_json(answer), expected))


def _parse_json(text: str) -> Any:
    """Parse strictly: no NaN, no duplicate keys. Return None for anything that is not JSON."""
    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key is repeated")
    return values


def _same_json(one: Any, other: Any) -> bool:
    """Compare JSON values: 2 equals 2.0, but true does not equal 1 as in Python; the order of keys does not matter."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same_json(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same_json, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def f1(predictions: Sequence[str], references: References) -> float:
    """Return the harmonic mean of precision and recall over words, averaged over predictions."""
    return _mean(predictions, references, lambda answer, reference: _best(answer, reference, _word_f1))


def _best(answer: str, references: str | Sequence[str], score: Callable[[str, str], float]) -> float:
    """Return the highest score of the answer over its references."""
    return max(score(answer, reference) for reference in ([references] if isinstance(references, str) else references))


def _equal(answer: str, reference: str) -> float:
    return float(normalised(answer) == normalised(reference))


def _word_f1(answer: str, reference: str) -> float:
    predicted, expected = normalised(answer).split(), normalised(reference).split()
    if not predicted or not expected:
        return float(predicted == expected)  # an empty answer is right only for an empty reference
    shared = (Counter(predicted) & Counter(expected)).total()
    return 2 * shared / (len(predicted) + len(expected))


def _mean(predictions: Sequence[str], references: Sequence[Any], score: Callable[..., float]) -> float:
    if len(predictions) != len(references) or not predictions:
        raise ValueError(f"{len(predictions)} predictions for {len(references)} references")
    return sum(map(score, predictions, references)) / len(predictions)


# ----------------------------------------------------------------------------------------------------
# Functions of a loss in nats.


# ----------------------------------------------------------------------------------------------------
# GSM8K scores as lm-evaluation-harness (task gsm8k, version 3) computes them from a model's text.
#
# redline's own score, `gsm8k_exact_match`, compares numbers: `18.00` equals `18`, and `#### $18` has an answer. lm-eval
# compares text: a filter extracts a part of the answer, and that part and the reference have to be equal after removing
# commas, dollar signs, a final full stop, and everything up to the reference's `#### `. Published GSM8K results are
# usually those of lm-eval.


_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_IGNORED = [re.compile(pattern) for pattern in (r",", r"\$", r"(?s).*#### ", r"\.$")]  # removed in this order
_INVALID = "[invalid]"  # what lm-eval's filters return if they find nothing


def strict_match(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Return the share of answers whose first `#### NUMBER` equals that of the reference."""
    return _share(predictions, references, _first_marked)


def flexible_extract(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Return the share of answers whose last number, anywhere in the text, equals that of the reference."""
    return _share(predictions, references, _last_number)


def _first_marked(text: str) -> str:
    match = _STRICT.search(text)
    return match[1] if match else _INVALID


def _last_number(text: str) -> str:
    matches = _FLEXIBLE.findall(text)
    return str(matches[-1]) if matches else _INVALID


def _comparable(text: str) -> str:
    for pattern in _IGNORED:
        text = pattern.sub("", text)
    return text.lower()


def _share(predictions: Sequence[str], references: Sequence[str], pick: Callable[[str], str]) -> float:
    if len(predictions) != len(references) or not predictions:
        raise ValueError(f"{len(predictions)} predictions for {len(references)} references")
    pairs = zip(predictions, references, strict=True)
    correct = [_comparable(pick(prediction)) == _comparable(reference) for prediction, reference in pairs]
    return sum(correct) / len(correct)


Score = Callable[[Sequence[str], Sequence[str]], float]
# The metrics behind each value of `redline eval --answers`, by the names that results have. Each is averaged over the
# answers; an answer is correct if its exact_match is 1.
METRICS: dict[str, dict[str, Score]] = {
    "gsm8k": {
        "exact_match": gsm8k_exact_match,
        "strict_match": strict_match,
        "flexible_extract": flexible_extract,
    },
    "match": {"exact_match": answer_match},
    "f1": {"f1": f1, "exact_match": exact_match},
}
