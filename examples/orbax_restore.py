"""Results of gshard.jit are JAX arrays: Orbax saves them split, and restores them onto any other mesh.

The weights of a step on eight devices in one axis are saved, and restored on four by two, cut along the other
dimension too. No part of a weight is put together on the way.

    python examples/orbax_restore.py
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gshard

B, M, H = 512, 64, 256
eight = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
four_by_two = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def loss(params, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ params["w1"]) @ params["w2"] - x))


def step(params, x):
    """The shardings of the arguments are the marks: the weights as they were saved or restored."""
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


keys = jax.random.split(jax.random.key(0), 3)
params = {"w1": jax.random.normal(keys[0], (M, H)) / M**0.5, "w2": jax.random.normal(keys[1], (H, M)) / H**0.5}
x = jax.random.normal(keys[2], (B, M))

split = jax.device_put(params, NamedSharding(eight, P("data")))
trained, _ = gshard.jit(step, mesh=eight)(split, x)
assert trained["w1"].sharding.shard_shape((M, H)) == (M // 8, H)


def restored(folder, shardings):
    """What is saved there, on the devices that ``shardings`` name."""
    like = jax.tree.map(lambda w, s: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=s), trained, shardings)
    return checkpointer.restore(folder, like)


with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(Path(folder) / "step1", trained)
    checkpointer.wait_until_finished()
    same = restored(Path(folder) / "step1", jax.tree.map(lambda w: w.sharding, trained))
    both = {"w1": NamedSharding(four_by_two, P("data", "model")), "w2": NamedSharding(four_by_two, P("model", "data"))}
    other = restored(Path(folder) / "step1", both)

for name, w in trained.items():
    np.testing.assert_array_equal(same[name], w)
    np.testing.assert_array_equal(other[name], w)
    assert same[name].sharding == w.sharding
    assert other[name].sharding == both[name]
    print(f"{name}: saved as {w.sharding.spec}, restored as {other[name].sharding.spec}")

_, expected = jax.jit(step)(jax.device_get(trained), x)
for mesh, weights in ((eight, same), (four_by_two, other)):
    again, value = gshard.jit(step, mesh=mesh)(weights, x)
    assert jnp.allclose(value, expected, rtol=1e-5)
    assert all(again[name].sharding == w.sharding for name, w in weights.items())
    print(f"on {dict(mesh.shape)}: loss {value:.4f}")
