"""The law: the time of tracing, planning, lowering and explaining grows linearly with the number of layers.

Calls of Python functions are counted, since seconds depend on the machine. A walk without a memo takes exponentially
many on residual layers, and a walk from each equation back to the start quadratically many. A second law: nothing
recurs over the length of a program, so that programs may be longer than Python's recursion limit.
"""

import gc
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from gshard.emit.partition import partition
from gshard.planning.propagate import propagate
from gshard.tracing.trace import trace
from laws.test_propagate_laws import MESH as SIX
from laws.test_propagate_laws import assert_right
from placed import cut

LAYERS = (8, 16, 32, 64)
LONG = 2000  # operations of a chain, twice the recursion limit
MESH = gshard.Mesh.abstract(data=2, model=4)
X = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32) / 16


# The marks leave little to decide, so that programs of all sizes have the same plan.
def residual(x, w):
    return jnp.tanh(x @ w) / 4 + gshard.shard(x, P("data", None))


def marked(x, w):
    return gshard.shard(jnp.tanh(x @ w), P("data", "model")) @ w.T / 4 + x


def attention(x, w):
    q, k = (gshard.split(y.reshape(64, 4, 16), 1, "model") for y in (x @ w, x @ w.T))
    weights = jax.nn.softmax(jnp.einsum("ihd,jhd->hij", q, k))
    return jnp.einsum("hij,jhd->ihd", weights, k).reshape(64, 64) @ w / 4 + x


def inner_jit(x, w):
    return jax.jit(residual)(x, w) + jnp.sin(x)


def moved(x, w):
    return jnp.roll(x, 1, 0) / 2 + jnp.pad(x[1:], ((0, 1), (0, 0))) + jnp.where(jnp.arange(64) > 3, x, 0)


def updated(x, w):
    return x.at[2].add(w[0]) / 2 + jnp.cumsum(x, 1) / 32


def unrolled(layer):
    def of(layers):
        def f(x, w):
            x = gshard.split(x, 0, "data")
            for _ in range(layers):
                x = layer(x, w)
            return x

        return f

    return of


