"""The part of the JAX adapter for kernels: what ``custom_partitioning`` gives its functions, types in kernels."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax._src import core as _core
from jax._src import custom_partitioning_sharding_rule as _sharding_rules
from jax._src import sharding_impls as _sharding_impls
from jax._src.interpreters import mlir as _mlir
from jax._src.lib.mlir import ir as _ir
from jax.extend.core import Literal
from jax.sharding import NamedSharding, PartitionSpec

from gshard.core.jax_adapter import AsTracedHere, closed, of_no_mesh


def ir_types(avals: Sequence[Any]) -> list[Any]:
    """The MLIR types of arrays: what JAX gives to a sharding rule that is a function."""
    with _mlir.make_ir_context(), _ir.Location.unknown():
        return [_ir.RankedTensorType.get(a.shape, _mlir.dtype_to_ir_type(a.dtype)) for a in avals]


def as_gspmd(sharding: NamedSharding, ndim: int, devices: Sequence[Any]) -> jax.sharding.Sharding:
    """A sharding without names of axes, as XLA has it: what functions get that want none of them decoded."""
    return _sharding_impls.GSPMDSharding(devices, sharding._to_xla_hlo_sharding(ndim))


def spec_on(mesh: Any, sharding: jax.sharding.Sharding, ndim: int) -> PartitionSpec:
    """A sharding without names of axes as a ``PartitionSpec`` over the axes of a mesh of the same devices."""
    return _sharding_impls.parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(ndim), mesh)[0]


def read_sharding_rule(text: str, **details: Any) -> Any:
    """A sharding rule of ``custom_partitioning`` as text, as an ``SdyShardingRule``."""
    return _sharding_rules.str_to_sdy_sharding_rule(text, **details)


def kernel_as_traced_here(value: Any, atoms_of: Mapping[str, tuple[str, ...]]) -> Any:
    """A parameter of a kernel, such as its jaxpr or its grid, with all types under the mesh of now.

    Where the kernel names an axis of the user's, it names the axes of that mesh that are its parts.

    In interpret mode JAX runs a kernel's equations inside ``shard_map``, and gives the results of branches and loops
    the types that their bodies have.
    """
    return _KernelAsTracedHere(jax.sharding.get_abstract_mesh(), atoms_of).parameter(value)


class _KernelAsTracedHere(AsTracedHere):
    """Also gives variables, and types among parameters, their types under the mesh, and axes their names there."""

    def __init__(self, mesh: Any, atoms_of: Mapping[str, tuple[str, ...]]):
        super().__init__(mesh)
        self._variables: dict[Any, Any] = {}
        self._atoms_of = atoms_of

    def jaxpr(self, jaxpr: Any) -> Any:
        body, consts = closed(jaxpr)
        if body not in self._bodies:
            named = {k: list(map(self._read, getattr(body, k))) for k in ("constvars", "invars", "outvars")}
            eqns, effects = [q for e in body.eqns for q in self._equations(e)], self._effects(body.effects)
            self._bodies[body] = body.replace(**named, eqns=eqns, effects=effects)
        made = self._bodies[body]
        if body is jaxpr:
            return made
        return jaxpr.replace(jaxpr=made, consts=[of_no_mesh(x) if isinstance(x, jax.Array) else x for x in consts])

    def _equations(self, e: Any) -> Sequence[Any]:
        """The equations in place of one: where a device is along an axis is said by several atoms."""
        if e.primitive.name != "axis_index" or e.params["axis_name"] not in self._atoms_of:
            return [self._equation(e)]
        atoms, (result,) = self._atoms_of[e.params["axis_name"]], map(self._read, e.outvars)
        one = next(iter(self._mesh.axis_names))
        made, _ = closed(jax.make_jaxpr(lambda: lax.axis_index(atoms) if atoms else lax.axis_index(one) * 0)())
        return [*made.eqns[:-1], made.eqns[-1].replace(outvars=[result])]

    def _equation(self, e: Any) -> Any:
        # A sharding that JAX wrote down names the user's axes; in a kernel it means nothing.
        params = {k: None if k in ("sharding", "out_sharding") else v for k, v in e.params.items()}
        for key in {"axes", "axis_name"} & params.keys():
            params[key] = self._axes(params[key])
        effects = self._effects(e.effects)
        return super()._equation(e.replace(params=params, effects=effects, outvars=list(map(self._read, e.outvars))))

    def _axes(self, axes: Any) -> Any:
        """Names of axes, as a reduction or a collective has them; numbers of dimensions stay."""
        every = tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
        if not any(isinstance(a, str) for a in every):
            return axes
        return tuple(b for a in every for b in (self._atoms_of.get(a, (a,)) if isinstance(a, str) else (a,)))

    def _effects(self, effects: Any) -> Any:
        named = {e for e in effects if isinstance(e, _core.NamedAxisEffect)}
        atoms = {a for e in named for a in self._atoms_of.get(str(e.name), (str(e.name),))}
        return type(effects)((*(e for e in effects if e not in named), *map(_core.NamedAxisEffect, sorted(atoms))))

    def parameter(self, value: Any) -> Any:
        if isinstance(value, _core.AbstractValue):
            return self._type(value)
        if isinstance(value, jax.sharding.AbstractMesh):
            return value if value.empty else self._mesh
        if isinstance(value, NamedSharding):
            same = value.mesh.empty or value.mesh == self._mesh
            return value if same else NamedSharding(self._mesh, PartitionSpec(*(None,) * len(value.spec)))
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            return super().parameter(value)
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        made = {name: self.parameter(x) for name, x in fields.items()}
        changed = {name: x for name, x in made.items() if x is not fields[name]}
        return dataclasses.replace(value, **changed) if changed else value

    def _read(self, v: Any) -> Any:
        if isinstance(v, Literal):
            return super()._read(v)
        if v not in self._variables:
            self._variables[v] = v
            aval = self._type(v.aval)
            if aval is not v.aval:
                self._variables[v] = copy.copy(v)
                self._variables[v].aval = aval
        return self._variables[v]

    def _type(self, aval: Any) -> Any:
        if hasattr(aval, "inner_aval"):
            inner = self._type(aval.inner_aval)
            return aval if inner is aval.inner_aval else aval.update(inner_aval=inner)
        if not isinstance(aval, _core.ShapedArray) or aval.sharding.mesh == self._mesh or aval.sharding.mesh.empty:
            return aval
        whole = None if self._mesh.empty else NamedSharding(self._mesh, PartitionSpec(*(None,) * len(aval.shape)))
        return _core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=whole)
