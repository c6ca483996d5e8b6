"""Windows whose place is known only when the program runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gshard


def written(x, updates, *starts):
    return lax.dynamic_update_slice(gshard.split(x, 0, 8), updates, starts)


@pytest.mark.parametrize("n, m", [(16, 1), (16, 3), (13, 1), (13, 2), (13, 11), (3, 2), (24, 3)])
@pytest.mark.one_in(2)
def test_a_window_is_written_wherever_it_begins(n, m):
    """Inside of a part, over the border of two or of many, and beyond both ends, where it is moved inside."""
    rng = np.random.default_rng(n + m)
    x, updates = (rng.integers(-9, 9, (rows, columns)) for rows, columns in ((n, 5), (m, 3)))
    run = gshard.jit(written, mesh=8)
    for i in (-3, 0, 1, 2, 5, 7, n - m, n - 1, n + 4):
        for j in (0, 2, 9):
            expected = lax.dynamic_update_slice(jnp.asarray(x), jnp.asarray(updates), (i, j))
            np.testing.assert_array_equal(run(x, updates, np.int32(i), np.int32(j)), expected)


def test_no_more_than_the_window_is_touched():
    """A position of a cache that is split over its length, and donated."""
    cache, row = jax.ShapeDtypeStruct((65536, 128), "float32"), jax.ShapeDtypeStruct((1, 128), "float32")
    at = jax.ShapeDtypeStruct((), "int32")
    compiled = gshard.jit(written, mesh=8, donate_argnums=0).lower(cache, row, at, at).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4096
    costs = compiled.cost_analysis()
    assert (costs[0] if isinstance(costs, list) else costs)["bytes accessed"] < 16 * 128 * 4
