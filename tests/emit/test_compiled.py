"""Legal programs that XLA refuses, if they are emitted as one would think, compile (``core.xla_workarounds``)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, random
from jax.sharding import PartitionSpec as P

import gshard
from sampled import crossed


def same_in_three_calls(step, f, *args, committed=True):
    want = jax.tree.map(np.asarray, jax.jit(f)(*args))
    for place in (np.asarray, jnp.asarray, lambda x: jax.device_put(x, jax.devices()[2] if committed else None)):
        jax.tree.map(np.testing.assert_array_equal, step(*map(place, args)), want)


def one(p):
    updates = jnp.full((1, 4), jnp.max(p))
    start = p[0, 0].astype(int), p[0, 3].astype(int)
    return gshard.shard(lax.dynamic_update_slice(p, updates, start), P(("x", "y")))


def two_readers(a):
    """What one all-to-all has sent is sent on, and read by two."""
    v = jax.vmap(one, in_axes=2, out_axes=2)(a)
    return jnp.transpose(lax.rev(v, (1,)), (2, 1, 0)), v < 0


EXCHANGES = {
    "two readers": two_readers,
    "scan": lambda a: lax.scan(lambda s, b: (s + 1, two_readers(b)), 0, jnp.stack([a, -a]))[1],
    "vmap": lambda a: jax.vmap(two_readers)(jnp.stack([a, -a])),
}


@pytest.mark.parametrize("name, mesh", crossed(list(EXCHANGES), [{"x": 3, "y": 2}, {"x": 2, "y": 4}], one_in=2))
@pytest.mark.one_in(2)
def test_exchanges_of_what_was_exchanged(name, mesh):
    f, a = EXCHANGES[name], np.arange(-40, 7 * 17 - 40, dtype=np.int32).reshape(1, 7, 17)
    same_in_three_calls(gshard.jit(f, mesh), f, a)


def test_their_gradient():
    a = np.arange(-40, 7 * 17 - 40, dtype=np.float32).reshape(1, 7, 17)

    def loss(a):
        return jnp.sum(two_readers(a)[0] ** 2)

    same_in_three_calls(gshard.jit(jax.grad(loss), {"x": 3, "y": 2}), jax.grad(loss), a)


EMPTY = {
    "a counter": lambda a, b: (a + 1, b + 1, jnp.arange(4)),
    "split": lambda a, b: (gshard.split(a, 1, 3), gshard.split(jnp.arange(7), 0, 3) + a.size, b.sum()),
    "scan": lambda a, b: lax.scan(lambda s, x: (s + 1, x), 0, (a, b)),
    "cond": lambda a, b: lax.cond(b.sum() == 0, lambda: (a + 1, jnp.arange(3)), lambda: (a - 1, jnp.arange(3))),
    "vmap": lambda a, b: jax.vmap(lambda x: (x * 2, jnp.arange(2)), in_axes=1, out_axes=1)(b),
    "keys": lambda a, b: (random.key_data(random.split(random.key(3), (0,))), a * 1, b * 1, random.bits(random.key(0))),
    "constants alone": lambda a, b: (jnp.arange(5), 7),
}


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.one_in(3)
def test_of_empty_arrays(name):
    f, a, b = EMPTY[name], np.zeros((0, 8, 2), np.float16), np.zeros((0, 12, 5), np.float32)
    step = gshard.jit(f, 3)
    same_in_three_calls(step, f, a, b)
    same_in_three_calls(jax.jit(step), f, a, b, committed=False)  # jax.jit takes none of another device
    same_in_three_calls(gshard.jit(f, 3, keep_unused=True), f, a, b)


def test_an_empty_batch_has_a_gradient_of_zeros():
    def loss(w, x):
        return jnp.sum((gshard.split(x, 0, 8) @ w) ** 2) + 1

    w, x = np.ones((4, 3), np.float32), np.zeros((0, 4), np.float32)
    gradient = jax.value_and_grad(loss)
    same_in_three_calls(gshard.jit(gradient, 8), gradient, w, x)
    same_in_three_calls(jax.value_and_grad(gshard.jit(loss, 8)), gradient, w, x)
    nothing = np.zeros((0, 3), np.float32)
    same_in_three_calls(gshard.jit(gradient, 8), gradient, nothing, np.zeros((5, 0), np.float32))
