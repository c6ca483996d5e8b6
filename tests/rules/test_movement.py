"""The law of ``Rule.index``: moved as it says, elements lie where the operator puts them."""

import numpy as np
import pytest

from gshard.core.jax_adapter import bind
from gshard.rules.movement import elements, index_of
from harness import rows

OPERATORS = ("concatenate", "concatenate_slices", "pad", "slice", "split")
ROWS = [row for row in rows() if row.primitive in OPERATORS]


def moved(row):
    """Compares the equations of a program that move elements; how many there are."""
    count = 0
    for e in row.program.block.walk():
        if (index := index_of(e)) is None:
            continue
        sizes = [int(np.prod(x.shape)) for x in e.inputs]
        arrays = [np.arange(n, dtype=np.int32).reshape(x.shape) + np.int32(sum(sizes[:i]))
                  for i, (n, x) in enumerate(zip(sizes, e.inputs, strict=True))]  # fmt: skip
        for own, want in zip(index, bind(e.primitive, e.params, arrays), strict=True):
            np.testing.assert_array_equal(elements(own, arrays), want)
        count += 1
    return count


@pytest.mark.parametrize("primitive", OPERATORS)
def test_elements_lie_where_the_index_says(primitive):
    assert sum(moved(row) for row in ROWS if row.primitive == primitive)
