"""What shards tell each other to sort, to reduce in any way and to pool: the right bits, and the bytes said."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gshard
from gshard import split
from gshard.comm.shards import Shards
from gshard.core.mesh import Mesh
from gshard.core.sharding import Sharding
from gshard.rules.sort import Columns, _columns, ways
from gshard.simulator.simulate import simulate_function
from gshard.testing.rule_checks import parts_of
from gshard.tracing.trace import trace
from laws.test_rules_sound import the_equation


def equation_of(name, function, *arguments):
    """The equation of this name in a traced function."""
    equation = the_equation(trace(function, *arguments), name)
    assert equation is not None
    return equation


def same_bits(got, want):
    got, want = np.asarray(got), np.asarray(want)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert got.tobytes() == want.tobytes()


def troublesome(rng, n):
    """Many ties, zeros of both signs, infinities and NaNs with different bits."""
    x = np.round(rng.standard_normal(n) * 3).astype(np.float32)
    x[rng.random(n) < 0.1] = -0.0
    x[rng.random(n) < 0.05] = np.inf
    strange = rng.random(n) < 0.1
    x[strange] = (0x7FC00000 + rng.integers(0, 99, int(strange.sum()))).astype(np.uint32).view(np.float32)
    return x


@pytest.mark.parametrize("parts", [3, 4])
def test_columns_sort_zeros_and_ones_of_every_kind(parts, rng):
    """By the 0-1 principle columnsort is right if it is on these: sorted runs of every length on each device."""
    columns = Columns(2 * parts * parts * (parts - 1), parts)
    assert columns.fit
    assert columns.rows == 2 * columns.border, "the shortest columns that are long enough"
    mesh = Mesh.abstract(x=parts)
    ones = rng.integers(0, columns.size + 1, (3000, parts, 1))
    x = (np.arange(columns.size) >= columns.size - ones).reshape(3000, -1).astype(np.int32)
    number = np.broadcast_to(np.arange(columns.n, dtype=np.int32), x.shape)
    equation = equation_of("sort", lambda x: lax.sort(x, dimension=1), x)
    shards = Shards(equation, {1: mesh.atoms}, mesh)
    cut = Sharding(((), mesh.atoms))
    for operands in ([x], [x, number]):
        results = simulate_function(
            lambda *xs: _columns(shards, list(xs), columns.n, 1, mesh.atoms),
            mesh.atom_sizes,
            *(parts_of(o, cut, mesh) for o in operands),
        )
        for got, want in zip(results, lax.sort(operands, dimension=1, num_keys=1), strict=True):
            same_bits(np.concatenate(got, axis=1)[:, : columns.n], want)


def test_each_way_to_sort_is_taken_where_it_sends_least():
    def best(*arguments):
        sent = ways(*arguments)
        return min(sent, key=lambda way: sent[way])

    assert best(10, 8, 1, (4,), 1, True) == "together"
    assert best(1000, 8, 1, (4,), 1, True) == "columns"
    assert best(1000, 8, 64, (4,), 1, False) == "crosswise"
    assert best(1000, 2, 1, (4,), 1, False) == "together"
    assert ways(1 << 24, 64, 1, (4,), 1, True)["columns"] < 2.1 * 4 * (1 << 24) // 64


@pytest.mark.parametrize("n", [1000, 1003, 5])
def test_a_program_sorts_what_is_split(n, rng):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = troublesome(rng, n)

    def program(x):
        x = split(x, 0, 8)
        return split(jnp.sort(x), 0, 8), split(jnp.argsort(x), 0, 8)

    lowered = gshard.jit(program, mesh=mesh).lower(x)
    inside = {c.kind for c in lowered.spmd.collectives if c.why == "inside sort"}
    assert inside == (set() if n < 8 else {"all_to_all", "collective_permute"})
    if n < 8:
        made_whole = [c.kind for c in lowered.spmd.collectives if c.why == "operand 0 of sort"]
        assert made_whole == ["all_gather"], "a short one, once for both"
    for got, want in zip(gshard.jit(program, mesh=mesh)(x), (jnp.sort(x), jnp.argsort(x)), strict=True):
        same_bits(got, want)
    if n == 1000:
        whole = 7 * 125 * 4
        sent = [c.total_bytes for c in lowered.spmd.collectives]
        assert sum(sent) < 0.55 * (whole + 2 * whole), "less than half of what gathering sends"


@pytest.mark.parametrize("strides", [(1, 1), (2, 2)])
def test_a_program_differentiates_pooling(strides, rng):
    """XLA's own partitioner shifts the first part's gradient where windows overlap; only halos are sent here.

    They come once for both passes, and what falls into them goes back: sums of whole numbers are exact in any order.
    """
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    image = np.round(rng.standard_normal((64, 9)) * 2).astype(np.float32)

    def loss(x):
        pooled = lax.reduce_window(x, -np.inf, lax.max, (3, 3), strides, "SAME")
        return (pooled * pooled).sum()

    def program(x):
        return split(jax.grad(loss)(split(x, 0, 8)), 0, 8)

    lowered = gshard.jit(program, mesh=mesh).lower(image)
    assert {c.kind for c in lowered.spmd.collectives} == {"collective_permute"}
    halo = 3 - strides[0]  # rows of other devices that the windows of one reach
    assert sum(c.bytes for c in lowered.spmd.collectives) == 2 * halo * 9 * 4
    same_bits(gshard.jit(program, mesh=mesh)(image), jax.jit(jax.grad(loss))(image))


@pytest.mark.parametrize("n", [1000, 1003])
def test_a_program_gathers_only_the_approximately_greatest(n, rng):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = rng.standard_normal(n).astype(np.float32)

    def program(x):
        return lax.approx_max_k(split(x, 0, 8), 5)

    lowered = gshard.jit(program, mesh=mesh).lower(x)
    assert sum(c.total_bytes for c in lowered.spmd.collectives) == 7 * 5 * (4 + 4)
    for got, want in zip(gshard.jit(program, mesh=mesh)(x), lax.top_k(x, 5), strict=True):
        same_bits(got, want)


@pytest.mark.parametrize("n", [1024, 1000])
def test_operands_of_all_types_go_in_one_message(n, rng):
    keys = rng.integers(-20, 20, n).astype(np.float32) / 4
    keys[::17], keys[::29], keys[::31] = np.nan, -0.0, np.inf
    signed, unsigned = np.arange(n, dtype=np.int32) - 99, rng.integers(0, 255, n).astype(np.uint8)
    others = signed, unsigned, keys > 0, keys.astype(jnp.bfloat16)

    def ordered(*xs):
        return lax.sort(tuple(gshard.split(x, 0, 8) for x in xs), num_keys=1)

    run = gshard.jit(ordered, mesh=8)
    for found, expected in zip(run(keys, *others), jax.jit(ordered)(keys, *others), strict=True):
        assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()
    sent = run.lower(keys, *others).spmd.collectives
    assert Counter(c.kind for c in sent)["all_to_all"] == 2
    assert sum(c.times for c in sent) <= 5, "dealt out, cut in chunks, and the ends of columns both ways"
