"""Converts jaxprs to another mesh context, and traces functions and ``shard_map`` regions in traces of their own."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import checkify as _checkify
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import partial_eval as _partial_eval
from jax.extend import core as _extend_core
from jax.interpreters import batching, partial_eval
from jax.interpreters import mlir as _mlir

from gshard.core.errors import MeshError
from gshard.core.jax_adapter import closed, no_mesh_set, shapes_of, sub_jaxprs, user_line
from gshard.core.memory_kinds import is_in_host_space


def as_traced_here(jaxpr: Any) -> Any:
    """A (closed) jaxpr whose equations and literals have the current mesh instead of the mesh of their tracing.

    Jaxprs that already have the current mesh are returned unchanged, as the same objects.
    """
    return AsTracedHere(jax.sharding.get_abstract_mesh()).jaxpr(jaxpr)


def computation_here(parameter: Any) -> Any:
    """The parameter of an equation. A computation (of a ``reduce``) whose types are on a mesh is traced again here.

    XLA ends the process if a manual region contains a sharding on another mesh.
    """
    if not isinstance(parameter, (_extend_core.Jaxpr, _extend_core.ClosedJaxpr)):
        return parameter
    body, consts = closed(parameter)
    types = [v.aval for v in (*body.invars, *(v for e in body.eqns for v in e.outvars))]
    if not all(isinstance(t, jax.core.ShapedArray) for t in types) or all(t.sharding.mesh.empty for t in types):
        return parameter
    function = _extend_core.jaxpr_as_fun(_extend_core.ClosedJaxpr(body, list(consts)))
    made = jax.make_jaxpr(function)(*shapes_of([v.aval for v in body.invars]))
    return closed(made)[0] if parameter is body else made


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
        if not isinstance(v, _extend_core.Literal) or not isinstance(v.aval, jax.core.ShapedArray):
            return v
        if v.aval.sharding.mesh.empty:
            return v
        plain = jax.core.ShapedArray(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type)
        return _extend_core.Literal(np.asarray(v.val, v.aval.dtype), plain)


class OnDevices(EachJaxpr):
    """Puts the shardings in jaxprs on other devices: each mesh keeps its axes, and the order of its devices."""

    def __init__(self, devices: Sequence[Any]):
        super().__init__()
        self._devices = devices
        self.meshes = dict[Any, jax.sharding.Mesh]()  # by what they were

    def equation(self, e: Any) -> Any:
        """The equation on the devices. Only these take meshes of devices; in types, meshes stay abstract."""
        changed = super().equation(e)
        if e.primitive.name not in ("sharding_constraint", "jit", "pjit", "device_put"):
            return changed
        return changed.replace(params={name: self._leaves(value) for name, value in changed.params.items()})

    def parameter(self, value: Any) -> Any:
        """A parameter with the meshes of devices, and the jaxprs, in it changed."""
        inner = getattr(value, "mesh", value)
        if isinstance(inner, jax.sharding.Mesh) and not inner.empty:
            return self.sharding(value) if isinstance(value, jax.sharding.NamedSharding) else self._mesh(inner)
        return super().parameter(value)

    def _leaves(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._leaves, value))
        return self.sharding(value) if isinstance(value, jax.sharding.NamedSharding) else value

    def sharding(self, given: Any) -> Any:
        """A sharding on the devices; one without a mesh itself."""
        if not isinstance(given, jax.sharding.NamedSharding) or given.mesh.empty:
            return given
        kind = given.memory_kind if is_in_host_space(given.memory_kind) else None  # else the default of the devices
        return jax.sharding.NamedSharding(self._mesh(given.mesh), given.spec, memory_kind=kind)

    def _mesh(self, mesh: Any) -> jax.sharding.Mesh:
        """The mesh on these devices.

        Raises:
            MeshError: it has another number of devices.
        """
        if mesh not in self.meshes:
            if mesh.size != len(self._devices):
                raise MeshError(
                    f"a sharding is over {mesh.size} devices, and the machine has {len(self._devices)}.",
                    user_line(),
                    got=f"mesh: {mesh}",
                )
            numbers = np.arange(mesh.size)
            if isinstance(mesh, jax.sharding.Mesh):
                numbers[np.argsort([d.id for d in mesh.devices.flat])] = np.arange(mesh.size)
            devices = np.array(self._devices, dtype=object)[numbers].reshape(mesh.axis_sizes)
            made = jax.sharding.Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
            self.meshes |= {mesh: made, made: made}
        return self.meshes[mesh]


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


# Adapts gshard to ``jax.shard_map``: replacement of the mapped function.

# The axis of a jax.pmap without axis_name=. JAX implements jax.pmap by jax.shard_map.
PMAP_AXIS = "_internal_pmap_axis_name"


def with_mapping(outer: Any, run: Callable[..., Sequence[Any]], arrays: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr that is one ``shard_map``, with another function in place of the ``shard_map``."""
    (mapping,) = outer.eqns
    env = dict(zip((*outer.constvars, *outer.invars), arrays, strict=True))
    env.update(zip(mapping.outvars, run(*(env[v] for v in mapping.invars)), strict=True))
    return [env[v] for v in outer.outvars]


