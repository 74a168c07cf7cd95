"""Types of recipe fields. Each validates a value and raises a ValueError with one sentence for an invalid one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict

from redline.errors import did_you_mean
from redline.units import MOST_WORKERS, parse_count, parse_hours

AUTO = "auto"
MOST = (1 << 63) - 1  # counts and seeds become 64-bit integers
MOST_HOURS = 1e6  # about a century; a larger number is a mistake
MOST_REPEATS = 1_000_000  # of a source in an epoch, so that the length of an epoch fits a 64-bit integer
MOST_SEQUENCES = 1 << 31  # larger than any batch, and small enough to list its divisors quickly


class Section(BaseModel):
    """A section of a recipe. It is immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True)
class Rule(BeforeValidator):
    """A check of a value, and the JSON schema of the values that pass it, which editors use."""

    accepts: dict[str, Any] = field(default_factory=dict, compare=False)  # two rules with the same check are equal

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        return dict(self.accepts)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number.")
    try:
        number = float(value)
    except OverflowError:  # an integer may exceed the range of floats
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{number!r} is not a finite number.")
    return number


def _bounds(number: float, low: float | None, high: float | None, open_low: bool) -> None:
    if low is not None and (number <= low if open_low else number < low):
        raise ValueError(f"{_shown(number)} is too small; it must be {'above' if open_low else 'at least'} {low:g}.")
    if high is not None and number > high:
        raise ValueError(f"{_shown(number)} is too large; it must be at most {high:g}.")


def _shown(number: float) -> str:
    return f"{number:g}" if abs(number) <= 1e18 else "the number"  # an integer may have thousands of digits


def _real(low: float, high: float | None = None, *, above: bool = False) -> Rule:
    def check(value: Any) -> float:
        number = _number(value)
        _bounds(number, low, high, above)
        return number

    limits = {"exclusiveMinimum" if above else "minimum": low, **({} if high is None else {"maximum": high})}
    return Rule(check, accepts={"type": "number", **limits})


def _count(low: int = 1, high: int = MOST) -> Rule:
    def check(value: Any) -> int:
        if not isinstance(value, str | int | float):
            raise ValueError(f"{value!r} is not a whole number.")
        if isinstance(value, str) and value.startswith("-"):
            raise ValueError(f"{value} is too small; it must be at least {low}.")
        try:
            number = parse_count(value)
        except ValueError as error:
            raise ValueError(f"{error}.") from None
        _bounds(number, low, high, False)
        return number

    words = {"type": "string", "pattern": r"^[0-9.,_]+([eE][0-9]+)? ?[kKmMgGbBtT]?$"}  # 512k
    return Rule(check, accepts={"anyOf": [{"type": "integer", "minimum": low}, words]})


def _hours(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{value!r} is not a duration.")
    try:
        hours = _number(parse_hours(value) if isinstance(value, str) else value)
    except ValueError as error:
        raise ValueError(f"{str(error).rstrip('.')}.") from None
    _bounds(hours, 0.0, MOST_HOURS, True)
    return hours


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is not true or false.")
    return value


def _words(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text. Put it in quotes.")
    return value


def _text(value: Any) -> str:
    if value == "":
        raise ValueError("is empty.")
    return _words(value)


_DURATION = {"type": "string", "pattern": r"^[0-9.,_]+([eE][0-9]+)? ?(s|m|min|h|d)?$"}  # 90m
HOURS = Rule(_hours, accepts={"anyOf": [{"type": "number", "exclusiveMinimum": 0.0, "maximum": MOST_HOURS}, _DURATION]})
FLAG = Rule(_flag, accepts={"type": "boolean"})
TEXT = Rule(_text, accepts={"type": "string", "minLength": 1})
WORDS = Rule(_words, accepts={"type": "string"})


def one_of(*names: str) -> Rule:
    """Return a rule that accepts one of a few names, and suggests the most similar one for any other."""

    def check(value: Any) -> str:
        if isinstance(value, bool) or value not in names:
            hint = did_you_mean(str(value), names)
            raise ValueError(f"{value!r} is not one of {', '.join(names)}. {hint}".rstrip())
        return str(value)

    return Rule(check, accepts={"enum": list(names)})


def auto_or(rule: Rule) -> Rule:
    """Return a rule that also accepts `auto`."""
    check = _function(rule)

    def either(value: Any) -> Any:
        if value == AUTO and isinstance(value, str):
            return value
        try:
            return check(value)
        except ValueError as error:
            raise ValueError(f"{str(error).rstrip('.')} (or auto).") from None

    return Rule(either, accepts={"anyOf": [{"const": AUTO}, *_forms(rule)]})


def none_or(rule: Rule) -> Rule:
    """Return a rule that also accepts null."""
    check = _function(rule)
    return Rule(
        lambda value: None if value is None else check(value), accepts={"anyOf": [*_forms(rule), {"type": "null"}]}
    )


def _function(rule: Rule) -> Callable[[Any], Any]:
    return cast(Callable[[Any], Any], rule.func)  # pydantic also allows checks with a second parameter


def _forms(rule: Rule) -> list[dict[str, Any]]:
    return list(rule.accepts.get("anyOf", [rule.accepts]))


Count = Annotated[int, _count()]
Whole = Annotated[int, _count(0)]
Prefetch = Annotated[int, _count(1, 1024)]  # steps; each of their batches is held in memory
NsSteps = Annotated[int, _count(3, 5)]
Workers = Annotated[int, _count(0, MOST_WORKERS)]
Sequences = Annotated[int, _count(1, MOST_SEQUENCES)]
Positive = Annotated[float, _real(0.0, above=True)]
NonNegative = Annotated[float, _real(0.0)]
Fraction = Annotated[float, _real(0.0, 1.0)]
Share = Annotated[float, _real(0.0, 1.0, above=True)]  # above 0
Probability = Annotated[float, _real(0.0, 0.999)]
Flag = Annotated[bool, FLAG]
Text = Annotated[str, TEXT]
Words = Annotated[str, WORDS]  # may be empty
MaybeText = Annotated[str | None, none_or(TEXT)]
MaybeWords = Annotated[str | None, none_or(WORDS)]
MaybeCount = Annotated[int | None, none_or(_count())]
MaybeWhole = Annotated[int | None, none_or(_count(0))]
MaybeFraction = Annotated[float | None, none_or(_real(0.0, 1.0))]
MaybeHours = Annotated[float | None, none_or(HOURS)]
MaybePositive = Annotated[float | None, none_or(_real(0.0, above=True))]
MaybeRepeat = Annotated[float | None, none_or(_real(0.0, MOST_REPEATS, above=True))]
MaybeProbability = Annotated[float | None, none_or(_real(0.0, 0.999999))]
# Before resolution these fields may hold "auto"; afterwards they hold a value.
AutoCount = Annotated[Any, auto_or(_count())]
AutoSequences = Annotated[Any, auto_or(_count(1, MOST_SEQUENCES))]
AutoWhole = Annotated[Any, auto_or(_count(0))]
AutoPositive = Annotated[Any, auto_or(_real(0.0, above=True))]
AutoFlag = Annotated[Any, auto_or(FLAG)]


def none_if_auto(value: Any) -> Any:
    """Return the value, or None if it is still `auto`."""
    return None if value == AUTO else value
