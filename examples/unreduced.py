"""Products of unfinished sums: Y = U V W with one small reduction, by a mark or for a whole program.

U and V are split along the dimension that they are multiplied over, so each device has a part of U V. By default gshard
adds the parts up before it multiplies by W: a part could be infinite where the sum is not. Here you say that none is.

    python examples/unreduced.py
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import gshard

rng = np.random.default_rng(0)
u, v, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((256, 1024), (1024, 512), (512, 4)))


def by_default(u, v, w):
    return gshard.replicate(gshard.split(u, 1, "model") @ v @ w)


def marked(u, v, w):
    y = gshard.shard(gshard.split(u, 1, "model") @ v, P(None, None, unreduced={"model"}))  # stays in parts
    return gshard.replicate(y @ w)


def bytes_sent(step, *arguments):
    return gshard.explain(step, *arguments).total_bytes


mesh = {"model": 8}
finished = gshard.jit(by_default, mesh=mesh)
in_parts = gshard.jit(marked, mesh=mesh)
of_finite = gshard.jit(by_default, mesh=mesh, finite=True)
for step in (finished, in_parts, of_finite):
    np.testing.assert_allclose(step(u, v, w), u @ v @ w, rtol=1e-3, atol=1e-2)
assert bytes_sent(in_parts, u, v, w) == bytes_sent(of_finite, u, v, w) == 2 * 256 * 4 * 4 * 7 // 8  # of Y alone
assert bytes_sent(finished, u, v, w) > 50 * bytes_sent(in_parts, u, v, w)


# Gradients that are scaled in each round of a loop are added up once, after it.
def accumulated(w, batches, scale):
    def loss(w, x):
        return scale * jnp.mean(jnp.tanh(gshard.split(x, 0, "model") @ w) ** 2)

    def add(total, x):
        return total + jax.grad(loss)(w, x) / scale, None

    return jax.lax.scan(add, jnp.zeros_like(w), batches)[0]


batches, weights, scale = rng.standard_normal((4, 64, 64)).astype(np.float32), v[:64, :64] / 8, np.float32(1024)
accumulate = gshard.jit(accumulated, mesh=mesh, finite=True)
np.testing.assert_allclose(accumulate(weights, batches, scale), accumulated(weights, batches, scale), atol=1e-5)
assert [(row.kind, row.times) for row in gshard.explain(accumulate, weights, batches, scale).collectives] == [
    ("all_reduce", 1)
]
