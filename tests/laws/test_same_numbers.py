"""The law: on real devices, too, what only moves or looks up numbers gives the very numbers of ``jax.jit``.

Every bit counts: the sign of a zero, numbers below the normal ones, infinities; only of NaN one is as good as another.
Simulated devices cannot show it, since collectives have ways of their own: on CPU XLA's sums lose -0.0 and its maxima
lose NaN.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gshard
from gshard import split
from placed import in_every_way, mesh_of, put
from sampled import crossed

pytestmark = pytest.mark.optimised

DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host
SPECIAL = np.array([-0.0, 0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-39, -2.5], np.float32)
ZEROS = np.full(8, -0.0, np.float32)
REVERSED = mesh_of(order=range(7, -1, -1), p=8)  # results leave in its order
WITHOUT_NAN = np.array([-0.0, 0.0, 3.0, -np.inf, 7.0, 200.0, -1.0, -2.5], np.float32)


def parts(x):
    return split(x, 0, 8)


MOVES = {
    "an element": lambda x, i: parts(x)[i],
    "a fixed element": lambda x, i: (parts(x)[0], parts(x)[3], parts(x)[6:7], parts(x)[5]),
    "looked up": lambda x, i: jnp.take(parts(x), jnp.array([0, 5, 6, 7, 1, 0])),
    "looked up out of range": lambda x, i: parts(x).at[jnp.array([0, 5, 9, -9])].get(mode="fill", fill_value=1),
    "a window": lambda x, i: lax.dynamic_slice(parts(x), (i,), (5,)),
    "updated": lambda x, i: lax.dynamic_update_slice(parts(x), x[4:6], (i,)),
    "set": lambda x, i: parts(x).at[jnp.array([2, 5])].set(x[jnp.array([0, 6])]),
    "rotated": lambda x, i: jnp.roll(parts(x), 3),
    "backwards": lambda x, i: parts(x)[::-1],
    "padded": lambda x, i: jnp.pad(parts(x), (3, 2)),
    "joined": lambda x, i: jnp.concatenate([parts(x), x[:3]]),
    "some": lambda x, i: parts(x)[1:7:2],
    "chosen": lambda x, i: jnp.where(jnp.arange(8) == i, parts(x), x[::-1]),
    "chosen from what was looked up": lambda x, i: jnp.where(i > 2, parts(x)[i], x[1]),
    "in another shape": lambda x, i: parts(x).reshape(2, 4).T,
    "copies": lambda x, i: jnp.tile(jnp.repeat(parts(x), 3), 2),
    "carried": lambda x, i: lax.scan(lambda c, a: (a, c), x[0], parts(x)),
    "to the host and back": lambda x, i: jax.device_put(jax.device_put(parts(x), HOST), DEVICE),
    "uneven": lambda x, i: (split(x[:5], 0, 8)[3], jnp.roll(split(x[:5], 0, 8), 2), split(x[:5], 0, 8)[i]),
}
NUMBERS = {
    "special": SPECIAL,
    "negative zeros": ZEROS,
    "bfloat16": SPECIAL.astype(jnp.bfloat16),
    "float16": SPECIAL.astype(np.float16),
    "float8": np.array([-0.0, 0.0, 448.0, -448.0, np.nan, 2**-9, -(2**-9), -2.5]).astype(jnp.float8_e4m3fn),
    "complex": np.array([complex(-0.0, b) for b in (-0.0, 0.0, np.inf, 1.5, 1e-40, -2.0, 3.0, -0.0)], np.complex64),
    "int4": np.arange(-4, 4).astype(jnp.int4),
    "int32": np.array([0, -1, 2**31 - 1, -(2**31)] * 2, np.int32),
    "booleans": np.arange(8) % 3 == 0,
}


def assert_same(f, *arguments):
    wanted = jax.tree.leaves(jax.jit(f)(*arguments))
    for results in in_every_way(gshard.jit(f, mesh=8), arguments, mesh_of(devices=8)):
        assert_equal(jax.tree.leaves(results), wanted)


def assert_equal(results, wanted):
    for got, want in zip(results, wanted, strict=True):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        a, b = np.asarray(got), np.asarray(want)
        if jnp.issubdtype(got.dtype, jnp.inexact):
            assert (np.isnan(a) == np.isnan(b)).all()
            a, b = (np.where(np.isnan(x), np.zeros((), x.dtype), x) for x in (a, b))
        assert a.tobytes() == b.tobytes(), f"{got} is not {want}"


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.one_in(4)
def test_moves_are_exact(numbers):
    x = NUMBERS[numbers]
    for what, f in MOVES.items():
        if x.dtype != np.float32 and what in ("copies", "backwards", "in another shape", "joined", "some", "padded"):
            continue  # nothing there asks for the dtype
        assert_same(f, x, np.int32(3))


def test_a_zero_that_was_looked_up_divides_to_the_same_infinity():
    assert_same(lambda x, i: 1 / parts(x)[i], ZEROS, np.int32(3))
    assert_same(lambda x, i: 1 / (parts(x)[i] * 0.5), ZEROS, np.int32(3))
    assert_same(lambda x: 1 / -(parts(x).sum()), np.array([1.0, -1.0] * 4, np.float32))
    # A piece of a derivative: zeros are added to what is moved.
    assert_same(lambda x, y: jax.vjp(lambda x: jnp.roll(parts(x), 3), x)[1](y), SPECIAL, ZEROS)


@pytest.mark.parametrize("numbers", ["special", "negative zeros", "bfloat16", "float16", "float8"])
@pytest.mark.one_in(2)
def test_extremes_keep_nan_and_the_sign_of_a_zero(numbers):
    """Also where most devices hold nothing but padding."""
    x = NUMBERS[numbers]
    x = np.where(
        np.abs(x.astype(np.float32)) < 1e-30, np.copysign(np.zeros((), x.dtype), x), x
    )  # XLA takes them for zero
    assert_same(lambda x: (jnp.max(parts(x)), jnp.min(parts(x))), x)
    assert_same(lambda x: (jnp.max(split(x[:3], 0, 8)), jnp.min(split(x[:3], 0, 8))), x)
    assert_same(lambda x: [f(split(x.reshape(4, 2), 0, 4), 0) for f in (jnp.max, jnp.min)], x)
    finite = np.clip(WITHOUT_NAN, -400, 400)
    assert_same(lambda x: (jnp.max(parts(x)), jnp.min(parts(x))), finite.astype(x.dtype))
    assert_same(lambda x: (lax.cummax(parts(x)), lax.cummin(parts(x)), jnp.argmax(parts(x)), jnp.sort(parts(x))), x)
    largest = jax.ops.segment_max
    assert_same(lambda x: largest(parts(x), jnp.array([0, 1, 0, 2, 2, 3, 3, 5]), 7, mode="drop"), x)


def test_what_a_scatter_does_not_touch_stays():
    at = jnp.array([2, 5])
    for x in (SPECIAL, ZEROS, np.array([complex(-0.0, -0.0)] * 8, np.complex64), NUMBERS["bfloat16"]):
        ways = "add", "subtract", "multiply", *(("max", "min") if x.dtype.kind != "c" else ())
        untouched = np.array([i for i in range(8) if i not in (2, 5)])
        assert_same(lambda x, w=ways, u=untouched: [getattr(parts(x).at[at], f)(x[7])[u] for f in w], x)
    clipped = np.array([[2, 9], [5, -3]])
    square = np.arange(32, dtype=np.float32).reshape(8, 4)
    for mode in ("clip", "drop"):
        assert_same(lambda x, i, m=mode: split(x, 0, 8).at[i[:, 0], i[:, 1]].add(0.5, mode=m), square, clipped)


def test_parts_of_a_sum_are_not_scaled_by_what_is_not_known():
    """Issue: 3e38 and -3e38 are zero together, and times ten an infinity each; NaN where JAX has a number."""
    large, unit = np.array([3e38, -3e38] * 4, np.float32), np.eye(8, dtype=np.float32)[0]
    assert_same(lambda x, s: parts(x).sum() * s + parts(x).sum(), large, np.float32(10))
    assert_same(lambda x, s: parts(x).sum() * s + parts(x).sum(), unit, np.float32(np.inf))
    assert_same(lambda x, s: parts(x).sum() / s + parts(x).sum(), unit, np.float32(0))
    assert_same(lambda x, s: parts(x)[0] * s + parts(x)[0], unit, np.float32(np.inf))
    rows = np.stack([large / 6, unit], 1)
    assert_same(lambda x, w: (jnp.ones((3, 8)) @ parts(x)) @ w, rows[:, :1], np.array([[20.0, -30.0]], np.float32))
    assert_same(lambda x, w: (jnp.ones((3, 8)) @ parts(x)) @ w, rows[:, 1:], np.array([[np.inf, 0.0]], np.float32))
    half = np.array([6e4, -6e4] * 4, np.float16)
    assert_same(lambda x: lax.add(*(lax.reduce_sum_p.bind(parts(x), axes=(0,), out_sharding=None) for _ in "ab")), half)


KEYS = {
    "an element": lambda k: (k[3], k[jnp.array([0, 4, 4])], jnp.take(k, jnp.int32(2))),
    "a window": lambda k: (k[1:4], lax.dynamic_slice(k, (jnp.int32(2),), (2,)), k[::-1]),
    "joined": lambda k: (jnp.concatenate([k, k[:2]]), jnp.stack([k, k]), jnp.roll(k, 2)),
    "in another shape": lambda k: (k[:4].reshape(2, 2).T, jnp.broadcast_to(k, (3, 5)), k[:, None]),
    "chosen": lambda k: jnp.where(jnp.arange(5) > 2, k, k[::-1]),
    "updated": lambda k: (k.at[1].set(k[4]), lax.dynamic_update_slice(k, k[:2], (jnp.int32(3),))),
    "carried": lambda k: lax.scan(lambda c, a: (a, (c, jax.random.fold_in(a, 3))), k[0], k),
    "while": lambda k: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.roll(c[1], 1)), (0, k)),
    "either": lambda k: lax.cond(jax.random.bits(k[0]) > 7, lambda k: k, lambda k: k[::-1], k),
    "mapped": lambda k: jax.vmap(lambda k: (jax.random.split(k, 3), jax.random.normal(k, (2,))))(k),
    "copied": lambda k: (jax.random.clone(k), jax.random.split(k[1]), jax.random.fold_in(k[2], 5)),
    "gamma": lambda k: jax.vmap(lambda k: jax.random.gamma(k, 2.0, (2,)))(k),
    "data": lambda k: jax.random.wrap_key_data(jax.random.key_data(k) + 1, impl=jax.random.key_impl(k)),
    "to the host and back": lambda k: jax.device_put(jax.device_put(k, HOST), DEVICE),
    "as it is": lambda k: k,
}  # fmt: skip


@pytest.mark.parametrize(("what", "impl"), crossed(list(KEYS), ["threefry2x32", "rbg", "unsafe_rbg"], one_in=3))
@pytest.mark.one_in(3)
def test_keys_pass_every_operator(what, impl):
    """Five keys over eight devices."""
    keys = jax.random.split(jax.random.key(7, impl=impl), 5)

    def as_words(results):
        leaves = jax.tree.leaves(results)
        is_key = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
        return [np.asarray(jax.random.key_data(x) if k else x) for x, k in zip(leaves, is_key, strict=True)]

    def f(k):
        return KEYS[what](split(k, 0, 8))

    wanted, jitted = as_words(jax.jit(f)(keys)), gshard.jit(f, mesh=8)
    for place in (keys, jax.device_put(keys, jax.devices()[5]), put(keys, REVERSED), keys):
        for got, want in zip(as_words(jitted(place)), wanted, strict=True):
            if what == "gamma":  # XLA rounds otherwise in arrays of other shapes
                np.testing.assert_allclose(got, want, rtol=1e-6)
            else:
                np.testing.assert_array_equal(got, want)


def weak_and_strong():
    weak = jax.jit(lambda: jnp.broadcast_to(2.0, (8,)))()
    return weak, jnp.asarray(np.arange(8, dtype=np.float32))


WEAK = {
    "itself": lambda x: x,
    "a mark": parts,
    "roll": lambda x: jnp.roll(parts(x), 1),
    "take": lambda x: jnp.take(parts(x), jnp.array([1, 2])),
    "an element": lambda x: parts(x)[3],
    "dynamic_slice": lambda x: lax.dynamic_slice(parts(x), (1,), (2,)),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(parts(x), x[:2], (1,)),
    "concatenate": lambda x: jnp.concatenate([parts(x), x]),
    "pad": lambda x: jnp.pad(parts(x), 1),
    "slice": lambda x: parts(x)[1:5],
    "rev": lambda x: parts(x)[::-1],
    "reshape": lambda x: parts(x).reshape(2, 4),
    "cumlogsumexp": lambda x: lax.cumlogsumexp(parts(x)),
    "cumsum": lambda x: jnp.cumsum(parts(x)),
    "sum": lambda x: parts(x).sum(),
    "sort": lambda x: (jnp.sort(parts(x)), lax.top_k(parts(x), 2), jnp.argmax(parts(x))),
    "numbers": lambda x: (1.0, 2, True, parts(x) * 2),
    "where": lambda x: jnp.where(parts(x) > 0, 1.0, 2.0),
    "cast": lambda x: (parts(x).astype(jnp.float32), x.astype(jnp.float32)),
    "loops": lambda x: (
        lax.scan(lambda c, a: (c + a, a * 2), 0.0, parts(x)),
        lax.while_loop(lambda c: c[0] < 3.0, lambda c: (c[0] + 1.0, c[1] * 2), (0.0, parts(x))),
        lax.cond(x[0] > 0, lambda a: a * 2, lambda a: a, parts(x)),
    ),
    "a scatter": lambda x: parts(x).at[2].set(1.0),
    "beside a callback": lambda x: (2, jnp.full(8, 2.0), jax.pure_callback(np.sin, jax.typeof(x), parts(x))),
    "a gradient": lambda x: jax.grad(lambda x: (parts(x) * x).sum())(x),
}


@pytest.mark.parametrize("what", WEAK)
@pytest.mark.one_in(3)
def test_weak_types_are_those_of_jax(what):
    """So that a number added to a result in bfloat16 stays what it would have been."""
    for x in (*weak_and_strong(), 3.0, 2):
        if not jnp.ndim(x) and what not in ("itself", "numbers"):
            continue
        f = WEAK[what] if jnp.ndim(x) else lambda s: (s, s * 2, jnp.full(8, s), jnp.asarray(s))
        want, jitted = jax.tree.leaves(jax.jit(f)(x)), gshard.jit(f, mesh=8)
        for place in (x, *((jax.device_put(x, jax.devices()[5]), put(x, REVERSED)) if jnp.ndim(x) else ()), x):
            got = jax.tree.leaves(jitted(place))
            assert [(y.dtype, y.weak_type) for y in got] == [(y.dtype, y.weak_type) for y in want]
            for y, z in zip(got, want, strict=True):
                assert (y + jnp.bfloat16(1)).dtype == (z + jnp.bfloat16(1)).dtype
