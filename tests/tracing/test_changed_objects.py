"""What a function changes in an object that is its argument: it is returned, or the function is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gshard

X = np.linspace(-1, 1, 16 * 4, dtype=np.float32).reshape(16, 4)


class Model(nnx.Module):
    """A layer; dropout and a batch normalisation have state of their own."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layer, self.norm, self.dropout = (
            nnx.Linear(4, 4, rngs=rngs),
            nnx.BatchNorm(4, rngs=rngs),
            nnx.Dropout(0.5, rngs=rngs),
        )

    def __call__(self, x):
        return self.dropout(self.norm(self.layer(x)))


def train(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model.layer(x) - x) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def made():
    model = Model()
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


REFUSED = {
    "nnx.jit around it": lambda: nnx.jit(gshard.jit(train, mesh=8))(*made(), X),
    "around nnx.jit": lambda: gshard.jit(nnx.jit(train), mesh=8)(*made(), X),
    "explain": lambda: gshard.explain(train, *made(), X, mesh=8),
    "only some are returned": lambda: gshard.jit(lambda m, o, x: (train(m, o, x), nnx.state(m)), mesh=8)(*made(), X),
    "statistics": lambda: gshard.jit(lambda m, x: m.norm(x), mesh=8)(Model(), X),
    "counter of a key": lambda: gshard.jit(lambda tree: tree["m"].dropout(tree["x"]), mesh=8)({"m": Model(), "x": X}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_changes_that_would_be_lost_are_refused(name):
    with pytest.raises(
        gshard.ArgumentError, match=r"(?s)changes arrays inside.*test_changed_objects.py.*changed: "
    ) as e:
        REFUSED[name]()
    expected = {"statistics": "m.norm.mean", "counter of a key": "tree['m'].dropout.rngs.count"}
    assert expected.get(name, "o.opt_state" if "some" in name else "model.layer.bias") in str(e.value)
    # A copy of random state, or of a counter of steps, would be the same in each step.
    assert ("nnx.clone(model)" in str(e.value)) == (name == "statistics")


def test_a_copy_may_change():
    def dropped(model, x):
        return nnx.clone(model).dropout(x)

    model = Model()
    want = jax.jit(dropped)(model, X)
    run = gshard.jit(dropped, mesh=8)
    for _ in range(3):
        np.testing.assert_array_equal(run(model, X), want)


def evaluated(model):
    model.eval()
    return model


def stepped(model, optimizer, x):
    return train(model, optimizer, x), (model, optimizer)


def emptied(batch):
    batch["y"] = 2 * batch.pop("x")
    return batch["y"]


TAKEN = {
    "inference": (lambda m, x: m(x), lambda: (evaluated(Model()), X)),
    "a gradient": (lambda m, x: nnx.grad(lambda m: m.layer(x).sum())(m), lambda: (Model(), X)),
    "nnx.jit of a gradient": (nnx.jit(nnx.grad(lambda m, x: m.layer(x).sum())), lambda: (Model(), X)),
    "objects returned": (stepped, lambda: (*made(), X)),
    "their state returned": (lambda m, o, x: (train(m, o, x), nnx.state((m, o))), lambda: (*made(), X)),
    "a dictionary": (emptied, lambda: ({"x": X},)),
}


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.one_in(3)
def test_what_is_not_lost(name):
    f, arguments = TAKEN[name]
    found, expected = gshard.jit(f, mesh=8)(*arguments()), jax.jit(f)(*arguments())
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_nnx_jit_around_inference():
    f = nnx.jit(gshard.jit(lambda m, x: m(x), mesh=8))
    np.testing.assert_allclose(f(evaluated(Model()), X), evaluated(Model())(X), rtol=1e-5, atol=1e-6)


def test_objects_that_make_their_arrays_anew():
    """Nothing can be said of an object that computes its arrays whenever it is flattened."""

    @jax.tree_util.register_pytree_node_class
    class Scaled:
        def __init__(self, x):
            self.x = x

        def tree_flatten(self):
            return (self.x if isinstance(self.x, jax.ShapeDtypeStruct) else self.x * 1,), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

    np.testing.assert_array_equal(gshard.jit(lambda s: s.x + 1, mesh=8)(Scaled(jnp.asarray(X))), X + 1)
