"""Replaces permutes in code that only some devices execute.

In a ``shard_map`` that is manual over some axes, devices at different positions along these axes may take different
branches, or run different numbers of iterations. An XLA collective with groups waits for the devices of its group only.
But a CollectivePermute is one message pattern of all devices. On CPU and GPU it also waits for devices that never run
it. So inside such a branch or loop, gshard gathers the parts among the devices that run it, and each device selects the
part that the permute would have sent to it.
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
    """Runs a per-device function that only some devices run. Permutes over ``manual`` atoms stay unchanged."""
    return _Apart(frozenset(manual)).function(jax.make_jaxpr(lambda *xs: list(f(*xs)))(*arrays))(*arrays)


class _Apart(Rewritten):
    def __init__(self, manual: frozenset[str]):
        self._manual = manual

    def collective(self, eqn: Any, name: str, axes: tuple[Any, ...], operands: list[Any]) -> Sequence[Any]:
        if name == "ppermute" and self._manual.isdisjoint(axes):
            return [_gathered(x, axes, eqn.params["perm"]) for x in operands]
        return collective(eqn.primitive, name, eqn.params, axes, operands)

    def constraint(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        return operands  # the plan already satisfies the mark


def _gathered(x: Any, atoms: Atoms, pairs: Sequence[tuple[int, int]]) -> Any:
    """The result of a permute, by an all-gather over the atoms in which senders and receivers differ.

    A device to which the permute sends nothing gets zeros.
    """
    sizes = {a: lax.axis_size(a) for a in atoms}
    gathered_atoms = moved_over(pairs, sizes)
    gathered_dims = [i for i, a in enumerate(atoms) if a in gathered_atoms]
    shape = tuple(sizes.values())
    gathered_shape = [shape[i] for i in gathered_dims]
    sources = np.full(math.prod(shape), -1, np.int32)  # -1: the device receives nothing
    for source, target in pairs:
        position = [int(n) for n in np.unravel_index(source, shape)]
        if gathered_dims:
            sources[target] = np.ravel_multi_index([position[i] for i in gathered_dims], gathered_shape)
        else:
            sources[target] = 0
    own_source = jnp.asarray(sources)[lax.axis_index(atoms)]
    part = x
    if gathered_atoms:
        parts = lax.all_gather(x, gathered_atoms)
        part = lax.dynamic_index_in_dim(parts, jnp.maximum(own_source, 0), keepdims=False)
    return jnp.where(own_source >= 0, part, jnp.zeros_like(x))


def moved_over(pairs: Sequence[tuple[int, int]], sizes: Mapping[str, int]) -> Atoms:
    """The atoms along which the source and the target of any pair have different positions.

    >>> moved_over([(0, 1), (2, 3)], {"x": 2, "y": 2})
    ('y',)
    """
    positions = np.array(np.unravel_index(np.asarray(pairs, np.int64).reshape(-1, 2), tuple(sizes.values())))
    return tuple(a for a, along in zip(sizes, positions, strict=True) if (along[:, 0] != along[:, 1]).any())
