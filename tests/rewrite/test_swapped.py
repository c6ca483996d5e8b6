"""Products that are only transposed are made with their operands swapped, and nothing else is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import gshard

RNG = np.random.default_rng(0)


def whole(*shape):
    """Integers, of which sums in any order are exact."""
    return RNG.integers(-9, 9, shape).astype(np.float32)


def gradient(subscripts, **options):
    return jax.grad(lambda w, x: jnp.sum(jnp.einsum(subscripts, x, w, **options) ** 2))


def product(x, y, *permutation, batch=True):
    dims = (((2,), (1,)), ((0,), (0,))) if batch else (((2,), (1,)), ((), ()))
    return lax.dot_general(x, y, dims).transpose(permutation)


def mixed(x, y):
    dims = ((1,), (0,)), ((), ())
    made = lax.dot_general(x, y, dims, (lax.Precision.HIGHEST, lax.Precision.DEFAULT), preferred_element_type="float32")
    return made.T


SWAPPED = {
    "a matrix": (gradient("bm,mh->bh"), (whole(5, 7), whole(6, 5))),
    "experts": (gradient("egm,emh->egh"), (whole(4, 5, 7), whole(4, 6, 5))),
    "experts by group": (gradient("gecm,emh->egch"), (whole(4, 5, 7), whole(3, 4, 6, 5))),
    "heads": (gradient("bsm,mhd->bshd"), (whole(5, 2, 7), whole(4, 3, 5))),
    "in a loop": (
        lambda w, x: lax.scan(lambda c, w: (c, gradient("bm,mh->bh")(w, x)), 0.0, w)[1],
        (whole(3, 5, 7), whole(6, 5)),
    ),
    "precisions of each operand": (mixed, (whole(4, 6).astype(jnp.bfloat16), whole(6, 8))),
}
OTHERS = {
    "read as it is, too": (lambda x, y: (jnp.cos(x @ y), (x @ y).T), (whole(4, 6), whole(6, 8))),
    "a result as it is": (lambda x, y: [made := x @ y, made.T], (whole(4, 6), whole(6, 8))),
    "another order": (lambda x, y: product(x, y, 1, 0, 2), (whole(4, 5, 6), whole(4, 6, 7))),
    "dimensions of one operand, too": (
        lambda x, y: product(x, y, 2, 3, 1, 0, batch=False), (whole(4, 5, 6), whole(4, 6, 7))
    ),
    "an algorithm of the operands": (
        lambda x, y: jnp.dot(x, y, precision=lax.DotAlgorithmPreset.F32_F32_F32).T, (whole(4, 6), whole(6, 8)),
    ),
}  # fmt: skip


def names(f, arguments):
    return [e.name for e in gshard.stages.trace(f, *arguments).block.walk()]


@pytest.mark.parametrize("name", SWAPPED)
def test_no_transposition_is_left(name):
    f, arguments = SWAPPED[name]
    assert "transpose" in str(jax.make_jaxpr(f)(*arguments))
    assert "transpose" not in names(f, arguments)


@pytest.mark.parametrize("name", OTHERS)
def test_other_transpositions_stay(name):
    f, arguments = OTHERS[name]
    assert names(f, arguments).count("transpose") == 1


@pytest.mark.parametrize("name", [*SWAPPED, *OTHERS])
@pytest.mark.one_in(4)
def test_it_computes_the_same(name):
    f, arguments = {**SWAPPED, **OTHERS}[name]
    for specs in ((None, P("x")), (P(None, "x"), P("x")), (P("x"), None)):
        made = gshard.jit(f, mesh={"x": 4}, in_shardings=specs)
        jax.tree.map(np.testing.assert_array_equal, made(*arguments), jax.jit(f)(*arguments))