def in_a_scan(layers):
    """A loop whose body is half of the layers, and the other half behind it."""
    half = unrolled(residual)(layers // 2)

    def f(x, w):
        x, sums = lax.scan(lambda x, w: (half(x, w), jnp.sum(x)), x, jnp.stack([w, -w]))
        return half(x, w) + sums[0]

    return f


def gradient(of):
    return lambda layers: jax.grad(lambda x, w: jnp.sum(of(layers)(x, w) ** 2), 1)


def sum_of_slices(layers):
    """Its gradient adds an array with zeros for each slice."""
    return jax.grad(lambda x, w: sum(jnp.sum(jnp.sin(x[i % 8 : i % 8 + 1] @ w)) for i in range(layers)))


PROGRAMS = {
    "residual": unrolled(residual), "attention": unrolled(attention), "in a scan": in_a_scan,
    "gradient": gradient(unrolled(marked)), "marked": unrolled(marked), "inner jit": unrolled(inner_jit),
    "moved": unrolled(moved), "updated": unrolled(updated), "gradient of attention": gradient(unrolled(attention)),
    "gradient of a scan": gradient(in_a_scan), "sum of slices": sum_of_slices,
}  # fmt: skip
FAST = ("residual", "attention", "in a scan")
# With fewer layers, an exchange with neighbours in each costs less than to split the other dimension once.
SIZES = {"moved": (32, 64, 128)}


def jax_mesh():
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def placed():
    mesh = jax_mesh()
    return cut(X, mesh, 0), jax.device_put(W, NamedSharding(mesh, P()))


def stages(f):
    x, w = placed()
    yield "trace", lambda: trace(f, X, W)
    program = trace(f, X, W)
    yield "plan", lambda: propagate(program, MESH)
    plan = propagate(program, MESH)
    yield "partition", lambda: partition(plan)
    partitioned = gshard.jit(f, mesh=jax_mesh())
    yield "lower inside jax.jit", lambda: jax.jit(lambda x, w: partitioned(x, w)).lower(x, w)
    total = gshard.jit(lambda x: jnp.sum(x * x), mesh=jax_mesh())
    yield "lower behind it", lambda: jax.jit(lambda x, w: total(f(x, w))).lower(x, w)
    found = gshard.explain(f, X, W, mesh=MESH)
    yield "explain", lambda: [str(found), [row.reason for row in found.tensors], found.why("x"), found.data(seconds=0)]
    yield "price", lambda: found.cost("h100")


def calls_of(run):
    """The number of calls of Python functions; the collector may call finalizers of others."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event == "call"

    gc.disable()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


@pytest.mark.parametrize("name", [p if p in FAST else pytest.param(p, marks=pytest.mark.slow) for p in PROGRAMS])
def test_calls_grow_with_the_number_of_layers(name):
    for _, run in stages(PROGRAMS[name](4)):  # fills caches that do not depend on the number of layers
        run()
    counts = {}
    for layers in SIZES.get(name, LAYERS):
        for stage, run in stages(PROGRAMS[name](layers)):
            counts.setdefault(stage, []).append(calls_of(run))
    more = {stage: [b / a for a, b in itertools.pairwise(n)] for stage, n in counts.items()}
    assert all(ratio <= 2.2 for ratios in more.values() for ratio in ratios), (counts, more)


def sines(x, w):
    for _ in range(LONG):
        x = jnp.sin(x)
    return x


def from_marks(x, w):
    x = gshard.split(x, 0, "data")
    for i in range(LONG // 3):
        x = jnp.maximum(x, -w[0]) * (0.5 if i % 2 else -2)
    return x


def diamonds(x, w):
    for _ in range(LONG // 3):
        x = x / 2 + jnp.sin(x)
    return x


def sums(x, w):
    y = jnp.pad(x[:32], ((0, 32), (0, 0)))
    for _ in range(LONG // 2):
        y = y / 2 + x
        y = y + y
    return y


def rolls(x, w):
    for _ in range(LONG // 4):
        x = jnp.roll(x, 1, 0)
    return x + w[0]


def forms(x, w):
    for i in range(LONG // 4):
        x = x.reshape(32, 128).T.reshape(64, 64).astype(jnp.bfloat16 if i % 2 else jnp.float32)
    return x.astype(jnp.float32)


def products(x, w):
    for _ in range(LONG // 4):
        x = gshard.split(x, 0, "data") @ w
    return x


def of_masks(x, w):
    mask = jnp.arange(64) > 0
    for i in range(LONG // 2):
        mask = mask & (jnp.arange(64) != i + 3)
    return jnp.where(mask, x, 0)


def of_indices(x, w):
    at = jnp.arange(64)
    for _ in range(LONG // 2):
        at = (at + 1) % 64
    return jnp.take(x, at, axis=0)


def scaled_in_a_loop(x, w):
    def body(total, row):
        y = row[:, None] * w
        for _ in range(LONG // 2):
            y = y * 0.999
        return total + y, None

    return lax.scan(body, w, x)[0]


def calls(x, w):
    layer = jax.jit(lambda x, w: jnp.tanh(x) / 2 + jnp.sin(w[0]))
    for _ in range(LONG // 8):
        x = layer(x, w)
    return x


def called_twice(x, w):
    """Of 2^20 calls in the end; written as 20 functions."""
    function = jnp.sin
    for _ in range(20):
        function = jax.jit(lambda x, f=function: f(f(x)))
    return function(x)


CHAINS = {f.__name__: f for f in (
    sines, from_marks, diamonds, sums, rolls, forms, products, of_masks, of_indices, scaled_in_a_loop, calls,
)}  # fmt: skip
FAST_CHAINS = ("sines",)


@pytest.mark.parametrize("name", [c if c in FAST_CHAINS else pytest.param(c, marks=pytest.mark.slow) for c in CHAINS])
def test_programs_may_be_longer_than_the_recursion_limit(name):
    f = CHAINS[name]
    for _, run in stages(f):
        run()
    partition(propagate(trace(jax.grad(lambda x, w: jnp.sum(f(x, w)), 1), X, W), MESH))
    jax.jit(jax.grad(lambda x, w: jnp.sum(gshard.jit(f, mesh=jax_mesh())(x, w)), 1)).lower(*placed())


def test_a_long_chain_runs():
    """Simulated, compiled, inside ``jax.jit`` and in front of a partitioned function there."""
    want = np.asarray(jax.jit(sines)(X, W))
    partitioned, total = gshard.jit(sines, mesh=jax_mesh()), gshard.jit(lambda x: x * 2, mesh=jax_mesh())
    inside = jax.jit(lambda x, w: total(partitioned(x, w)))
    behind = jax.jit(lambda x, w: total(sines(x, w)))
    for x in (X, cut(X, jax_mesh(), 0, 1)):
        np.testing.assert_allclose(partitioned(x, W), want, rtol=1e-5)
        np.testing.assert_allclose(inside(x, W), 2 * want, rtol=1e-5)
        np.testing.assert_allclose(behind(x, W), 2 * want, rtol=1e-5)
    spmd = partition(propagate(trace(lambda x, w: sines(gshard.split(x, 0, "data"), w), X, W), SIX))
    assert_right(spmd, sines, (X, W))


def test_what_jax_makes_of_a_long_chain_is_explained():
    x, w = placed()
    assert "sines" in str(gshard.explain(jax.jit(sines), x, w))


def test_functions_that_call_functions_are_read_once():
    x, _ = placed()
    total = gshard.jit(lambda x: jnp.sum(x * x), mesh=jax_mesh())
    lowered = jax.jit(lambda x: total(called_twice(x, None))).lower(x)
    assert "called_twice" not in lowered.as_text() or len(lowered.as_text()) < 100_000


@pytest.mark.parametrize("layers", [24, pytest.param(LONG // 4, marks=pytest.mark.slow)])
def test_long_chains_are_recomputed(layers):
    """With a limit that needs it: what a reader after the peak reads is found once."""

    def f(x, ws):
        x = gshard.split(x, 0, 8)
        kept = jnp.tanh(x @ ws[0])
        y = jnp.sort(kept, 0).sum(1, keepdims=True) * x @ ws[1] @ ws[0]
        for _ in range(layers):
            kept = kept * 2 + jnp.sin(kept)
        return jnp.sum(y @ ws[1] * kept[:, :1]) + jnp.sum(kept @ ws[1])

    shapes = jax.ShapeDtypeStruct((1024, 256), jnp.float32), jax.ShapeDtypeStruct((2, 256, 256), jnp.float32)
    found = gshard.explain(jax.grad(f, 1), *shapes, mesh=gshard.Mesh.abstract(d=8), memory_limit="3MB")
    assert "optimization_barrier" in str(found.spmd.jaxpr)
