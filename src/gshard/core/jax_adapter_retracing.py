"""Converts jaxprs to another mesh context, and traces functions and ``shard_map`` regions in traces of their own."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core as _core
from jax._src.interpreters import mlir as _mlir
from jax.extend import core as _extend_core
from jax.sharding import NamedSharding, PartitionSpec

from gshard.core.jax_adapter import closed, no_mesh_set, shapes_of


def as_traced_here(jaxpr: Any) -> Any:
    """A (closed) jaxpr whose equations and literals have the current mesh instead of the mesh of their tracing.

    Jaxprs that already have the current mesh are returned unchanged, as the same objects.
    """
    return AsTracedHere(jax.sharding.get_abstract_mesh()).jaxpr(jaxpr)


class EachJaxpr:
    """Changes a jaxpr and the jaxprs inside of it. Jaxprs that several equations share stay shared.

    A subclass changes equations (``equation``) or bodies (``body``). Unchanged jaxprs stay the same objects.
    """

    def __init__(self) -> None:
        self._bodies = dict[Any, Any]()

    def jaxpr(self, jaxpr: Any) -> Any:
        """The changed (closed) jaxpr."""
        body, _ = closed(jaxpr)
        if body not in self._bodies:
            self._bodies[body] = self.body(body)
        converted = self._bodies[body]
        if converted is body:
            return jaxpr
        return converted if body is jaxpr else jaxpr.replace(jaxpr=converted)

    def body(self, body: Any) -> Any:
        """The changed body of a jaxpr."""
        eqns = list(map(self.equation, body.eqns))
        return body if all(map(operator.is_, eqns, body.eqns)) else body.replace(eqns=eqns)

    def equation(self, e: Any) -> Any:
        """The changed equation."""
        params = {name: self.parameter(value) for name, value in e.params.items()}
        return e if all(params[name] is value for name, value in e.params.items()) else e.replace(params=params)

    def parameter(self, value: Any) -> Any:
        """A parameter, or a part of one, with the jaxprs in it changed."""
        if isinstance(value, (_extend_core.Jaxpr, _extend_core.ClosedJaxpr)):
            return self.jaxpr(value)
        if not isinstance(value, (tuple, list)):
            return value
        items = list(map(self.parameter, value))
        if all(map(operator.is_, items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


class AsTracedHere(EachJaxpr):
    """Puts jaxprs under a mesh."""

    def __init__(self, mesh: Any):
        super().__init__()
        self._mesh = mesh
        self._contexts = dict[Any, Any]()

    def equation(self, e: Any) -> Any:
        """The equation under the mesh."""
        changed = super().equation(e)
        inputs = list(map(self._read, e.invars))
        context = self._context(e.ctx)
        unchanged = context is e.ctx and all(map(operator.is_, inputs, e.invars))
        return changed if unchanged else changed.replace(invars=inputs, ctx=context)

    def _context(self, context: Any) -> Any:
        if context.cur_abstract_mesh == self._mesh:
            return context
        if context not in self._contexts:
            # Unset the mesh in between: JAX refuses to replace a mesh by one of another size.
            with context.manager, no_mesh_set(), jax.sharding.use_abstract_mesh(self._mesh):
                self._contexts[context] = type(context)()
        return self._contexts[context]

    def _read(self, v: Any) -> Any:
        if not isinstance(v, _core.Literal) or not isinstance(v.aval, _core.ShapedArray):
            return v
        if v.aval.sharding.mesh.empty:
            return v
        plain = _core.ShapedArray(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type)
        return _core.Literal(np.asarray(v.val, v.aval.dtype), plain)


_as_written_p = _extend_core.Primitive("as_written")
_as_written_p.multiple_results = True
_as_written_p.def_impl(lambda *arrays, jaxpr: _extend_core.jaxpr_as_fun(jaxpr)(*arrays))
_as_written_p.def_abstract_eval(lambda *avals, jaxpr: [v.aval for v in closed(jaxpr)[0].outvars])


def _lower_as_written(ctx: Any, *arrays: Any, jaxpr: Any) -> Any:
    return _mlir.core_call_lowering(ctx, *arrays, name="as_written", call_jaxpr=jaxpr)


_mlir.register_lowering(_as_written_p, _lower_as_written)


def as_outside(f: Callable[..., Sequence[Any]], arrays: Sequence[Any]) -> list[Any]:
    """Runs a function on arrays inside ``shard_map``, but traces it outside, where types have no mesh.

    Some primitives compare the types of their operands with the types in their parameters, which have no mesh. A
    function that cannot be traced outside, or that has effects or constants, is traced inside.
    """
    try:
        with no_mesh_set():
            jaxpr = jax.make_jaxpr(f)(*shapes_of([jax.typeof(x) for x in arrays]))
    except Exception:  # for example, it names an axis of the mesh; an error of its own is raised again here
        return list(f(*arrays))
    return list(f(*arrays)) if jaxpr.effects or jaxpr.consts else _as_written_p.bind(*arrays, jaxpr=jaxpr)


# Adapts gshard to ``jax.shard_map``: types of arrays inside, and replacement of the mapped function.

# The axis of a jax.pmap without axis_name=. JAX implements jax.pmap by jax.shard_map.
PMAP_AXIS = "_internal_pmap_axis_name"


def with_mapping(outer: Any, run: Callable[..., Sequence[Any]], arrays: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr that is one ``shard_map``, with another function in place of the ``shard_map``."""
    (mapping,) = outer.eqns
    env = dict(zip((*outer.constvars, *outer.invars), arrays, strict=True))
    env.update(zip(mapping.outvars, run(*(env[v] for v in mapping.invars)), strict=True))
    return [env[v] for v in outer.outvars]


def varying_alike(arrays: Sequence[Any]) -> list[Any]:
    """The arrays, cast such that each varies over all axes over which any of them varies."""
    axes = frozenset[str]().union(*map(_varying, arrays))

    def over_all(x: Any) -> Any:
        missing = tuple(sorted(axes - _varying(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return [over_all(x) for x in arrays]


def types_alike(avals: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """The types of results that vary over the same axes as the operands, which all vary over the same axes."""
    axes = frozenset[str]().union(*map(_varying, operands))
    mesh = jax.sharding.get_abstract_mesh()

    def typed(aval: Any) -> Any:
        if not axes:
            return aval
        sharding = NamedSharding(mesh, PartitionSpec(*(None,) * len(aval.shape)))
        varying = next(a for a in map(_type, operands) if _varying(a)).manual_axis_type
        return aval.update(sharding=sharding, manual_axis_type=varying)

    return list(map(typed, avals))


def _type(x: Any) -> Any:
    return x if isinstance(x, jax.core.AbstractValue) else jax.typeof(x)


def _varying(x: Any) -> frozenset[str]:
    return frozenset(getattr(getattr(_type(x), "manual_axis_type", None), "varying", ()))
