"""What primitives say of themselves besides their rules is so."""

from __future__ import annotations

import numpy as np
import pytest

import gshard
from gshard.core.jax_adapter import bind
from gshard.core.program import Constant, Value
from gshard.language.registry import known_primitives
from gshard.language.traits import names_where, traits_of
from harness import rows

FOLLOWED = sorted(names_where(lambda traits: traits.values) & set(known_primitives()))
ROWS = [row for row in rows() if row.primitive in FOLLOWED]


DIVIDING = {"div", "rem"}


def some(x: Value, seed: int) -> np.ndarray:
    """An array of whole numbers that vary in sign, of a value's shape and dtype."""
    low, high = (0, 2) if x.dtype == bool else (-5, 5)
    return np.asarray(np.random.default_rng(seed).integers(low, high, x.shape), x.dtype)


@pytest.mark.parametrize("primitive", FOLLOWED)
def test_values_are_what_the_operator_gives(primitive: str) -> None:
    count = 0
    for row in (row for row in ROWS if row.primitive == primitive):
        for e in gshard.trace(row.function, *row.arguments).block.walk():
            if e.name != primitive or not all(isinstance(x.dtype, np.dtype) for x in e.inputs):
                continue
            arrays = [np.asarray(x.value) if isinstance(x, Constant) else some(x, i) for i, x in enumerate(e.inputs)]
            if primitive in DIVIDING:
                arrays[1] = np.full_like(arrays[1], 2)
            follow = traits_of(primitive).values
            assert follow is not None
            with np.errstate(all="ignore"):
                made = follow(e.params, *(a.astype(np.float64) if a.dtype.kind == "f" else a for a in arrays))
            if made is not None:
                (want,) = bind(e.primitive, e.params, arrays)
                np.testing.assert_array_equal(np.asarray(made).astype(want.dtype), want)
                count += 1
    assert count


def test_names_without_traits_have_the_defaults() -> None:
    assert not traits_of("no such primitive").elementwise
    assert traits_of("no such primitive").pure
