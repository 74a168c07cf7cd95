"""How right answers are: the number of a GSM8K solution, JSON, and SQuAD's exact match and F1."""

from __future__ import annotations

import json
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

RULE = "the number behind the last <|answer|>, else behind the last ####, else the last number"
_MARK = "####"
_ANSWER, _SPECIAL = "<|answer|>", "<|"
# A sign counts when nothing stands before it that it could be subtracted from; commas count between thousands.
_NUMBER = re.compile(
    r"(?:(?<![\w)%])(?P<sign>[-+−]))?"
    r"(?:\$\s?(?P<inner>[-+−])?)?"
    r"(?<!\d)(?P<digits>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
)
_MINUS = ("-", "−")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def gsm8k_answer(text: str) -> str | None:
    """The number behind the last `####`; without that mark, the last number. Equal numbers give equal texts.

    A mark without a number behind it is no answer: what was computed before it was not given as one.
    """
    _, mark, behind = text.rpartition(_MARK)
    found = list(_NUMBER.finditer(behind))
    if not found:
        return None
    return _canonical(found[0] if mark else found[-1])


def _canonical(number: re.Match[str]) -> str:
    value = Decimal(number["digits"].replace(",", ""))
    minus = "-" if value and (number["sign"] in _MINUS or number["inner"] in _MINUS) else ""
    written = f"{value:f}"  # exact at any length, where arithmetic would round
    return minus + (written.rstrip("0").rstrip(".") if "." in written else written)


def final_answer(text: str) -> str | None:
    """The answer by RULE. As with `####`, a mark without a number behind it is no answer.

    What is behind the mark ends at the next special token: padding, or whatever else a model wrote there.
    """
    _, mark, behind = text.rpartition(_ANSWER)
    if not mark:
        return gsm8k_answer(text)
    found = _NUMBER.search(behind.partition(_SPECIAL)[0])
    return _canonical(found) if found else None


def gsm8k_exact_match(predictions: Sequence[str], references: Sequence[str]) -> float:
    """The share of predictions whose number is the reference's."""
    return _mean(predictions, references, _same_number)


def number_match(predictions: Sequence[str], references: References) -> float:
    """The same, where any of several references is right."""
    return _mean(predictions, references, lambda said, true: _best(said, true, _same_number))


def _same_number(prediction: str, reference: str) -> float:
    """A bare reference is what would stand behind the prediction's mark: of “1/2” both have their first number."""
    bare = _ANSWER in prediction and _ANSWER not in reference and "####" not in reference
    answer = final_answer(prediction)
    return float(answer is not None and answer == final_answer(_ANSWER + reference if bare else reference))


def behind_mark(text: str) -> str:
    """What is the answer in words: all that stands behind the last mark, or the whole text where there is none."""
    _, mark, behind = text.rpartition(_ANSWER)
    return behind.partition(_SPECIAL)[0] if mark else text


def normalised(text: str) -> str:
    """Lower case, without punctuation, articles and superfluous white space (Rajpurkar et al. 2016)."""
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


References = Sequence[str | Sequence[str]]  # for each prediction one, or several of which the best counts


def exact_match(predictions: Sequence[str], references: References) -> float:
    return _mean(predictions, references, lambda said, true: _best(said, true, _equal))


def answer_match(predictions: Sequence[str], references: References) -> float:
    """Return the share of right answers. A reference that is a JSON object or array is compared as JSON, any other text
    as in `exact_match`, which ignores punctuation: there `"who": "Ben"` without its braces would pass for JSON."""
    return _mean(predictions, references, lambda said, true: _best(said, true, _equal_or_same_json))


def _equal_or_same_json(said: str, true: str) -> float:
    expected = _json(true)
    if not isinstance(expected, dict | list):
        return _equal(said, true)
    return float(_same_json(_json(said), expected))


def _json(text: str) -> Any:
    """Parse strictly: no NaN, no duplicate keys. Return None for anything that is not JSON."""
    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _same_json(one: Any, other: Any) -> bool:
    """Compare values as JSON does: 2 is 2.0, but true is not 1 as in Python; the order of keys does not count."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same_json(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same_json, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def f1(predictions: Sequence[str], references: References) -> float:
    """The harmonic mean of precision and recall over words, averaged over predictions."""
    return _mean(predictions, references, lambda said, true: _best(said, true, _word_f1))


def _best(said: str, true: str | Sequence[str], score: Callable[[str, str], float]) -> float:
    return max(score(said, one) for one in ([true] if isinstance(true, str) else true))


def _equal(said: str, true: str) -> float:
    return float(normalised(said) == normalised(true))


def _word_f1(said: str, true: str) -> float:
    ours, theirs = normalised(said).split(), normalised(true).split()
    if not ours or not theirs:
        return float(ours == theirs)  # nothing to say is right only where nothing was to be said
    shared = (Counter(ours) & Counter(theirs)).total()
    return 2 * shared / (len(ours) + len(theirs))


def _mean(predictions: Sequence[str], references: Sequence[Any], score: Callable[..., float]) -> float:
    if len(predictions) != len(references) or not predictions:
        raise ValueError(f"{len(predictions)} predictions for {len(references)} references")
    return sum(map(score, predictions, references)) / len(predictions)


# ----------------------------------------------------------------------------------------------------
# What a loss in nats means.


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def bits_per_byte(loss: float, tokens: int, utf8_bytes: int) -> float:
    """The figure that can be compared across tokenizers."""
    return loss / math.log(2) * tokens / utf8_bytes


# ----------------------------------------------------------------------------------------------------
# GSM8K scores as lm-evaluation-harness (task gsm8k, version 3) computes them from a model's text.
#
# redline's own score (`answers.py`) compares numbers: `18.00` equals `18`, and `#### $18` has an answer. lm-eval
# compares text: a filter extracts one piece of the answer, then piece and reference have to be equal without commas,
# dollar signs, a final full stop and everything up to the reference's `#### `. Published GSM8K results are usually
# lm-eval's.


_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_IGNORED = [re.compile(pattern) for pattern in (r",", r"\$", r"(?s).*#### ", r"\.$")]  # removed in this order
_INVALID = "[invalid]"  # lm-eval's text for "nothing found"


def strict_match(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Return the share of answers whose first `#### NUMBER` is the reference's."""
    return _share(predictions, references, _first_marked)


def flexible_extract(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Return the share of answers whose last number, anywhere in the text, is the reference's."""
    return _share(predictions, references, _last_number)


def _first_marked(text: str) -> str:
    found = _STRICT.search(text)
    return found[1] if found else _INVALID


def _last_number(text: str) -> str:
    found = _FLEXIBLE.findall(text)
    return str(found[-1]) if found else _INVALID


def _comparable(text: str) -> str:
    for pattern in _IGNORED:
        text = pattern.sub("", text)
    return text.lower()


def _share(predictions: Sequence[str], references: Sequence[str], pick: Callable[[str], str]) -> float:
    if len(predictions) != len(references) or not predictions:
        raise ValueError(f"{len(predictions)} predictions for {len(references)} references")
    pairs = zip(predictions, references, strict=True)
    right = [_comparable(pick(said)) == _comparable(true) for said, true in pairs]
    return sum(right) / len(right)


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
