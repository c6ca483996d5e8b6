"""Returned: the results that JAX cannot hold in the shards that the plan gives them.

A ``jax.Array`` has equal shards, and a ``NamedSharding`` on the user's mesh splits over whole axes. A result that is
split otherwise inside is returned in fewer shards, or replicated (``planning.io_shardings``), and each is listed.
"""

from __future__ import annotations

from collections.abc import Iterator

from gshard.core.plan import Plan, local_bytes
from gshard.core.program import Value, format_bytes
from gshard.core.sharding import Sharding
from gshard.core.uneven import cut_evenly
from gshard.naming.array_names import ArrayNames


def returned_in_fewer_shards(plan: Plan, names: ArrayNames | None = None) -> tuple[str, ...]:
    """A line for each such result: its sharding inside and as returned, the bytes on a device, and what avoids it."""
    return tuple(dict.fromkeys(_rows(plan, names)))


def _rows(plan: Plan, names: ArrayNames | None) -> Iterator[str]:
    mesh, block = plan.mesh, plan.program.block
    for i, (v, leave) in enumerate(zip(block.outputs, plan.leave, strict=True)):
        if not isinstance(v, Value):
            continue
        inside = Sharding(plan.sharding(v).dims)
        even = cut_evenly(inside, v.shape, mesh)
        if leave == inside or (even == inside and mesh.spec_of(inside.dims) is not None):
            continue
        if mesh.count(_atoms(leave)) >= mesh.count(_atoms(inside)):
            continue
        names = names or ArrayNames(plan.program)
        what = names.array(v).alike or f"result {i}"
        shown = [s.format(mesh, v.shape, v.dtype_name) for s in (inside, leave)]
        sizes = [format_bytes(local_bytes(v, s, mesh)) for s in (inside, leave)]
        way = (
            'uneven="keep" returns the uneven shards'
            if even != inside
            else "to keep the shards, make this part of the axis an axis of the mesh"
        )
        yield f"{what}: {shown[0]} inside ({sizes[0]} a device), {shown[1]} returned ({sizes[1]}); {way}"


def _atoms(sharding: Sharding) -> tuple[str, ...]:
    return tuple(a for atoms in sharding.dims for a in atoms)
