"""Runs the parts of a program that only some devices execute.

In a ``shard_map`` that is manual over some axes, a branch is taken, or a loop goes on, on the devices of one position
along these axes and perhaps not on those of another. An XLA collective with groups waits for its own group. A
CollectivePermute is one message pattern of all devices, and waits, on CPU and GPU, for those that never come. So
inside such a branch or loop parts that would be permuted are gathered among the devices that run it, and each takes the
one that it would have been sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.core.mesh import Atoms
from gshard.language.per_device import Rewritten, collective


def apart(f: Callable[..., Sequence[Any]], arrays: Sequence[Any], manual: Collection[str]) -> list[Any]:
    """Runs a per-device function that not all devices run; permutes over ``manual`` atoms stay unchanged."""
    return _Apart(frozenset(manual)).function(jax.make_jaxpr(lambda *xs: list(f(*xs)))(*arrays))(*arrays)


class _Apart(Rewritten):
    def __init__(self, manual: frozenset[str]):
        self._manual = manual

    def collective(self, eqn: Any, name: str, axes: tuple[Any, ...], operands: list[Any]) -> Sequence[Any]:
        if name == "ppermute" and self._manual.isdisjoint(axes):
            return [_gathered(x, axes, eqn.params["perm"]) for x in operands]
        return collective(eqn.primitive, name, eqn.params, axes, operands)

    def constraint(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        return operands  # a mark, which has been obeyed


def _gathered(x: Any, atoms: Atoms, pairs: Sequence[tuple[int, int]]) -> Any:
    """What a device is sent, out of the parts of those from which any could come; zeros where that is nothing."""
    sizes = {a: lax.axis_size(a) for a in atoms}
    over = moved_over(pairs, sizes)
    among = [i for i, a in enumerate(atoms) if a in over]
    shape = tuple(sizes.values())
    sources = np.full(math.prod(shape), -1, np.int32)
    for source, target in pairs:
        place = [int(n) for n in np.unravel_index(source, shape)]
        sources[target] = np.ravel_multi_index([place[i] for i in among], [shape[i] for i in among]) if among else 0
    mine = jnp.asarray(sources)[lax.axis_index(atoms)]
    part = lax.dynamic_index_in_dim(lax.all_gather(x, over), jnp.maximum(mine, 0), keepdims=False) if over else x
    return jnp.where(mine >= 0, part, jnp.zeros_like(x))


def moved_over(pairs: Sequence[tuple[int, int]], sizes: Mapping[str, int]) -> Atoms:
    """The atoms in which source and target of any pair differ.

    >>> moved_over([(0, 1), (2, 3)], {"x": 2, "y": 2})
    ('y',)
    """
    places = np.array(np.unravel_index(np.asarray(pairs, np.int64).reshape(-1, 2), tuple(sizes.values())))
    return tuple(a for a, own in zip(sizes, places, strict=True) if (own[:, 0] != own[:, 1]).any())
