"""Equinox: a module holds arrays and what is none; ``eqx.filter_jit`` in ``gshard.instead_of_jit`` separates them.

Activation functions and rates of dropout are part of the program; a module with others is another program. Gradients
and updates are filtered inside as ever, and the new module comes back whole. With ``gshard.jit``, ``eqx.partition`` the
module outside and ``eqx.combine`` it inside.

    python examples/equinox_modules.py
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import gshard

DEVICES, B, M, H = 8, 512, 32, 128
sgd = optax.sgd(0.5)


class Classifier(eqx.Module):
    """Two layers; ``act`` is a leaf that is no array, and so are the rate of dropout and whether it is on."""

    first: eqx.nn.Linear
    second: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    act: object

    def __call__(self, x, key):
        return self.second(self.dropout(self.act(self.first(x)), key=key))


def loss(model, x, keys):
    return jnp.mean(jnp.square(jax.vmap(model)(x, keys) - x))


def step(model, opt_state, x, keys):
    """One step, its batch split."""
    x, keys = gshard.split((x, keys), 0, DEVICES)
    value, grads = eqx.filter_value_and_grad(loss)(model, x, keys)
    updates, opt_state = sgd.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, value


keys = jax.random.split(jax.random.key(0), 3)
model = Classifier(eqx.nn.Linear(M, H, key=keys[0]), eqx.nn.Linear(H, M, key=keys[1]), eqx.nn.Dropout(0.1), jax.nn.gelu)
x, keys = jax.random.normal(keys[2], (B, M)), jax.random.split(keys[2], B)

on_one = eqx.filter_jit(step)
on_eight = gshard.instead_of_jit(DEVICES)(eqx.filter_jit(step))
ours = theirs = (model, sgd.init(eqx.filter(model, eqx.is_array)))
for _ in range(3):
    *ours, value = on_eight(*ours, x, keys)
    *theirs, expected = on_one(*theirs, x, keys)
    assert jnp.allclose(value, expected, rtol=1e-5)
    print(f"loss {value:.4f}")
assert ours[0].act is jax.nn.gelu

# The same with the arrays alone as an argument.
arrays, rest = eqx.partition(theirs[0], eqx.is_array)
evaluate = gshard.jit(
    lambda arrays, x: jax.vmap(eqx.nn.inference_mode(eqx.combine(arrays, rest)))(x, keys), mesh=DEVICES
)
assert jnp.allclose(evaluate(arrays, x), jax.vmap(eqx.nn.inference_mode(theirs[0]))(x, keys), atol=1e-5)

told = gshard.explain(eqx.filter_jit(step), *ours, x, keys, mesh=DEVICES)
print(f"sent by each device in one step: {told.bytes_by_kind}")
summed = sum(w.nbytes for w in jax.tree.leaves(arrays)) + 4  # gradients and the loss: no more than to all-reduce them
assert told.total_bytes == 2 * summed * (DEVICES - 1) // DEVICES
