"""Numbers as text: no exponent, few digits, and no more than a unit holds."""

import math
import re
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gshard.core.number_text import format_ms, format_seconds, significant
from gshard.core.program import format_bytes, format_flops

SIZES = {"s": 1, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9, "FLOP": 1}
SIZES |= {f"{prefix}FLOP": 1000**k for k, prefix in enumerate("kMGTP", 1)}
SIZES |= {unit: 1024**k for k, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))}
POWERS = [base**k for base, k in [*((10, k) for k in range(-12, 20)), *((1024, k) for k in range(6))]]
# Near a power of the base numbers round into the next unit, or just do not.
near_powers = st.builds(lambda power, off: power * (1 + off), st.sampled_from(POWERS), st.floats(-1e-2, 1e-2))


@pytest.mark.parametrize(
    ("text_of", "base", "off", "whole"),
    [
        (format_seconds, 1000, 5e-3, False), (format_flops, 1000, 5e-4, False), (format_bytes, 1024, 5e-2, True),
        (format_ms, math.inf, 5e-4, False),
    ],
)  # fmt: skip
@given(st.one_of(near_powers, st.floats(1e-12, 1e20)))
@example(0.9996)
@example(999.6e-6)
@example(1234.5)
@example(1024**2 - 1)
def test_a_number_fills_its_unit_but_not_the_next(
    text_of: Callable[[float], str], base: float, off: float, whole: bool, x: float
) -> None:
    x = float(math.floor(x)) if whole else x
    number, unit = text_of(x).split()
    assert re.fullmatch(r"\d+(\.\d+)?", number)
    assert float(number) * SIZES[unit] == pytest.approx(x, rel=off)
    assert float(number) < base or unit in ("s", "PFLOP", "TiB")
    assert float(number) >= 1 or unit in ("ns", "FLOP", "B", "ms")


@given(st.floats(-1e20, 1e20), st.integers(1, 6))
def test_significant_digits(x: float, digits: int) -> None:
    text = significant(x, digits)
    assert float(text) == float(f"{x:.{digits}g}")
    assert "e" not in text.lower()
    assert significant(x, digits, "+").lstrip("+-") == text.lstrip("-")
