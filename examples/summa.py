"""Two-dimensional matrix products by marking three arrays (SUMMA), with the larger operand in parts on request.

Each of three matrices is cut in rows over one axis and in columns over the other, and so is each gradient: nothing is
held twice, as in Optimus' layers. A product gathers rows of parts of one operand and columns of parts of the other.
With ``collective_matmul`` no device ever holds the larger of both: its parts rotate, and each step multiplies with one.

    python examples/summa.py
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import gshard

N = 240
rng = np.random.default_rng(0)
a, b = (rng.integers(-4, 5, (N, N)).astype(np.float32) for _ in range(2))  # whole numbers: sums are exact


def product(a, b):
    a, b = (gshard.shard(x, P("rows", "columns")) for x in (a, b))
    return gshard.shard(a @ b, P("rows", "columns"))


def told(step, *arguments):
    rows = gshard.explain(step, *arguments).collectives
    return sorted((row.kind, row.axes, row.times, row.bytes) for row in rows)


def grid(rows, columns):
    axis_types = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((rows, columns), ("rows", "columns"), axis_types=axis_types)


def temporaries(step, *arguments):
    return step.lower(*arguments).executable.compiled.memory_analysis().temp_size_in_bytes


# SUMMA on 2 x 4 devices: a part is an eighth; three are gathered along the columns, one along the rows.
part = N * N // 8 * 4
summa = gshard.jit(product, mesh=grid(2, 4))
assert (summa(a, b) == a @ b).all()
assert told(summa, a, b) == [("all_gather", "columns", 1, 3 * part), ("all_gather", "rows", 1, part)]

# The same bytes with the larger of both coming by in parts.
rotated = gshard.jit(product, mesh=grid(2, 4), collective_matmul=True)
assert (rotated(a, b) == a @ b).all()
assert told(rotated, a, b) == [("all_gather", "rows", 1, part), ("collective_permute", "columns", 3, 3 * part)]

print(gshard.explain(rotated, a, b))


# The gradients are products of the same kind: their sums rotate, with the same bytes again.
def loss(a, b):
    return jnp.sum(jnp.square(product(a, b) / N))


gradient = jax.grad(loss, (0, 1))
at_once, in_parts = (gshard.jit(gradient, mesh=grid(2, 4), collective_matmul=w) for w in (False, True))
for ours, theirs in zip(in_parts(a, b), gradient(a, b), strict=True):
    assert jnp.allclose(ours, theirs, rtol=1e-4, atol=1e-4)
sent, usual = (gshard.explain(step, a, b).bytes_by_kind for step in (in_parts, at_once))
assert "collective_permute" in sent
assert sum(sent.values()) == sum(usual.values())

print(f"\ntemporary memory of a device: {temporaries(summa, a, b):,} bytes with gathers,", end=" ")
print(f"{temporaries(rotated, a, b):,} with one operand in parts, of matrices of {a.nbytes:,}")
