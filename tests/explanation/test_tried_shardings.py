"""Other shardings of arguments: each is compiled, and only what costs nothing else is proposed."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from explanation.advised_steps import given
from placed import mesh_of


@pytest.fixture(scope="module")
def mesh():
    return mesh_of(data=2, model=4)


def logits(table, x):
    return jax.nn.logsumexp(x @ table.T, axis=-1).mean()


def step(table, x):
    return table - 0.1 * jax.grad(logits)(table, x)


def test_a_table_that_every_device_holds_is_split(mesh):
    table, x = given(mesh, (32768, 256)), given(mesh, (64, 256), "data")
    found = gshard.explain(jax.jit(step), table, x, machine="h100:1x8")
    advice = found.advise(seconds=200)
    best = next(change for change in advice.changes if change.arguments)
    assert best.text.startswith("table: ")
    assert best.spec == P(("data", "model"), None)
    again = gshard.explain(jax.jit(step), given(mesh, (32768, 256), *best.spec), x, machine="h100:1x8")
    assert (again.total_bytes, again.peak) == (best.figures.sent, best.figures.peak)
    assert again.cost().seconds == pytest.approx(best.figures.seconds)
    assert "table: P(('data', 'model'), None) instead of whole on each device\n    sent" in str(advice)
    assert advice.after.sent <= 1.001 * advice.before.sent  # nothing rises
    assert advice.after.peak <= 1.001 * advice.before.peak
    assert advice.after.seconds <= 1.001 * advice.before.seconds


def test_equal_layers_change_together(mesh):
    def f(ws, x):
        def loss(ws):
            h = x
            for w in ws:
                h = jnp.tanh(h @ w)
            return h.sum()

        return jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws))

    found = gshard.explain(jax.jit(f), [given(mesh, (256, 256))] * 3, given(mesh, (64, 256), "data"))
    layers = [change for change in found.advise(seconds=100).changes if change.text.startswith("ws/*: ")]
    assert layers
    assert all(change.arguments == (0, 1, 2) for change in layers)


def test_an_explanation_keeps_no_array_alive(mesh):
    shapes = given(mesh, (64, 256)), given(mesh, (64, 256), "data")
    found = gshard.explain(jax.jit(step), *(jax.device_put(jnp.ones(s.shape), s.sharding) for s in shapes))
    assert len(found.source.again.leaves) == 2
    assert not any(isinstance(leaf, jax.Array) for leaf in found.source.again.leaves)
    assert found.advise(seconds=0.001).compiled == 1


def test_changes_that_jax_refuses_are_counted(mesh):
    """A function whose jax.jit has shardings of its own takes no others."""
    table, x = given(mesh, (64, 256)), given(mesh, (64, 256), "data")
    jitted = jax.jit(step, in_shardings=(table.sharding, x.sharding))
    advice = gshard.explain(jitted, table, x).advise(seconds=100)
    assert advice.refused > 0
    assert f"JAX or XLA refused {advice.refused} of the programs" in str(advice)


class Both:
    """A function of a library that calls two jitted functions, and lowers itself."""

    def __call__(self, x):
        return jax.jit(jnp.sin)(jax.jit(lambda x: x @ x.T)(x))

    def lower(self, x):
        return jax.jit(self.__call__).lower(x)


def test_a_function_that_calls_several_jitted_ones_is_refused(mesh):
    found = gshard.explain(Both(), given(mesh, (256, 256), "data", "model"))
    with pytest.raises(gshard.ArgumentError, match="Both calls 2 jitted functions: explain one around these"):
        found.advise(seconds=1)
