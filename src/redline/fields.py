"""Recipe field types, each of which says in one sentence what is wrong with a value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

from redline.errors import did_you_mean
from redline.units import parse_count, parse_hours

AUTO = "auto"


class Section(BaseModel):
    """A part of a recipe: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number.")
    if not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number.")
    return float(value)


def _bounds(number: float, low: float | None, high: float | None, open_low: bool) -> None:
    if low is not None and (number <= low if open_low else number < low):
        raise ValueError(f"{number:g} is too small; it must be {'above' if open_low else 'at least'} {low:g}.")
    if high is not None and number > high:
        raise ValueError(f"{number:g} is too large; it must be at most {high:g}.")


def _real(low: float | None = None, high: float | None = None, *, above: bool = False) -> Callable[[Any], float]:
    def check(value: Any) -> float:
        number = _number(value)
        _bounds(number, low, high, above)
        return number

    return check


def _count(low: int = 1) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if not isinstance(value, str | int | float):
            raise ValueError(f"{value!r} is not a whole number.")
        if isinstance(value, str) and value.startswith("-"):
            raise ValueError(f"{value} is too small; it must be at least {low}.")
        try:
            number = parse_count(value)
        except ValueError as error:
            raise ValueError(f"{error}.") from None
        _bounds(number, low, None, False)
        return number

    return check


def _hours(value: Any) -> float:
    if not isinstance(value, str | int | float):
        raise ValueError(f"{value!r} is not a duration.")
    try:
        hours = parse_hours(value)
    except ValueError as error:
        raise ValueError(f"{error}.") from None
    _bounds(hours, 0.0, None, True)
    return hours


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is not true or false.")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is not a text.")
    return value


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
Positive = Annotated[float, BeforeValidator(_real(0.0, above=True))]
NonNegative = Annotated[float, BeforeValidator(_real(0.0))]
Fraction = Annotated[float, BeforeValidator(_real(0.0, 1.0))]
Probability = Annotated[float, BeforeValidator(_real(0.0, 0.999))]
Flag = Annotated[bool, BeforeValidator(_flag)]
Text = Annotated[str, BeforeValidator(_text)]
MaybeCount = Annotated[int | None, none_or(_count())]
MaybeHours = Annotated[float | None, none_or(_hours)]
MaybePositive = Annotated[float | None, none_or(_real(0.0, above=True))]
MaybeProbability = Annotated[float | None, none_or(_real(0.0, 0.999999))]
# After resolution an auto field holds its value; before, the word. Readers see the resolved type.
AutoCount = Annotated[Any, auto_or(_count())]
AutoWhole = Annotated[Any, auto_or(_count(0))]
AutoPositive = Annotated[Any, auto_or(_real(0.0, above=True))]
AutoFlag = Annotated[Any, auto_or(_flag)]
