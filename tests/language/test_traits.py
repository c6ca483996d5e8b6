"""Traits are true: what they compute of an operator is what the operator computes."""

import jax.numpy as jnp
import numpy as np
import pytest

from gshard.core.jax_adapter import bind
from gshard.core.program import Constant, Value
from gshard.language.registry import known_primitives
from gshard.language.traits import names_where, traits_of
from gshard.rules.movement import at_places
from harness import rows

PLACED = sorted(names_where(lambda traits: traits.placed))
FOLLOWED = sorted(names_where(lambda traits: traits.values) & set(known_primitives()))
ROWS = [row for row in rows() if row.primitive in {*FOLLOWED, *PLACED}]


DIVIDING = {"div", "rem"}


def some(x, seed):
    """An array of whole numbers that vary in sign, of a value's shape and dtype."""
    low, high = (0, 2) if x.dtype == bool else (-5, 5)
    return np.asarray(np.random.default_rng(seed).integers(low, high, x.shape), x.dtype)


@pytest.mark.parametrize("primitive", FOLLOWED)
def test_values_are_what_the_operator_gives(primitive):
    count = 0
    for row in (row for row in ROWS if row.primitive == primitive):
        for e in row.program.block.walk():
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


class Arrays:
    """Arrays that are there as a whole."""

    def __init__(self, arrays):
        self.arrays = arrays

    def of(self, x, at):
        return at_places(jnp.asarray(x.value if isinstance(x, Constant) else self.arrays[x]), at)


@pytest.mark.parametrize("primitive", PLACED)
@pytest.mark.one_in(3)
def test_elements_at_some_places_are_those_of_the_whole(primitive):
    count = 0
    for row in (row for row in ROWS if row.primitive == primitive):
        for e in row.program.block.walk():
            if e.name != primitive or not all(isinstance(x.dtype, np.dtype) for x in e.inputs):
                continue
            if any(0 in x.shape for x in e.inputs):
                continue  # no table is empty
            arrays = {x: some(x, i) for i, x in enumerate(e.inputs) if isinstance(x, Value)}
            operands = [np.asarray(x.value) if isinstance(x, Constant) else arrays[x] for x in e.inputs]
            (whole,) = bind(e.primitive, e.params, operands)
            placed = traits_of(primitive).placed
            assert placed is not None
            for d, n in enumerate(whole.shape):
                at = tuple(jnp.arange(n)[::-2] if i == d else None for i in range(whole.ndim))
                if n:
                    np.testing.assert_array_equal(placed(Arrays(arrays), e, at), at_places(whole, at))
                    count += 1
    assert count


def test_names_without_traits_have_the_defaults():
    assert not traits_of("no such primitive").elementwise
    assert traits_of("no such primitive").pure
