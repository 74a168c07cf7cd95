"""Parsing and formatting of counts, durations and prices."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.units import format_bytes, format_count, format_gib, format_seconds, format_usd, parse_count, parse_hours


@given(st.integers(0, 10**15))
def test_a_printed_count_reads_back_to_four_digits(number: int) -> None:
    shown = format_count(number)
    if number >= 1000:
        assert shown[-1] in "kMBT"
    assert parse_count(format_count(float(f"{number:.4g}"))) == pytest.approx(number, rel=6e-4)


@given(st.integers(-(10**30), 10**30))
def test_an_integer_is_itself(number: int) -> None:
    assert parse_count(number) == number
    if number >= 0:
        assert parse_count(f"{number % 10**15:,}") == number % 10**15


@given(st.integers(1, 9999), st.sampled_from("kmgbtKMGBT"))
def test_a_unit_multiplies(thousandths: int, unit: str) -> None:
    scale = {"k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}[unit.lower()]
    assert parse_count(f"{thousandths / 1000:.3f}{unit}") == thousandths * scale // 1000


@pytest.mark.parametrize(
    "text", ["", "k", "1.5", "1x", "1 k k", "--1", "0.0001k", "1e400", "nan", "inf", True, math.nan, math.inf, 1.5]
)
def test_texts_that_are_not_counts(text: object) -> None:
    with pytest.raises(ValueError, match=r"not a (whole number|count)"):
        parse_count(text)  # type: ignore[arg-type]


@given(st.floats(1e-3, 1e4))
def test_hours_in_every_unit(hours: float) -> None:
    for text in (
        f"{hours!r}",
        f"{hours!r}h",
        f"{hours * 60!r}m",
        f"{hours * 60!r}min",
        f"{hours * 3600!r}s",
        f"{hours / 24!r}d",
    ):
        assert parse_hours(text) == pytest.approx(hours)
    assert parse_hours(hours) == hours


@pytest.mark.parametrize("text", ["", "h", "1:30", "2w", "-1h", True])
def test_texts_that_are_not_durations(text: object) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        parse_hours(text)  # type: ignore[arg-type]


@given(st.floats(0, 1e7))
def test_printed_seconds_are_within_their_last_digit(seconds: float) -> None:
    text = format_seconds(seconds)
    total, number = 0.0, ""
    for letter in text:
        if letter in "dhms":
            total += float(number) * {"d": 86400, "h": 3600, "m": 60, "s": 1}[letter]
            number = ""
        else:
            number += letter
    room = 3600 if "d" in text else 60 if "h" in text else 1
    assert abs(total - seconds) <= room


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (format_count(350_405_632), "350.4M"),
        (format_count(7), "7"),
        (format_seconds(4210), "1h10m"),
        (format_seconds(3.21), "3.2s"),
        (format_seconds(90), "1m30s"),
        (format_seconds(119.9), "2m00s"),
        (format_seconds(59.7), "1m00s"),
        (format_seconds(90_000), "1d01h"),
        (format_bytes(512), "512 B"),
        (format_bytes(3 << 29), "1.5 GiB"),
        (format_usd(1.234), "$1.23"),
        (format_usd(0.0049), "<$0.01"),
        (format_usd(0), "$0.00"),
        (format_usd(12345), "$12,345"),
    ],
)
def test_formatted_values(printed: str, expected: str) -> None:
    assert printed == expected


@pytest.mark.parametrize(
    ("gib", "text"),
    [(103.95, "104.0 GiB"), (1.0, "1.0 GiB"), (0.31, "0.31 GiB"), (0.05, "51 MiB"), (0.0123, "13 MiB"),
     (0.004, "4.1 MiB"), (0.0, "0 MiB")],
)  # fmt: skip
def test_memory_is_written_with_a_unit_that_does_not_round_it_away(gib: float, text: str) -> None:
    assert format_gib(gib) == text
