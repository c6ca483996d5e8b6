"""Numbers as text: few digits, no exponent, and the unit in which the rounded number is at least one."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal

_SECONDS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))


def significant(x: float, digits: int, sign: str = "") -> str:
    """A number with at most so many significant digits, without an exponent; with ``sign="+"`` never without a sign.

    >>> significant(24_612, 3), significant(0.99996, 4), significant(0.0000123, 2)
    ('24600', '1', '0.000012')
    """
    return f"{Decimal(f'{x:.{digits}g}').normalize():{sign}f}"


def in_unit(x: float, units: Iterable[tuple[str, float]], digits: int) -> str:
    """A number in the first unit, of falling sizes, in which it is at least 1 when rounded; else in the last."""
    rounded = [(f"{x / size:.{digits}g}", unit) for unit, size in units]
    text, unit = next(((text, unit) for text, unit in rounded if abs(float(text)) >= 1), rounded[-1])
    return f"{significant(float(text), digits)} {unit}"


def format_seconds(seconds: float) -> str:
    """Seconds with three digits and a unit.

    >>> format_seconds(3.2e-3), format_seconds(0.9996), format_seconds(1234.5)
    ('3.2 ms', '1 s', '1230 s')
    """
    return in_unit(seconds, _SECONDS, 3)


def format_ms(seconds: float) -> str:
    """Seconds as milliseconds with four digits, for times that are compared."""
    return f"{significant(seconds * 1e3, 4)} ms"
