"""Runs a per-device program over the axes of the user's mesh instead of over atoms.

    psum over ("c.0",) of an axis c=4        psum over ("c",), axis_index_groups=[[0, 2], [1, 3]]

Inside of ``jax.shard_map`` only the axes of the user's mesh have names. A collective over all atoms of some axes
becomes a collective over these axes. A collective over a part of an axis runs in groups of the devices along the axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.core.errors import RuleError
from gshard.core.jax_adapter import bind, user_line
from gshard.core.mesh import Atoms, Mesh
from gshard.core.sharding import Sharding
from gshard.language.per_device import Rewritten, check_known


class OverAxes(Rewritten):
    """Converts each collective over atoms to one over the axes of the mesh that contain these atoms."""

    def __init__(self, mesh: Mesh):
        self._mesh = mesh

    def collective(self, eqn: Any, name: str, axes: tuple[Any, ...], operands: list[Any]) -> Sequence[Any]:
        """Runs the collective over axes."""
        check_known(eqn, name, axes)
        along, groups = axes_and_groups(axes, self._mesh)
        if name == "axis_index":
            return [_index(along, groups)]
        key = "axes" if "axes" in eqn.params else "axis_name"
        params = {**eqn.params, key: along}
        if groups is None:
            return bind(eqn.primitive, params, operands)
        if params.get("axis_index_groups"):
            what = f"'{name}' in groups over a part of an axis cannot run inside of another jax.shard_map."
            raise RuleError(what, user_line(eqn.source_info), hint="Leave axis_index_groups out, or run it outside.")
        if name == "ppermute":
            # JAX 0.10 counts the positions of a ppermute in the order of the mesh, for any order of the named axes.
            assert list(axes) == [a for a in self._mesh.atoms if a in axes]
            moves = tuple((int(group[i]), int(group[j])) for group in groups for i, j in params["perm"])
            return bind(eqn.primitive, {**params, "perm": moves}, operands)
        return bind(eqn.primitive, {**params, "axis_index_groups": tuple(map(tuple, groups.tolist()))}, operands)

    def cut(self, x: Any, have: Sharding, wanted: Sharding) -> Any:
        """Splits an array further."""
        for d, (present_atoms, atoms) in enumerate(zip(have.dims, wanted.dims, strict=True)):
            if further_atoms := atoms[len(present_atoms) :]:
                size = x.shape[d] // self._mesh.count(further_atoms)
                position = _index(*axes_and_groups(further_atoms, self._mesh))
                x = lax.dynamic_slice_in_dim(x, position * size, size, d)
        return x


def axes_and_groups(atoms: Atoms, mesh: Mesh) -> tuple[tuple[str, ...], np.ndarray | None]:
    """The axes that contain atoms, in the order of the mesh, and the groups of positions along these axes.

    The groups are None if all positions form one group, in order.

    >>> axes_and_groups(("c.0",), Mesh.abstract(a=2, c=4))
    (('c',), array([[0, 2],
           [1, 3]]))
    >>> axes_and_groups(("a", "c.0", "c.1"), Mesh.abstract(a=2, c=4))
    (('a', 'c'), None)
    """
    axes = tuple(name for name, atoms_of_axis in mesh.atoms_of.items() if any(a in atoms_of_axis for a in atoms))
    all_atoms = tuple(a for name in axes for a in mesh.atoms_of[name])
    if all_atoms == tuple(atoms):
        return axes, None
    sizes = [mesh.atom_sizes[a] for a in all_atoms]
    positions = np.arange(int(np.prod(sizes))).reshape(sizes)
    within = [all_atoms.index(a) for a in atoms]
    between = [i for i in range(len(all_atoms)) if i not in within]
    return axes, positions.transpose(*between, *within).reshape(-1, int(np.prod([sizes[i] for i in within])))


def _index(axes: tuple[str, ...], groups: np.ndarray | None) -> Any:
    """The position of a device in its group."""
    index = lax.axis_index(axes)
    if groups is None:
        return index
    index_in_group = np.empty(groups.size, np.int32)
    index_in_group[groups.ravel()] = np.tile(np.arange(groups.shape[1]), groups.shape[0])
    return jnp.asarray(index_in_group)[index]
