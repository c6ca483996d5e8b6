"""Other shardings of arguments: each is compiled, and only what costs nothing else is proposed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gshard

P = PartitionSpec


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))


def given(mesh, shape, *spec):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))


def logits(table, x):
    return jax.nn.logsumexp(x @ table.T, axis=-1).mean()


def step(table, x):
    return table - 0.1 * jax.grad(logits)(table, x)


def test_a_table_that_every_device_holds_is_split(mesh):
    table, x = given(mesh, (32768, 256)), given(mesh, (64, 256), "data")
    found = gshard.explain(jax.jit(step), table, x, machine="h100:1x8")
    tried = found.try_shardings(seconds=200)
    assert tried.tried == tried.changes
    best = tried.helping[0]
    assert best.text.startswith("table: ")
    assert best.spec == P(("data", "model"), None)
    again = gshard.explain(jax.jit(step), given(mesh, (32768, 256), *best.spec), x, machine="h100:1x8")
    assert (again.total_bytes, again.peak) == (best.figures.sent, best.figures.peak)
    assert again.cost().seconds == pytest.approx(best.figures.seconds)
    assert "table: P(('data', 'model'), None) instead of whole on each device\n    sent" in str(tried)
    for change in (*tried.helping, *tried.together[0]):  # nothing that helps raises anything
        assert change.figures.sent <= 1.001 * tried.before.sent
        assert change.figures.peak <= 1.001 * tried.before.peak
        assert change.figures.seconds <= 1.001 * tried.before.seconds


def test_equal_layers_change_together(mesh):
    def f(ws, x):
        def loss(ws):
            h = x
            for w in ws:
                h = jnp.tanh(h @ w)
            return h.sum()

        return jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws))

    found = gshard.explain(jax.jit(f), [given(mesh, (256, 256))] * 3, given(mesh, (64, 256), "data"))
    tried = found.try_shardings(seconds=0.001)
    assert tried.tried == 1, "one is compiled in any case"
    assert tried.changes > 1
    assert "1 of" in str(tried)
    every = found.try_shardings(seconds=300)
    layers = [change for change in every.helping if change.text.startswith("ws/*: ")]
    assert layers
    assert all(change.arguments == (0, 1, 2) for change in layers)


def test_an_explanation_keeps_no_array_alive_and_tries_nothing_without_time(mesh):
    shapes = given(mesh, (64, 256)), given(mesh, (64, 256), "data")
    found = gshard.explain(jax.jit(step), *(jax.device_put(jnp.ones(s.shape), s.sharding) for s in shapes))
    assert len(found.source.again.leaves) == 2
    assert not any(isinstance(leaf, jax.Array) for leaf in found.source.again.leaves)
    assert found.try_shardings(seconds=0.001).tried == 1
    assert found.try_shardings(seconds=0).tried == 0
    with pytest.raises(gshard.ArgumentError, match="compiled elsewhere"):
        gshard.explain(jax.jit(step).lower(*shapes).compile()).try_shardings()


def test_changes_that_jax_refuses_are_counted(mesh):
    """A function whose jax.jit has shardings of its own takes no others."""
    table, x = given(mesh, (64, 256)), given(mesh, (64, 256), "data")
    tried = gshard.explain(jax.jit(step, in_shardings=(table.sharding, x.sharding)), table, x).try_shardings(
        seconds=100
    )
    assert tried.refused == tried.tried > 0
    assert f"JAX or XLA refused {tried.refused} of them" in str(tried)


class Both:
    """A function of a library that calls two jitted functions, and lowers itself."""

    def __call__(self, x):
        return jax.jit(jnp.sin)(jax.jit(lambda x: x @ x.T)(x))

    def lower(self, x):
        return jax.jit(self.__call__).lower(x)


@pytest.mark.parametrize("ask", ["try_shardings", "try_constraints"])
def test_a_function_that_calls_several_jitted_ones_is_refused(mesh, ask):
    found = gshard.explain(Both(), given(mesh, (256, 256), "data", "model"))
    with pytest.raises(gshard.ArgumentError, match="Both calls 2 jitted functions: explain one around these"):
        getattr(found, ask)(seconds=1)
