"""Which device gets which part: two assignments of one tensor to a grid of chips (the paper's figure 10).

Eight chips stand in two rows of four. Parts that hand something to their neighbour should be neighbours there too: a
ring that goes along one row and back along the other is made of single links, while counting through the rows jumps
back at the end of each. The numbers, and the bytes, are the same for every assignment; how far they go is not.

    python examples/device_order.py
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np

import gshard

ROWS, COLUMNS = 512, 256
COUNTED = np.arange(8).reshape(8, 1)
RING = np.array([0, 1, 2, 3, 7, 6, 5, 4]).reshape(8, 1)


def handed_on(x, ids):
    """Each part goes to the next device of the ring, eight times."""
    x = gshard.shard(x, ids)
    for _ in range(8):
        x = gshard.shard(jnp.roll(jnp.tanh(x), ROWS // 8, 0), ids)
    return x


def milliseconds(ids):
    tensor = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)
    found = gshard.explain(lambda x: handed_on(x, ids), tensor, mesh=gshard.Mesh.abstract(chips=8))
    kernels = found.cost("v5e:2x4").kernels
    return found.total_bytes, 1e3 * sum(k.seconds * k.times for k in kernels if k.sent)


x = jax.random.normal(jax.random.key(0), (ROWS, COLUMNS))
for ids in (COUNTED, RING):
    result = gshard.jit(lambda x, ids=ids: handed_on(x, ids), mesh=8)(x)
    assert jnp.allclose(result, handed_on(x, ids), atol=1e-6)
    for part in result.addressable_shards:
        assert part.index[0].start // (ROWS // 8) == int(np.argwhere(ids[:, 0] == part.device.id)[0, 0])

(counted, slow), (ring, fast) = milliseconds(COUNTED), milliseconds(RING)
print(f"counted through: {counted:,} bytes a device, {slow:.3f} ms on the way")
print(f"in a ring:       {ring:,} bytes a device, {fast:.3f} ms on the way, {fast / slow:.2f} of that")
assert counted == ring
assert fast < 0.6 * slow
