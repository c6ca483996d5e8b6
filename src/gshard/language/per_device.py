"""Per-device programs of the user's, run inside ours: their axis names become the atoms of our mesh.

A collective over the user's axis ``expert`` of size 4 is one over the atoms ``("expert.0", "expert.1")``: the same
devices in the same order. Everything else of the body stays as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from gshard.comm.collectives import KINDS
from gshard.comm.local import slice_part
from gshard.core.errors import RuleError
from gshard.core.jax_adapter import bind, called_jaxpr, closed, user_line
from gshard.core.jax_adapter_context import context_of, in_context
from gshard.core.jax_adapter_kernels import kernel_as_traced_here
from gshard.core.memory_kinds import is_on_host, shape_in_memory
from gshard.core.mesh import Atoms

AtomsOf = Mapping[str, Atoms]

_WITH_MESH = (Jaxpr, ClosedJaxpr, jax.core.ShapedArray)

# What JAX writes where it keeps track of which values vary over which axes; we do not.
_INVARIANT = {"psum_invariant": "psum", "all_gather_invariant": "all_gather", "all_gather_reduced": "all_gather"}
_NOTHING = ("pvary", "pcast", "preduced", "vary_unreduced_cast", "reduced_vary_cast", "reshard", "mesh_cast")


def renamed(jaxpr: Any, atoms_of: AtomsOf) -> Callable[..., list[Any]]:
    """The function of a per-device jaxpr, with every axis replaced by its atoms."""
    body, consts = closed(jaxpr)

    def run(*arrays: Any) -> list[Any]:
        env: dict[Any, Any] = dict(zip(body.constvars, consts, strict=True))
        env.update(zip(body.invars, arrays, strict=True))

        def read(v: Any) -> Any:
            # JAX's own literals remember the user's mesh.
            return np.asarray(v.val, jax.typeof(v.val).dtype) if isinstance(v, Literal) else env[v]

        for eqn in body.eqns:
            with in_context(context_of(eqn)):
                results = _equation(eqn, [read(v) for v in eqn.invars], atoms_of)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in body.outvars]

    return run


def _equation(eqn: Any, operands: list[Any], atoms_of: AtomsOf) -> Sequence[Any]:
    name = eqn.primitive.name
    if name in _NOTHING:
        return operands
    if name == "shard_map":
        return _inner(eqn, operands, atoms_of)
    if name in ("io_callback", "pure_callback") and eqn.params.get("sharding") is not None:
        raise RuleError(
            f"'{name}' inside a shard_map cannot name the device that calls.",
            user_line(eqn.source_info),
            f"sharding={eqn.params['sharding']}",
            "Leave sharding= out: every device calls, with its own part.",
        )
    if name in ("custom_jvp_call", "custom_vjp_call"):
        return renamed(called_jaxpr(eqn), atoms_of)(*operands)
    if name == "custom_partitioning":  # on a device's part JAX, too, runs the function itself
        return renamed(eqn.params["call"], atoms_of)(*operands)
    # A sharding that JAX wrote down names the user's axes; on a device's part it means nothing.
    params = {
        key: None if key in ("sharding", "out_sharding") else _renamed_body(value, atoms_of)
        for key, value in eqn.params.items()
    }
    key = next((k for k in ("axes", "axis_name") if k in params), None)
    axes = () if key is None else _names(params[key])
    if key is None or not any(isinstance(a, str) for a in axes):
        return bind(eqn.primitive, params, operands)
    atoms = tuple(b for a in axes for b in (atoms_of[a] if isinstance(a, str) else (a,)))
    if name == "axis_index":
        return [lax.axis_index(atoms) if atoms else jnp.zeros((), jnp.int32)]
    if name in ("psum", "psum_invariant") and not params.get("axis_index_groups"):
        return [lax.psum(x, atoms) for x in operands] if atoms else operands
    if not atoms:
        return _alone(eqn, operands)
    if _INVARIANT.get(name) == "all_gather":
        (x,) = operands
        return [lax.all_gather(x, atoms, axis=params["all_gather_dimension"], tiled=params["tiled"])]
    if name not in KINDS:
        raise RuleError(f"'{name}' inside a shard_map is not known.", user_line(eqn.source_info), f"over {axes}")
    return bind(eqn.primitive, {**params, key: atoms}, operands)


def _names(axes: Any) -> tuple[Any, ...]:
    return tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


def _renamed_body(value: Any, atoms_of: AtomsOf) -> Any:
    """A parameter with the jaxprs in it traced again under the new names, and types without the user's mesh."""
    if isinstance(value, (tuple, list)) and any(isinstance(v, _WITH_MESH) for v in value):
        return type(value)(_renamed_body(v, atoms_of) for v in value)
    if isinstance(value, jax.core.ShapedArray):
        weak, memory = value.weak_type, value.memory_space
        return jax.core.ShapedArray(value.shape, value.dtype, weak_type=weak, memory_space=memory)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return kernel_as_traced_here(value, atoms_of)  # the grid of a kernel
    if not isinstance(value, (Jaxpr, ClosedJaxpr)):
        return value
    inner, _ = closed(value)
    if any(hasattr(v.aval, "inner_aval") for v in inner.invars):
        return kernel_as_traced_here(value, atoms_of)  # it works on references
    again = jax.make_jaxpr(renamed(value, atoms_of))(
        *(shape_in_memory(v.aval.shape, v.aval.dtype, on_host=is_on_host(v.aval)) for v in inner.invars)
    )
    return again if isinstance(value, ClosedJaxpr) else closed(again)[0]


def _alone(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    """A collective over axes of size 1: a device sends to itself."""
    (x,), params = operands, eqn.params
    kind = KINDS.get(_INVARIANT.get(eqn.primitive.name, eqn.primitive.name))
    if kind == "all_gather":
        return [x if params["tiled"] else jnp.expand_dims(x, params["all_gather_dimension"])]
    if kind == "reduce_scatter":
        return [x if params["tiled"] else jnp.squeeze(x, params["scatter_dimension"])]
    if kind == "collective_permute":
        return [x if (0, 0) in tuple(map(tuple, params["perm"])) else jnp.zeros_like(x)]
    if kind == "all_to_all" and not params.get("tiled"):
        return [jnp.moveaxis(x, params["split_axis"], params["concat_axis"])]
    return [x]


def _inner(eqn: Any, operands: list[Any], atoms_of: AtomsOf) -> Sequence[Any]:
    """A shard_map over axes that the outer one left automatic: operands are whole along them, so each is cut here."""

    def along(spec: Any) -> Iterator[tuple[int, Atoms]]:
        for d, entry in enumerate(spec):
            names = () if entry is None else _names(entry)
            atoms = tuple(a for name in names for a in atoms_of[name])
            if atoms:
                yield d, atoms

    parts = list(operands)
    for i, spec in enumerate(eqn.params["in_specs"]):
        for d, atoms in along(spec):
            count = lax.axis_size(atoms)
            parts[i] = slice_part(parts[i], d, parts[i].shape[d] // count, atoms)
    results = renamed(eqn.params["jaxpr"], atoms_of)(*parts)
    for i, spec in enumerate(eqn.params["out_specs"]):
        for d, atoms in along(spec):
            results[i] = lax.all_gather(results[i], atoms, axis=d, tiled=True)
    return results
