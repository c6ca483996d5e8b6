"""Parts that move around a ring reach every device, and sums for them return."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from gshard.comm.rotation import Rotation
from gshard.comm.shards import Shards
from gshard.core.mesh import Mesh
from gshard.tracing.trace import trace


def on_ring(parts: int, run: Any, x: np.ndarray) -> tuple[np.ndarray, int]:
    """What ``run(rotation, part)`` returns on a ring of devices, joined, and the bytes that it notes."""
    mesh, sent = Mesh.abstract(ring=parts), []

    def note(kind: str, atoms: Any, count: int, x: Any, times: int = 1) -> None:
        sent.append(count * times)

    shards = Shards(trace(jnp.sin, x).block.equations[0], {}, mesh, note)
    sizes = tuple(mesh.atom_sizes.values())
    devices = jax.sharding.Mesh(np.array(jax.devices()[:parts]).reshape(sizes), mesh.atoms)
    rotation = Rotation(shards, mesh.atoms)
    spec = P(mesh.atoms)
    f = jax.shard_map(lambda x: run(rotation, x), mesh=devices, in_specs=spec, out_specs=spec, check_vma=False)
    return np.asarray(jax.jit(f)(x)), sum(sent)


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_zigzag_pairs_both_ends(parts: int) -> None:
    x = np.arange(4 * parts, dtype=np.float32)
    halves = x.reshape(2 * parts, 2)
    want = np.concatenate([halves[[d, 2 * parts - 1 - d]].ravel() for d in range(parts)])
    found, sent = on_ring(parts, lambda ring, x: ring.zigzag(x, 0), x)
    np.testing.assert_array_equal(found, want)
    assert sent == 16
    back, _ = on_ring(parts, lambda ring, x: ring.unzigzag(ring.zigzag(x, 0), 0), x)
    np.testing.assert_array_equal(back, x)


@pytest.mark.parametrize("parts", [2, 3, 8])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("fewer", [0, 1])
@pytest.mark.one_in(3)
def test_every_device_uses_the_parts_that_pass(parts: int, sign: int, fewer: int) -> None:
    """The state is a sum of the parts, each with a weight by its distance; sums get the visitors."""
    steps, x = parts - 1 - fewer, np.arange(1, parts + 1, dtype=np.float32)

    def run(ring: Rotation, x: Any) -> Any:
        def use(state: Any, passing: list[Any], j: Any) -> Any:
            own = jax.lax.axis_index(ring.atoms).astype(jnp.float32)
            right = passing[0][0] == ring.behind(j) + 1
            return state + jnp.where(right, 10.0 ** jnp.abs(j), jnp.nan), [jnp.full_like(passing[0], own + 1)]

        state, sums = ring.run([x], jnp.zeros_like(x), steps, use, sign=sign, sums=True)
        return jnp.stack([state, *(sums or [jnp.zeros_like(x)])], axis=1)

    found, sent = on_ring(parts, run, x)
    np.testing.assert_allclose(found[:, 0], sum(10.0**j for j in range(1, steps + 1)))
    visitors = [sum((d + sign * j) % parts + 1 for j in range(1, steps + 1)) for d in range(parts)]
    np.testing.assert_array_equal(found[:, 1], np.float32(visitors))
    assert sent == 2 * steps * 4
