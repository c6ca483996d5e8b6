"""Proves that the plain function of a kernel, run on shards, computes the shards of its results.

Two programs of one device are compared, equation by equation:

* the plain function with each equation run on shards, as its rule says;
* the plain function traced on arrays of a shard's size.

gshard's partitioner makes the first of the plain function, so it computes the shards of the results. If the second is
equal, the plain function itself does so on shards, and so does the fast function, which computes the same on arrays of
any size. A causal mask along a split dimension needs the position of the shard, a mean the number of elements in all, a
softmax the maximum over all shards: each makes the programs differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from gshard.core.errors import GShardError
from gshard.core.jax_adapter import closed, jaxpr_without_dead_code, no_mesh_set
from gshard.core.mesh import Atoms, Mesh
from gshard.core.rule import Rule
from gshard.core.split import Split, result_sharding
from gshard.language.batch import same
from gshard.language.kernel_loops import Step
from gshard.language.on_shards import NotProven, Part, Shard, on_shards


def runs_on_shards(
    plain: Any,
    local: Any,
    steps: Sequence[Step],
    rule: Rule,
    atoms_of_loop: Callable[[int], Atoms],
    mesh: Mesh,
    split: Split,
) -> bool:
    """Whether a function computes the shards of its results from shards of its arguments."""

    def emitted(*shards: Any) -> list[Any]:
        results = on_shards(plain, [Part(x, {}) for x in shards], steps, Shard(mesh, atoms_of_loop))
        for i, part in enumerate(results):
            if dict(part.unreduced) != dict(result_sharding(rule, i, split).unreduced):
                raise NotProven
        return [part.array for part in results]

    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in closed(local)[0].invars]
    try:
        with no_mesh_set():
            first = jax.make_jaxpr(emitted, axis_env=list(mesh.atom_sizes.items()))(*shapes)
    except (NotProven, GShardError):
        return False
    return _same_programs(first, local)


def _same_programs(first: Any, second: Any) -> bool:
    """Whether two closed jaxprs are the same equations on the same constants."""
    (one, some), (other, others) = map(closed, (first, second))
    return (
        len(some) == len(others)
        and all(map(_same_array, some, others))
        and same(*(_constants_as_inputs(jaxpr_without_dead_code(jaxpr)) for jaxpr in (one, other)))
    )


def _constants_as_inputs(jaxpr: Any) -> Any:
    """A jaxpr whose constants, which are compared by value, are inputs."""
    own: dict[str, Any] = {"consts": []} if getattr(jaxpr, "consts", ()) else {}
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars], **own)


def _same_array(x: Any, y: Any) -> bool:
    if x is y or not hasattr(x, "dtype") or jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        return x is y
    return (x.shape, x.dtype) == (y.shape, y.dtype) and np.asarray(x).tobytes() == np.asarray(y).tobytes()
