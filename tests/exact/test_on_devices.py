"""Collectives, loops and branches of ``gshard.exact`` against the real thing: eight virtual devices."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from gshard.exact.operations import Undecided
from simulated import simulate_function

CUBE = {"a": 2, "b": 2, "c": 2}
ORDERS = [axes for n in (1, 2, 3) for axes in itertools.permutations(CUBE, n)]


def random_locals(rng, shape, dtype="float32", devices=8):
    values = rng.normal(scale=50.0, size=(devices, *shape))
    return values > 0 if dtype == "bool" else np.asarray(values, jnp.dtype(dtype))


def run_for_real(function, sizes, *stacked):
    mesh = Mesh(np.array(jax.devices()[: math.prod(sizes.values())]).reshape(*sizes.values()), tuple(sizes))
    rows = PartitionSpec(tuple(sizes))

    def one_device(*args):
        return jax.tree.map(lambda y: y[None], jax.tree.leaves(function(*(x[0] for x in args))))

    mapped = jax.shard_map(one_device, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    return jax.jit(mapped)(*stacked)


def check(function, sizes, *stacked, tolerance=1e-6):
    expected = [np.asarray(x) for x in run_for_real(function, sizes, *stacked)]
    actual = simulate_function(function, sizes, *stacked)
    assert len(actual) == len(expected)
    for got, want in zip(actual, expected, strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        if got.dtype.kind in "biu":
            np.testing.assert_array_equal(got, want)
        else:
            exact = np.complex128 if got.dtype.kind == "c" else np.float64
            got, want = got.astype(exact), want.astype(exact)
            scale = max(1.0, float(np.abs(want).max(initial=0)))
            np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * scale)


# Of each number of axes, in the order of the mesh and in others.
FAST = ("a", "c", "ac", "ba", "cb", "abc", "cab")


@pytest.mark.parametrize(
    "axes", [pytest.param(x, id="".join(x), marks=() if "".join(x) in FAST else pytest.mark.slow) for x in ORDERS]
)
@pytest.mark.one_in(2)
def test_collectives_over_axes_in_any_order(axes, rng):
    n = 2 ** len(axes)
    ring = [(i, (i + 1) % n) for i in range(n)]

    def everything(x, k):
        in_mesh_order = tuple(sorted(axes))
        return [
            lax.psum(x, axes), lax.psum(k, axes), lax.pmax(x, axes), lax.pmin(k, axes), lax.pmean(x, axes),
            lax.all_gather(x, axes), lax.all_gather(k, axes, axis=1), lax.all_gather(x, axes, axis=1, tiled=True),
            lax.psum_scatter(x, axes, scatter_dimension=0, tiled=True),
            lax.psum_scatter(k[:n], axes, scatter_dimension=0),
            lax.psum_scatter(k.T[:, :n], axes, scatter_dimension=1),
            lax.all_to_all(x, axes, 0, 1, tiled=True), lax.all_to_all(k, axes, 0, 0, tiled=True),
            lax.all_to_all(x[:n], axes, 0, 1), lax.all_to_all(k[:, :n], axes, 1, 0),
            lax.ppermute(x, in_mesh_order, ring), lax.ppermute(k, in_mesh_order, ring[:1]), lax.axis_index(axes),
        ]  # fmt: skip

    check(everything, CUBE, random_locals(rng, (8, 8)), random_locals(rng, (8, 8), "int32"))


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int32", "float16", "bfloat16", "float32", "complex64"])
def test_dtypes(dtype, rng):
    """Integers wrap around, booleans are counted by psum and combined by pmax."""

    def everything(x):
        extremes = [] if dtype == "complex64" else [lax.pmax(x, "b"), lax.pmin(x, ("c", "a"))]
        summed = [] if dtype == "bool" else [lax.psum_scatter(x, ("b", "a"), tiled=True)]
        moved = [lax.all_to_all(x, ("c", "b"), 0, 1, tiled=True), *(lax.ppermute(x, "a", p) for p in ([(0, 1)], []))]
        return [lax.psum(x, ("c", "a")), *(lax.all_gather(y, "c") for y in (x, x[:0])), *extremes, *summed, *moved]

    check(everything, CUBE, random_locals(rng, (4, 3), dtype), tolerance=1e-2 if "16" in dtype else 1e-6)


def test_axis_index_groups(rng):
    def everything(x):
        mixed = {"axis_name": ("c", "a"), "axis_index_groups": [[3, 0], [1, 2]]}
        return [
            lax.psum(x, **mixed),
            lax.pmax(x, "b", axis_index_groups=[[1], [0]]),
            lax.all_gather(x, **mixed),
            lax.all_gather(x, tiled=True, **mixed),
            lax.psum_scatter(x, tiled=True, **mixed),
            lax.all_to_all(x, split_axis=0, concat_axis=1, tiled=True, **mixed),
            lax.psum(x, ("a", "b", "c"), axis_index_groups=[[0, 6, 1, 3], [7, 2, 5, 4]]),
        ]

    check(everything, CUBE, random_locals(rng, (4, 2), "int32"))


def test_hundreds_of_devices(rng):
    sizes = {"pod": 3, "data": 16, "model": 7}
    axes = ("model", "pod", "data")
    x = random_locals(rng, (336, 2), "int32", 336)

    def both_ways(x):
        whole = lax.psum(x, axes)
        return whole - lax.all_gather(lax.psum_scatter(x, axes, tiled=True), axes, tiled=True), whole

    zero, whole = simulate_function(both_ways, sizes, x)
    assert not zero.any()
    np.testing.assert_array_equal(whole, np.broadcast_to(x.sum(0, dtype=np.int32), x.shape))
    (there_and_back,) = simulate_function(
        lambda x: lax.all_to_all(lax.all_to_all(x, axes, 0, 1, tiled=True), axes, 1, 0, tiled=True), sizes, x
    )
    np.testing.assert_array_equal(there_and_back, x)


def test_ragged_all_to_all(rng):
    """Every device sends ``row counts[i][j]`` of its rows to device j; rows arrive in the order of the senders."""
    n, counts = 3, np.array([[1, 0, 2], [2, 1, 0], [0, 3, 1]], np.int32)
    rows = random_locals(rng, (3, 2), "int32", n)
    rows = np.concatenate([rows, random_locals(rng, (1, 2), "int32", n)], axis=1)
    starts = np.cumsum(counts, 1, dtype=np.int32) - counts
    landing = np.cumsum(counts, 0, dtype=np.int32) - counts
    output = np.full((n, 5, 2), -1, np.int32)

    def exchange(*args):
        return lax.ragged_all_to_all(*args, axis_name="a")

    (got,) = simulate_function(exchange, {"a": n}, rows, output, starts, counts, landing, counts.T.copy())
    for j in range(n):
        want = np.concatenate([rows[i, starts[i, j] : starts[i, j] + counts[i, j]] for i in range(n)])
        np.testing.assert_array_equal(got[j, : len(want)], want)
        assert (got[j, len(want) :] == -1).all()


def test_collective_under_vmap_and_grad(rng):
    def loss(x):
        gathered = lax.all_gather(x, ("c", "a"), tiled=True)
        return (gathered**2).sum() + lax.psum(jnp.sin(x), "b").sum()

    def everything(x):
        return [
            jax.grad(loss)(x),
            jax.vmap(lambda row: lax.psum(row, "a") + lax.axis_index("b"))(x),
            jax.vmap(lambda row: lax.psum(row, ("i", "a")), axis_name="i")(x),
            jax.vmap(lambda row: lax.all_to_all(row, ("c", "b"), 0, 0, tiled=True), in_axes=1, out_axes=1)(x),
        ]

    check(everything, CUBE, random_locals(rng, (4, 3)) / 50)


def test_regions_with_collectives_inside(rng):
    @jax.custom_vjp
    def custom(x):
        return lax.psum(x, "a")

    custom.defvjp(lambda x: (custom(x), None), lambda _, g: (g * 2,))

    def everything(x, n):
        forward = lax.scan(lambda c, row: (c + lax.psum(row, "a"), c * row), x[0], x)
        backward = lax.scan(lambda c, row: (c - row, lax.pmax(c, ("c", "b"))), x[0], x, reverse=True)
        nested = lax.scan(lambda c, _: (lax.fori_loop(0, 2, lambda i, c: lax.pmin(c, "c") + i, c), None), x, length=3)
        looped = lax.while_loop(lambda c: lax.psum(c[0], "a") < 9, lambda c: (c[0] + 1, c[1] + x), (0, x))
        taken = lax.cond(lax.psum(x.sum(), tuple(CUBE)) > 0, lambda x: lax.psum(x, "b"), lambda x: x, x)
        alone = lax.cond(x.sum() > 0, lambda x: x + lax.axis_index("a"), lambda x: -x, x)
        own_rounds = lax.fori_loop(0, n, lambda i, c: c + lax.axis_index("b"), x)
        remat = jax.checkpoint(lambda x: jnp.sin(x) * lax.psum(x, "a"))(x)
        jitted = jax.jit(lambda x: jax.nn.relu(lax.ppermute(x, ("a", "c"), [(0, 3), (3, 0)])))(x)
        derived = jax.grad(lambda x: (custom(x) ** 2).sum())(x)
        empty = lax.scan(lambda c, row: (c + lax.psum(row, "a"), row), x[0], x[:0])
        return [forward, backward, nested, looped, taken, alone, own_rounds, remat, jitted, derived, empty]

    check(everything, CUBE, random_locals(rng, (3, 2)) / 50, np.arange(8, dtype=np.int32) % 3, tolerance=1e-5)


def test_regions_without_collectives_and_captured_arrays(rng):
    table = rng.normal(size=(5, 3)).astype(np.float32)

    def everything(x, n):
        rows = jnp.asarray(table)[n]
        total = lax.scan(lambda c, row: (c + row * table.sum(), c), x[0], x)
        switched = lax.switch(n, [jnp.sin, jnp.cos, lambda x: x @ x.T @ x], x)
        counted = lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 2), (0, x))
        found = jnp.searchsorted(jnp.sort(x[0]), 0.5)
        return [rows, total, switched, counted, found, lax.psum(rows, "a"), jnp.float32(1.0), lax.top_k(x, 2)]

    check(everything, CUBE, random_locals(rng, (4, 3)) / 50, np.arange(8, dtype=np.int32) % 5, tolerance=1e-5)


def test_random_keys(rng):
    """Keys cannot be numpy arrays; they pass through runs, scans and results all the same."""

    def everything(seed):
        key = jax.random.fold_in(jax.random.key(3), seed + lax.axis_index("b"))
        _, drawn = lax.scan(lambda k, _: (jax.random.split(k)[0], lax.psum(jax.random.normal(k), "a")), key, length=3)
        keys = jax.random.split(key, 2)
        _, each = lax.scan(lambda c, k: (c, (k, lax.psum(c, "a"))), seed, keys)
        return [drawn, jax.random.bits(key, (3,)), jax.random.key_data(each[0]), each[1]]

    check(everything, CUBE, np.arange(8, dtype=np.int32))
    (keys,) = simulate_function(
        lambda k: jax.random.fold_in(k, lax.axis_index("a")), {"a": 3}, jax.random.split(jax.random.key(0), 3)
    )
    assert keys.shape == (3,)
    assert jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)


def branch(x):
    return lax.cond(x > 0, lambda x: lax.psum(x, "a"), lambda x: x, x)


def loop(x):
    return lax.fori_loop(0, x, lambda i, c: lax.psum(c, "a"), x)


@pytest.mark.parametrize(("f", "axes", "message"), [
    # Devices that would wait for ever.
    (branch, {"a": 2}, "take a branch apart"),
    (loop, {"a": 2}, "leave a loop"),
    # Permutations that are none.
    (lambda x: lax.ppermute(x, "a", [(0, 1), (1, 1)]), CUBE, "destination twice"),
    (lambda x: lax.ppermute(x, ("c", "a"), [(0, 1)]), CUBE, "another order than the mesh"),
    (lambda x: lax.psum(x, "a", axis_index_groups=[[2], [0, 1]]), {"a": 3}, "differ in size"),
])  # fmt: skip
def test_programs_that_have_no_meaning_are_undecided(f, axes, message):
    with pytest.raises(Undecided, match=message) as error:
        simulate_function(f, axes, np.array([-1, 2, 3, 4, 5, 6, 7, 8][: math.prod(axes.values())], np.int32))
    assert error.value.where.startswith("test_on_devices.py:")
