"""Recipe field types, each of which says in one sentence what is wrong with a value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

from redline.errors import did_you_mean
from redline.units import parse_count, parse_hours

AUTO = "auto"
MOST = (1 << 63) - 1  # counts and seeds are 64-bit integers further down
MOST_SEQUENCES = 1 << 31  # no batch is larger, and its divisors are still listed at once


class Section(BaseModel):
    """A part of a recipe: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number.")
    try:
        number = float(value)
    except OverflowError:  # an integer may lie beyond the range of floats
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
    return f"{number:g}" if abs(number) <= 1e18 else "that"  # an integer may have thousands of digits


def _real(low: float | None = None, high: float | None = None, *, above: bool = False) -> Callable[[Any], float]:
    def check(value: Any) -> float:
        number = _number(value)
        _bounds(number, low, high, above)
        return number

    return check


def _count(low: int = 1, high: int = MOST) -> Callable[[Any], int]:
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

    return check


def _hours(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{value!r} is not a duration.")
    try:
        hours = _number(parse_hours(value) if isinstance(value, str) else value)
    except ValueError as error:
        raise ValueError(f"{str(error).rstrip('.')}.") from None
    _bounds(hours, 0.0, None, True)
    return hours


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is not true or false.")
    return value


def _words(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text; put it in quotes.")
    return value


def _text(value: Any) -> str:
    if value == "":
        raise ValueError("is empty.")
    return _words(value)


def one_of(*names: str) -> BeforeValidator:
    def check(value: Any) -> str:
        if isinstance(value, bool) or value not in names:
            hint = did_you_mean(str(value), names)
            raise ValueError(f"{value!r} is not one of {', '.join(names)}. {hint}".rstrip())
        return str(value)

    return BeforeValidator(check)


def auto_or(check: Callable[[Any], Any]) -> BeforeValidator:
    def either(value: Any) -> Any:
        if value == AUTO and isinstance(value, str):
            return value
        try:
            return check(value)
        except ValueError as error:
            raise ValueError(f"{str(error).rstrip('.')} (or auto).") from None

    return BeforeValidator(either)


def none_or(check: Callable[[Any], Any]) -> BeforeValidator:
    return BeforeValidator(lambda value: None if value is None else check(value))


Count = Annotated[int, BeforeValidator(_count())]
Whole = Annotated[int, BeforeValidator(_count(0))]
Sequences = Annotated[int, BeforeValidator(_count(1, MOST_SEQUENCES))]
Positive = Annotated[float, BeforeValidator(_real(0.0, above=True))]
NonNegative = Annotated[float, BeforeValidator(_real(0.0))]
Fraction = Annotated[float, BeforeValidator(_real(0.0, 1.0))]
Share = Annotated[float, BeforeValidator(_real(0.0, 1.0, above=True))]  # of something: never nothing of it
Probability = Annotated[float, BeforeValidator(_real(0.0, 0.999))]
Flag = Annotated[bool, BeforeValidator(_flag)]
Text = Annotated[str, BeforeValidator(_text)]
Words = Annotated[str, BeforeValidator(_words)]  # may be empty
MaybeCount = Annotated[int | None, none_or(_count())]
MaybeHours = Annotated[float | None, none_or(_hours)]
MaybePositive = Annotated[float | None, none_or(_real(0.0, above=True))]
MaybeProbability = Annotated[float | None, none_or(_real(0.0, 0.999999))]
# After resolution an auto field holds its value; before, the word. Readers see the resolved type.
AutoCount = Annotated[Any, auto_or(_count())]
AutoSequences = Annotated[Any, auto_or(_count(1, MOST_SEQUENCES))]
AutoWhole = Annotated[Any, auto_or(_count(0))]
AutoPositive = Annotated[Any, auto_or(_real(0.0, above=True))]
AutoFlag = Annotated[Any, auto_or(_flag)]
