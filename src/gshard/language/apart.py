"""Apart: what only some devices run.

In a ``shard_map`` that is manual over some axes, a branch is taken, or a loop goes on, on the devices of one position
along these axes and perhaps not on those of another. An XLA collective with groups waits for its own group. A
CollectivePermute is one message pattern of all devices, and waits, on CPU and GPU, for those that never come. So
inside such a branch or loop parts that would be permuted are gathered among the devices that run it, and each takes the
one that it would have been sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.core.mesh import Atoms
from gshard.language.per_device import Rewritten, collective


def apart(f: Callable[..., Sequence[Any]], arrays: Sequence[Any], manual: Collection[str]) -> list[Any]:
    """Runs a per-device function that not all devices run; what it permutes over ``manual`` atoms stays as it is."""
    return _Apart(frozenset(manual)).function(jax.make_jaxpr(lambda *xs: list(f(*xs)))(*arrays))(*arrays)


class _Apart(Rewritten):
    def __init__(self, manual: frozenset[str]):
        self._manual = manual

    def collective(self, eqn: Any, name: str, axes: tuple[Any, ...], operands: list[Any]) -> Sequence[Any]:
        if name == "ppermute" and self._manual.isdisjoint(axes):
            return [_gathered(x, axes, eqn.params["perm"]) for x in operands]
        return collective(eqn.primitive, name, eqn.params, axes, operands)


def _gathered(x: Any, atoms: Atoms, pairs: Sequence[tuple[int, int]]) -> Any:
    """What a device is sent, out of all parts; zeros where that is nothing."""
    sources = np.full(lax.axis_size(atoms), -1, np.int32)
    for source, target in pairs:
        sources[target] = source
    mine = jnp.asarray(sources)[lax.axis_index(atoms)]
    part = lax.dynamic_index_in_dim(lax.all_gather(x, atoms), jnp.maximum(mine, 0), keepdims=False)
    return jnp.where(mine >= 0, part, jnp.zeros_like(x))
