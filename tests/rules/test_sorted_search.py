"""Searching in a sorted array that is split: one round, the same places."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from placed import in_every_way, mesh_of
from sampled import crossed

RNG = np.random.default_rng(0)
SORTED = np.sort(np.round(RNG.standard_normal(45) * 4) / 2).astype(np.float32)
SORTED[-1] = np.nan
NUMBERS = np.concatenate([SORTED[::5], [-9, 9, np.inf, -np.inf, np.nan, -0.0, 0.0]]).astype(np.float32)


def names(f, *arguments):
    return {e.name for e in gshard.stages.trace(f, *arguments).block.walk()}


@pytest.mark.parametrize("side", ["left", "right"])
def test_every_method_is_one_round(side):
    def f(a, v, whole):
        found = [jnp.searchsorted(a, v, side=side, method=m) for m in ("scan", "scan_unrolled", "sort", "compare_all")]
        return (
            *found,
            jnp.searchsorted(whole, whole[::3] + 1, side=side),
            jnp.digitize(v.reshape(2, -1), jnp.nan_to_num(a, nan=50.0)),
        )

    whole = np.sort(RNG.integers(-5, 5, 24).astype(np.int32))
    arguments = SORTED, NUMBERS[:16], whole
    run = gshard.jit(lambda a, v, w: f(gshard.split(a, 0, 8), v, gshard.split(w, 0, 8)), mesh=8)
    expected = jax.jit(f)(*arguments)
    for found, wanted in zip(jax.tree.leaves(run(*arguments)), jax.tree.leaves(expected), strict=True):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_array_equal(found, wanted)
    lowered = gshard.jit(lambda a, v: jnp.searchsorted(gshard.split(a, 0, 8), v, side=side), mesh=8)
    sent = lowered.lower(SORTED, NUMBERS).spmd.collectives
    assert [(c.kind, c.times) for c in sent] == [("all_reduce", 1)]


def test_many_numbers_in_few_places_stay_where_they_are():
    run = gshard.jit(lambda a, v: jnp.searchsorted(a, gshard.split(v, 0, 8)), mesh=8)
    numbers = RNG.standard_normal(64).astype(np.float32)
    np.testing.assert_array_equal(run(SORTED, numbers), jax.jit(jnp.searchsorted)(SORTED, numbers))
    assert not run.lower(SORTED, numbers).spmd.collectives


def test_only_what_jax_writes_is_taken_for_it():
    @jax.jit
    def searchsorted(a, v):
        return jnp.sum(a) + v

    assert "searchsorted" not in names(searchsorted, SORTED, NUMBERS)
    assert "searchsorted" not in names(jax.jit(_searchsorted_of_mine), SORTED, NUMBERS)
    nothing = np.zeros(0, np.float32)
    np.testing.assert_array_equal(gshard.jit(jnp.searchsorted, mesh=8)(nothing, NUMBERS), np.zeros(16))


def _searchsorted_of_mine(a, v):
    return jnp.sum(a) - v


def derivative(search):
    return jax.grad(lambda a, v: jnp.sum(v * search(a, v).astype(v.dtype)), 1)


ROWS = np.sort(np.round(RNG.standard_normal((16, 45)) * 4) / 2, 1).astype(np.float32)
FEW = RNG.standard_normal(16).astype(np.float32)

# A search of arrays in rising order, a sorted array, numbers, and the dimension of the array that is split.
FORMS = {
    "bfloat16": (lambda search: search, SORTED.astype(jnp.bfloat16), FEW.astype(jnp.bfloat16), 0),
    "integers in floats": (lambda search: search, SORTED, np.arange(-8, 8, dtype=np.int32), 0),
    "weak": (lambda search: lambda a, v: search(a.astype(jnp.bfloat16), v[0, 0] * 0 + 0.5), SORTED, FEW[None], 0),
    "one number each": (lambda search: jax.vmap(search, (None, 0)), SORTED, FEW, 0),
    "rows of numbers": (lambda search: jax.vmap(search, (None, 0)), SORTED, FEW.reshape(4, 4), 0),
    "rows of rows": (
        lambda search: jax.vmap(jax.vmap(search)), ROWS.reshape(2, 8, 45), FEW.reshape(2, 8, 1), 2
    ),
    "a derivative": (derivative, SORTED, FEW, 0),
    "a derivative of rows": (lambda search: derivative(jax.vmap(search, (None, 0))), SORTED, FEW.reshape(4, 4), 0),
    "rows": (jax.vmap, ROWS, RNG.standard_normal((16, 16)).astype(np.float32), 0),
    "rows, along the order": (jax.vmap, ROWS, FEW[:, None], 1),
    "rows, the same numbers": (lambda search: jax.vmap(search, (0, None)), ROWS, FEW, 0),
    "rows that fall": (
        lambda search: jax.vmap(lambda a, v: search(a[::-1], v)), ROWS[:, ::-1].copy(), FEW[:, None], 1
    ),
    "a sorter": (
        lambda search: lambda a, v: search(a, v, sorter=jnp.argsort(gshard.replicate(a))), SORTED[::-1].copy(), FEW, 0
    ),
}  # fmt: skip


METHODS = ["scan", "scan_unrolled", "sort", "compare_all"]


@pytest.mark.parametrize("name, method, side", crossed(list(FORMS), METHODS, ["left", "right"], one_in=8))
def test_every_form_is_a_search(name, method, side):
    """A loop of bisections has six rounds for 45 elements, each with a look-up."""
    form, array, numbers, dim = FORMS[name]
    search = form(functools.partial(jnp.searchsorted, side=side, method=method))
    run = gshard.jit(lambda a, v: search(gshard.split(a, dim, 8), v), mesh=8)
    want = jax.jit(search)(array, numbers)
    for got in in_every_way(run, (array, numbers), mesh_of(x=8)):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        np.testing.assert_array_equal(got, want)
    assert "searchsorted" in names(search, array, numbers)
    sent = run.lower(array, numbers).spmd.collectives
    assert sum(c.times for c in sent) <= (3 if name == "a sorter" else 1), sent


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("n", [16, 19, 5, 1])
@pytest.mark.one_in(2)
def test_what_falls_is_searched_as_it_lies(side, n):
    """In unequal parts, with numbers at both ends of the type, equal ones, infinities and NaN."""

    def search(a, v):
        return jnp.searchsorted(a[::-1], v, side=side)

    floats = np.sort(RNG.integers(-3, 3, n).astype(np.float32))[::-1].copy()
    floats[: n // 4], floats[n - n // 4 :] = np.nan, -np.inf
    of_floats = np.array([-np.inf, np.inf, np.nan, -0.0, 0.0, 1.5, -3.0], np.float32)
    least, most = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    whole = np.sort(RNG.choice(np.array([least, -1, 0, 7, most], np.int32), n))[::-1].copy()
    for a, v in ((floats, of_floats), (whole, np.array([least, -1, 0, 5, most], np.int32))):
        run = gshard.jit(lambda a, v: search(gshard.split(a, 0, 8), v), mesh=8)
        np.testing.assert_array_equal(run(a, v), jax.jit(search)(a, v))
        # Few elements are as well copied to all.
        assert n < 16 or {c.kind for c in run.lower(a, v).spmd.collectives} == {"all_reduce"}
