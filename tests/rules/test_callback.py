"""Callbacks: what the host sees, how often, in which order, and what comes back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import gshard
from gshard.testing.rule_checks import emitted, reported

X = np.random.default_rng(6).standard_normal((7, 4)).astype(np.float32)


class Host:
    """Notes what it is called with, and doubles it."""

    def __init__(self):
        self.calls = []

    def __call__(self, x):
        self.calls.append(np.array(x))
        return np.asarray(x) * 2

    def tell(self, x):
        self(x)


def like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def run(f, *args):
    found = jax.block_until_ready(gshard.jit(f, mesh=8)(*args))
    jax.effects_barrier()
    return found


def test_a_pure_callback_sees_the_whole_array_on_every_device():
    host = Host()
    result = run(lambda x: jax.pure_callback(host, like(x), gshard.split(x, 0, 8)) + 1, X)
    np.testing.assert_array_equal(result, X * 2 + 1)
    assert all((call == X).all() for call in host.calls)
    assert len(host.calls) == 8


@pytest.mark.parametrize("ordered", [False, True])
def test_an_io_callback_is_called_once_and_everybody_gets_what_it_returns(ordered):
    host = Host()

    def f(x):
        doubled = io_callback(host, like(x), gshard.split(x, 0, 8), ordered=ordered)
        return gshard.split(doubled, 1, 4) + 1

    np.testing.assert_array_equal(run(f, X), X * 2 + 1)
    assert len(host.calls) == 1
    np.testing.assert_array_equal(host.calls[0], X)


@pytest.mark.parametrize("x", [
    np.array([-0.0, np.nan, np.inf, 1e-45], np.float32), np.array([1 - 0j, complex(-0.0, np.nan)], np.complex64),
    np.array([True, False]), np.array([-128, 127], np.int8), np.array([2**32 - 1], np.uint32),
    jnp.array([-0.0, 3, np.nan], jnp.bfloat16), np.zeros((0, 3), np.float32), np.int32(-5),
])  # fmt: skip
def test_what_is_handed_to_the_others_keeps_its_bits(x):
    got = run(lambda x: io_callback(lambda x: x, like(x), x), x)
    assert got.dtype == x.dtype
    assert np.asarray(got).tobytes() == np.asarray(x).tobytes()


def test_results_of_an_io_callback_are_what_explain_says_is_sent():
    f = lambda x: io_callback(lambda x: x, like(x), x)  # noqa: E731
    found = gshard.explain(f, X, mesh=8)
    assert (found.bytes_by_kind, found.lists["gathered"]) == ({"all_reduce": 2 * X.nbytes * 7 // 8}, ())
    spmd = gshard.jit(f, mesh=8).lower(X).spmd
    assert emitted(spmd.jaxpr, spmd.mesh.atom_sizes) == reported(spmd.collectives)


def test_io_callbacks_keep_their_order():
    seen = []

    def f(x):
        x = gshard.split(x, 0, 8)
        for i in range(6):
            io_callback(lambda _, i=i: seen.append(i), None, x[i], ordered=True)
        return x

    run(f, X)
    assert seen == [0, 1, 2, 3, 4, 5]


def test_prints_come_once(capfd):
    def f(x):
        jax.debug.print("sum of {n} numbers", n=(gshard.split(x, 0, 8) > -99).sum())
        return x * 2

    run(f, X)
    assert capfd.readouterr().out.count("sum of 28 numbers") == 1


def test_partitioned_ones_see_every_part():
    host = Host()

    def f(x):
        x = gshard.split(x * 1, 0, 8)
        jax.debug.callback(host.tell, x, partitioned=True)
        return x

    run(f, X[:, :2])
    assert len(host.calls) == 8
    rows = sorted(tuple(call.ravel().tolist()) for call in host.calls)
    assert rows == sorted([*(tuple(row) for row in X[:, :2].tolist()), (0.0, 0.0)])  # the eighth part is padding


@pytest.mark.parametrize("count", [0, 3])
def test_in_loops_and_branches(count):
    host, counted = Host(), []

    def f(x):
        def step(carry, i):
            more = io_callback(host, like(carry), carry, ordered=True)
            more = jax.lax.cond(i % 2 == 0, lambda y: y, lambda y: io_callback(host, like(y), y, ordered=True), more)
            return more, None

        def again(state):
            jax.debug.callback(lambda n: counted.append(int(n)), state[0])
            return state[0] + 1, state[1]

        x, _ = jax.lax.scan(step, gshard.split(x, 0, 8), jnp.arange(count))
        return jax.lax.while_loop(lambda s: s[0] < count, again, (0, x))[1]

    result = run(f, X)
    doubled = count + count // 2
    np.testing.assert_array_equal(result, X * 2**doubled)
    assert len(host.calls) == doubled
    for i, call in enumerate(host.calls):
        np.testing.assert_array_equal(call, X * 2**i)
    assert sorted(counted) == list(range(count))


def test_an_order_that_jax_does_not_keep_is_refused():
    for tell in (
        lambda x: jax.debug.print("{x}", x=x, ordered=True),
        lambda x: jax.debug.callback(lambda x: None, x, ordered=True),
    ):

        def f(x, tell=tell):
            tell(x)
            return x

        with pytest.raises(gshard.PlanError, match=r"ordered=True[^$]*at test_callback.py[^$]*io_callback"):
            run(f, X)
        gshard.jit(f, mesh=1)(X)
    jax.effects_barrier()


@pytest.mark.parametrize("callback", [io_callback, jax.pure_callback])
def test_the_device_that_calls_can_be_named(callback):
    host, named = Host(), jax.sharding.SingleDeviceSharding(jax.devices()[3])
    f = gshard.jit(lambda x: callback(host, like(x), gshard.split(x, 0, 8), sharding=named) + 1, mesh=8)
    np.testing.assert_array_equal(f(X), X * 2 + 1)
    assert len(host.calls) == 1
    with pytest.raises(gshard.GShardError, match="does not name one device of the mesh") as told:
        gshard.jit(lambda x: callback(host, like(x), x, sharding=named), mesh=2)(X)
    assert "test_callback.py" in str(told.value)


def test_a_callback_in_a_shard_map_cannot_name_its_device():
    named = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def body(x):
        return io_callback(lambda x: x, like(x), x, sharding=named)

    f = jax.shard_map(body, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))
    with pytest.raises(gshard.GShardError, match="inside a shard_map cannot name the device that calls"):
        gshard.jit(f, mesh=mesh)(np.ones((16,), np.float32))
