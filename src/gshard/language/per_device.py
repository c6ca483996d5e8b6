"""Runs the body of a user's ``shard_map`` inside the per-device program, and per-device programs over other axes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive
from jax.sharding import PartitionSpec

from gshard.comm.steps import KINDS, slice_part
from gshard.core.errors import RuleError, ShardingError
from gshard.core.jax_adapter import as_if_at, bind, called_jaxpr, closed, evaluate, user_line
from gshard.core.jax_adapter_context import context_of, in_context
from gshard.core.jax_adapter_kernels import kernel_as_traced_here
from gshard.core.memory_kinds import is_on_host, shape_in_memory
from gshard.core.mesh import Atoms

AtomsOf = Mapping[str, Atoms]

_WITH_MESH = (Jaxpr, ClosedJaxpr, jax.core.ShapedArray)

# JAX uses these primitives to track over which axes values vary. gshard replaces or ignores them.
_INVARIANT = {"psum_invariant": "psum", "all_gather_invariant": "all_gather", "all_gather_reduced": "all_gather"}
IGNORED = (
    "pvary", "pcast", "preduced", "vary_unreduced_cast", "vary_unreduced_cast_p", "reduced_vary_cast", "mesh_cast"
)  # fmt: skip
CONSTRAINTS = ("sharding_constraint", "reshard", "gshard_mark")


def names_of(axes: Any) -> tuple[Any, ...]:
    """One or several axis names as a tuple."""
    return tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


def renamed(jaxpr: Any, atoms_of: AtomsOf) -> Callable[..., list[Any]]:
    """The function of a per-device jaxpr, with each axis replaced by its atoms."""
    return OverAtoms(atoms_of).function(jaxpr)


class Rewritten:
    """Traces the body of a ``shard_map`` again, without the user's mesh. Subclasses define how axes are replaced."""

    kernel_axes: AtomsOf = MappingProxyType({})  # the atoms of each axis that a kernel may name

    def collective(self, eqn: Any, name: str, axes: tuple[Any, ...], operands: list[Any]) -> Sequence[Any]:
        """Runs an equation that names axes of the user's mesh."""
        raise NotImplementedError

    def shard_map(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        """Runs a ``shard_map`` in the body, over axes that are automatic in the outer one."""
        raise NotImplementedError

    def constraint(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        """Runs a sharding constraint or a mark."""
        raise NotImplementedError

    def function(self, jaxpr: Any) -> Callable[..., list[Any]]:
        """The function of a jaxpr of the body."""
        body, consts = closed(jaxpr)

        def run(eqn: Any, operands: list[Any]) -> Sequence[Any]:
            with as_if_at(eqn.source_info), in_context(context_of(eqn)):
                return self._equation(eqn, operands)

        def literal(v: Any) -> Any:
            return np.asarray(v.val, jax.typeof(v.val).dtype)  # the types of JAX's literals contain the user's mesh

        return lambda *arrays: evaluate(body, consts, arrays, run, literal)

    def _equation(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        name = eqn.primitive.name
        if name in IGNORED:
            return operands
        if name == "shard_map":
            return self.shard_map(eqn, operands)
        if name in CONSTRAINTS:
            return self.constraint(eqn, operands)
        if name in ("io_callback", "pure_callback") and eqn.params.get("sharding") is not None:
            raise RuleError(
                f"'{name}' inside a shard_map cannot name the device that calls.",
                user_line(eqn.source_info),
                f"sharding={eqn.params['sharding']}",
                "Leave sharding= out: every device calls, with its own part.",
            )
        if name in ("custom_jvp_call", "custom_vjp_call"):
            return self.function(called_jaxpr(eqn))(*operands)
        if name == "custom_partitioning":  # inside a shard_map JAX also runs the function itself
            return self.function(eqn.params["call"])(*operands)
        axes = _axes_of(eqn)
        if any(isinstance(a, str) for a in axes):
            return self.collective(eqn, _INVARIANT.get(name, name), axes, operands)
        # A sharding in the parameters names the user's axes. It has no meaning for one device's part.
        params = {
            key: None if key in ("sharding", "out_sharding") else self._renamed_body(value)
            for key, value in eqn.params.items()
        }
        return bind(eqn.primitive, params, operands)

    def _renamed_body(self, value: Any) -> Any:
        """A parameter whose jaxprs are traced again, and whose types have no mesh."""
        if isinstance(value, (tuple, list)) and any(isinstance(v, _WITH_MESH) for v in value):
            return type(value)(self._renamed_body(v) for v in value)
        if isinstance(value, jax.core.ShapedArray):
            return jax.core.ShapedArray(
                value.shape, value.dtype, weak_type=value.weak_type, memory_space=value.memory_space
            )
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return kernel_as_traced_here(value, self.kernel_axes)  # the grid of a kernel
        if not isinstance(value, (Jaxpr, ClosedJaxpr)):
            return value
        inner, _ = closed(value)
        if any(hasattr(v.aval, "inner_aval") for v in inner.invars):
            return kernel_as_traced_here(value, self.kernel_axes)  # the body of a kernel takes references
        retraced = jax.make_jaxpr(self.function(value))(
            *(shape_in_memory(v.aval.shape, v.aval.dtype, on_host=is_on_host(v.aval)) for v in inner.invars)
        )
        return retraced if isinstance(value, ClosedJaxpr) else closed(retraced)[0]


def _axes_of(eqn: Any) -> tuple[Any, ...]:
    key = next((k for k in ("axes", "axis_name") if k in eqn.params), None)
    return () if key is None else names_of(eqn.params[key])


class OverAtoms(Rewritten):
    """Replaces each axis by its atoms."""

    def __init__(self, atoms_of: AtomsOf):
        self._atoms_of = self.kernel_axes = atoms_of

    def collective(self, eqn: Any, name: str, axes: tuple[Any, ...], operands: list[Any]) -> Sequence[Any]:
        """Runs the collective over atoms. Over axes of size 1 nothing is sent."""
        atoms: list[Any] = []
        for axis in axes:
            atoms.extend(self._atoms_of[axis] if isinstance(axis, str) else (axis,))
        check_known(eqn, name, axes)
        return collective(eqn.primitive, name, eqn.params, tuple(atoms), operands)

    def shard_map(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        """Splits the operands, which are whole along the axes of the ``shard_map``, and runs its body."""

        def split_dims(spec: Any) -> Iterator[tuple[int, Atoms]]:
            for d, entry in enumerate(spec):
                names = () if entry is None else names_of(entry)
                atoms = tuple(a for name in names for a in self._atoms_of[name])
                if atoms:
                    yield d, atoms

        parts = list(operands)
        for i, spec in enumerate(eqn.params["in_specs"]):
            for d, atoms in split_dims(spec):
                count = lax.axis_size(atoms)
                parts[i] = slice_part(parts[i], d, parts[i].shape[d] // count, atoms)
        results = self.function(eqn.params["jaxpr"])(*parts)
        for i, spec in enumerate(eqn.params["out_specs"]):
            for d, atoms in split_dims(spec):
                results[i] = lax.all_gather(results[i], atoms, axis=d, tiled=True)
        return results

    def constraint(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        """Returns the operands unchanged, if the constraint splits nothing."""
        params = eqn.params
        constraint = params.get("mark") or params.get("sharding") or params.get("dst_sharding")
        if _splits_a_dimension(constraint):
            spec = getattr(constraint, "spec", constraint)
            text = constraint if "mark" in params else f"{eqn.primitive.name} to {spec}"
            raise ShardingError(
                "inside a shard_map over all axes of the mesh an array is one device's part, which cannot be split.",
                user_line(eqn.source_info),
                f"{text} of {operands[0].dtype}[{','.join(map(str, operands[0].shape))}]",
                "Mark arrays outside of the shard_map, or leave axes automatic: axis_names={...}.",
            )
        return operands


def _splits_a_dimension(constraint: Any) -> bool:
    """Whether a mark or a sharding splits any dimension."""
    entries = (*getattr(constraint, "spec", ()), *getattr(constraint, "ids_shape", ()))
    return any(entry not in (None, (), 1) and entry is not PartitionSpec.UNCONSTRAINED for entry in entries)


def check_known(eqn: Any, name: str, axes: tuple[Any, ...]) -> None:
    """Checks that gshard supports a collective of JAX."""
    if name != "axis_index" and name not in KINDS:
        raise RuleError(
            f"'{eqn.primitive.name}' inside a shard_map is not known.",
            user_line(eqn.source_info),
            f"over {', '.join(map(str, axes))}",
            f"Use one of {', '.join(sorted({*KINDS} - {'psum_scatter'}))}.",
        )


def collective(
    primitive: Any, name: str, params: Mapping[str, Any], atoms: Atoms, operands: Sequence[Any]
) -> Sequence[Any]:
    """Runs a collective of JAX over atoms of the mesh."""
    if name == "axis_index":
        return [lax.axis_index(atoms) if atoms else jnp.zeros((), jnp.int32)]
    if name == "psum" and not params.get("axis_index_groups"):
        return [lax.psum(x, atoms) for x in operands] if atoms else operands
    if not atoms:
        return _alone(name, params, operands)
    if name == "all_gather" and primitive.name != name:
        (x,) = operands
        return [lax.all_gather(x, atoms, axis=params["all_gather_dimension"], tiled=params["tiled"])]
    key = "axes" if "axes" in params else "axis_name"
    return bind(primitive, {**params, key: atoms}, operands)


def _alone(name: str, params: Mapping[str, Any], operands: Sequence[Any]) -> Sequence[Any]:
    """Runs a collective over axes of size 1, in which each device sends to itself."""
    kind = KINDS[name]
    if name == "ragged_all_to_all":
        return [_to_itself(*operands)]
    if kind == "all_reduce":
        return operands
    (x,) = operands
    if kind == "all_gather":
        return [x if params["tiled"] else jnp.expand_dims(x, params["all_gather_dimension"])]
    if kind == "reduce_scatter":
        return [x if params["tiled"] else jnp.squeeze(x, params["scatter_dimension"])]
    if kind == "collective_permute":
        return [x if (0, 0) in tuple(map(tuple, params["perm"])) else jnp.zeros_like(x)]
    return [x]


def _to_itself(x: Any, output: Any, starts: Any, sizes: Any, targets: Any, _: Any) -> Any:
    """Runs ``ragged_all_to_all`` on one device: copies ``sizes`` rows from ``starts`` to ``targets``."""
    for i in range(starts.shape[0]):
        row = jnp.arange(output.shape[0], dtype=starts.dtype) - targets[i]
        rows = jnp.take(x, row + starts[i], axis=0, mode="clip")
        is_copied = ((row >= 0) & (row < sizes[i])).reshape(-1, *(1,) * (output.ndim - 1))
        output = jnp.where(is_copied, rows, output)
    return output


# Replaces permutes in code that only some devices execute.


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


# Defines the primitives of a ``shard_map`` that is manual over some axes of its mesh and automatic over others.

Axes = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class RegionBoundary:
    """The boundary of a region at one array."""

    axes: Axes  # names and sizes of the axes of the user's mesh
    manual: tuple[str, ...]  # the axes that become manual in the region
    spec: tuple[tuple[str, ...], ...]  # for each dimension the manual axes that split it in the region
    # the devices of the user's mesh in row-major order, if it has devices
    devices: tuple[Any, ...] = dataclasses.field(default=(), repr=False)

    def parts(self) -> tuple[int, ...]:
        """The number of parts of each dimension."""
        sizes = dict(self.axes)
        return tuple(math.prod(sizes[name] for name in names) for names in self.spec)


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One collective of JAX in the body of a region."""

    primitive: Any  # primitive, params: the primitive and the parameters of JAX's equation
    params: tuple[tuple[str, Any], ...]
    over: tuple[str, ...]  # the axes of the user's mesh that the collective names
    axes: Axes  # names and sizes of all axes of this mesh
    manual: tuple[str, ...]  # the axes that are manual at the collective
    results: tuple[tuple[tuple[int, ...], Any], ...]  # shape and dtype of each result


enter_manual_p = Primitive("enter_manual")
leave_manual_p = Primitive("leave_manual")


@enter_manual_p.def_abstract_eval
def _part(x: Any, *, boundary: RegionBoundary) -> Any:
    shape = tuple(n // parts for n, parts in zip(x.shape, boundary.parts(), strict=True))
    return jax.core.ShapedArray(shape, x.dtype, weak_type=x.weak_type)


@leave_manual_p.def_abstract_eval
def _whole(x: Any, *, boundary: RegionBoundary) -> Any:
    shape = tuple(n * parts for n, parts in zip(x.shape, boundary.parts(), strict=True))
    return jax.core.ShapedArray(shape, x.dtype, weak_type=x.weak_type)


def _primitive(name: str) -> Primitive:
    primitive = Primitive(f"manual_{name}")
    primitive.multiple_results = True
    primitive.def_abstract_eval(
        lambda *_, collective: [jax.core.ShapedArray(shape, dtype) for shape, dtype in collective.results]
    )
    return primitive


MANUAL_COLLECTIVES = {name: _primitive(name) for name in (*KINDS, "axis_index")}
"""The primitive for each of JAX's collectives that such a region may contain, by JAX's name."""
