"""GSM8K scores as lm-evaluation-harness (task gsm8k, version 3) computes them from a model's text.

redline's own score (`answers.py`) compares numbers: `18.00` equals `18`, and `#### $18` has an answer. lm-eval compares
text: a filter extracts one piece of the answer, then piece and reference have to be equal without commas, dollar
signs, a final full stop and everything up to the reference's `#### `. Published GSM8K results are usually lm-eval's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

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
