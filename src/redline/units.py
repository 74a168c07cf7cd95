"""Parse and format numbers as people write them: 512k, 1.5h, $20."""

from __future__ import annotations

import math
import re

_COUNT = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"^\s*([0-9][0-9_,]*\.?[0-9]*(?:e[+-]?[0-9]+)?|\.[0-9]+)\s*([a-z]*)\s*$", re.IGNORECASE)

GIB = 1 << 30
MOST_WORKERS = 1024  # threads that load data, or processes that encode it


def _split(text: str, units: dict[str, float], kind: str) -> float:
    match = _NUMBER.match(text)
    if not match or match[2].lower() not in units:
        names = ", ".join(u for u in units if u)
        raise ValueError(f"{text!r} is not a {kind}; write a number, optionally with {names}")
    return _plain(match[1]) * units[match[2].lower()]


def _plain(digits: str) -> float:
    return float(digits.replace("_", "").replace(",", ""))


def parse_count(value: str | int | float) -> int:
    """Parse a count: 512k → 512000, 1.5B → 1500000000."""
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is not a count")
    if isinstance(value, int):
        return value
    number = value if isinstance(value, float) else _split(value, _COUNT, "count")
    if not math.isfinite(number) or not math.isclose(number, round(number), rel_tol=1e-12, abs_tol=1e-6):
        raise ValueError(f"{value!r} is not a whole number")
    return round(number)


def parse_hours(value: str | int | float) -> float:
    """Parse a duration into hours: 90m → 1.5; a bare number is hours."""
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is not a duration")
    if isinstance(value, str):
        match = _NUMBER.match(value)
        return _plain(match[1]) if match and not match[2] else _split(value, _SECONDS, "duration") / 3600.0
    return float(value)


def format_count(number: float) -> str:
    """Format a count with four digits: 350444544 → 350.4M."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.4g}{unit}"
    return f"{number:.4g}"


def format_seconds(seconds: float) -> str:
    """Format a duration: 4210 → 1h10m."""
    seconds = max(0.0, seconds)
    if seconds < 59.5:
        return f"{seconds:.1f}s" if seconds < 10 else f"{seconds:.0f}s"
    seconds = round(seconds)
    minutes, hours = seconds // 60, seconds // 3600
    if hours >= 24:
        return f"{hours // 24}d{hours % 24:02d}h"
    if hours:
        return f"{hours}h{minutes % 60:02d}m"
    return f"{minutes}m{seconds % 60:02d}s"


def format_bytes(number: float) -> str:
    for limit, unit in ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if number >= limit:
            return f"{number / limit:.1f} {unit}"
    return f"{number:.0f} B"


def format_gib(gib: float) -> str:
    """Format memory that is given in GiB: 12.34 → 12.3 GiB, 0.314 → 0.31 GiB, 0.0123 → 13 MiB."""
    if gib >= 1:
        return f"{gib:.1f} GiB"
    mib = 1024 * gib
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{mib:.0f} MiB" if mib >= 10 or not mib else f"{mib:.1f} MiB"


def format_usd(dollars: float) -> str:
    if 0 < dollars < 0.005:
        return "<$0.01"  # $0.00 would look as if the run were free
    return f"${dollars:.2f}" if dollars < 100 else f"${dollars:,.0f}"


def price_problem(value: str) -> str:
    """Return why a text is not a valid price, or "" if it is one."""
    try:
        price = float(value)
    except ValueError:
        return "not a number"
    return "" if price >= 0 else "negative" if price < 0 else "not a number"