# Registers how JAX's transformations treat a primitive that holds a jaxpr, and lowers values of hijax types.


def mapped_by(primitive: Any, rule: Callable[..., Any]) -> None:
    """Registers the vmap rule of a primitive: ``rule(mapped axis, operands, dimensions, **parameters)``."""
    batching.fancy_primitive_batchers[primitive] = rule


def mapped(jaxpr: Any, axis: Any, dims: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """A closed jaxpr mapped over the axis that a vmap rule receives, and the mapped dimensions of the results."""
    return _batching.batch_jaxpr2(jaxpr, axis, tuple(dims))  # type: ignore[no-any-return]


def expanded_by(primitive: Any, rebind: Callable[..., list[Any]]) -> None:
    """Registers how JAX expands the high-level operators in the jaxpr of a primitive.

    Newer JAX keeps some operators (``SearchSorted``) whole until all transformations are done. Then it binds a
    primitive that holds such an operator through ``rebind(operands, expanded jaxpr, parameters)``.
    """

    def expand(*operands: Any, jaxpr: Any, **parameters: Any) -> list[Any]:
        return rebind(operands, _partial_eval.lower_jaxpr2(jaxpr), parameters)

    primitive.to_lojax = expand


def rematerialised_by(primitive: Any) -> None:
    """Registers how the policy of a ``jax.checkpoint`` around a primitive with a jaxpr selects values inside of it."""

    def rule(saveable: Any, unknown: Any, instantiated: Any, e: Any) -> tuple[Any, ...]:
        if any(unknown):  # a linear function of tangents
            return None, e, [True] * len(e.outvars), [True] * len(e.outvars), needed(e, instantiated)
        known, staged, *rest = _partial_eval.closed_call_partial_eval_custom_rule(
            "jaxpr", lambda *arguments: arguments[-2:], saveable, unknown, instantiated, e
        )
        if len(known.outvars) == len(staged.outvars) == len(e.outvars) and not e.effects:  # it saves nothing
            return e, e, *rest[:2], needed(e, instantiated)
        return known, staged if staged.outvars else None, *rest

    def needed(e: Any, instantiated: Any) -> list[Any]:
        pairs = zip(e.invars, instantiated, strict=True)
        return [x for x, there in pairs if isinstance(x, _extend_core.Var) and not there]

    partial_eval.partial_eval_jaxpr_custom_rules[primitive] = rule


def arrays_alone(jaxpr: Any) -> Any:
    """A closed jaxpr in which the arrays that a value of a user's type (``hijax``) consists of take its place."""
    body, _ = closed(jaxpr)
    return _partial_eval.lower_jaxpr2(jaxpr) if body.is_high and _has_user_types(body) else jaxpr


def _has_user_types(body: Any) -> bool:
    values = [*body.constvars, *(v for e in body.eqns for v in e.outvars)]
    inner = (closed(j)[0] for e in body.eqns for j in sub_jaxprs(e.params))
    return any(v.aval.is_high for v in values) or any(map(_has_user_types, inner))


_CHECKS_HAVE_A_CONTEXT = hasattr(_checkify, "CheckifyContext")  # newer JAX


def checked_by(primitive: Any, rebind: Callable[..., list[Any]]) -> None:
    """Registers how ``checkify`` binds a primitive with a jaxpr: ``rebind(operands, checked jaxpr, parameters)``."""

    def check(*arguments: Any, jaxpr: Any, **parameters: Any) -> tuple[Any, Any]:
        context = arguments[: int(_CHECKS_HAVE_A_CONTEXT)]
        error, enabled, *operands = arguments[len(context) :]
        errors, tree = jax.tree.flatten(error)
        errors_and_operands = [*errors, *operands]
        avals = map(jax.typeof, errors_and_operands)
        checked, out_tree, _ = _checkify.jaxpr_to_checkify_jaxpr(*context, jaxpr, enabled, tree, *avals)
        results = rebind(errors_and_operands, checked, parameters)
        return jax.tree.unflatten(out_tree, results)  # type: ignore[no-any-return]

    _checkify.error_checks[primitive] = check
