"""Transformations: binds a partitioned function as one equation of a program that JAX transforms.

``jax.grad``, ``jax.vmap``, ``jax.jit``, ``jax.checkpoint``, ``jax.lax.scan`` ... around a partitioned function see one
equation, ``gshard_call``, that holds the function as it was written. Differentiating it gives partitioned calls of the
derivative, mapping it a partitioned call of the mapped function: the marks are carried along by JAX's own
transformations, and each new function is planned by itself. Inside ``jax.jit`` the per-device program takes the
equation's place; inside another ``gshard.jit`` the equation is opened and its marks count there.

    jax.grad(gshard.jit(loss, mesh=8))(x)
    -> residuals = gshard_call[forward half of loss](x);  gshard_call[transpose of the linear half](residuals, 1.0)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from gshard.api.at_partitioning import lowered_at_partitioning, may_wait
from gshard.api.boundary import mark_of_sharding
from gshard.api.inside_shard_map import as_region, in_region, run_inside
from gshard.api.lowered import Lowered
from gshard.api.operands import cut_alike, marks_of_operands, tell_unknown
from gshard.api.reference_arguments import arrays_of
from gshard.api.signature import Leaf, explicit_sharding
from gshard.api.target import Target
from gshard.core.errors import TraceError
from gshard.core.jax_adapter import mesh_of_context, no_mesh_set, user_line
from gshard.core.jax_adapter_dispatch import is_staging, put_arguments, weakly_cached
from gshard.core.jax_adapter_lowering import Unknown
from gshard.core.jax_adapter_manual import types_alike, varying_alike
from gshard.core.jax_adapter_nans import nan_found, without_jit
from gshard.core.jax_adapter_references import discharged_by, effects_of_call, is_reference
from gshard.core.jax_adapter_transformations import (
    checked_by,
    expanded_by,
    interpreted_by,
    mapped,
    mapped_by,
    rematerialised_by,
)
from gshard.core.mark import Mark, mark_of_cut
from gshard.core.memory_kinds import is_on_host, space
from gshard.core.phases import phase
from gshard.core.plan import Plan
from gshard.core.planning_tables import with_tables
from gshard.core.program import Program
from gshard.core.spmd import SpmdProgram
from gshard.core.xla_workarounds import runnable
from gshard.emit.compile import named_sharding
from gshard.language.mark_primitive import bind_mark
from gshard.planning.io_shardings import by_axes
from gshard.search.planned import Planned
from gshard.tracing.trace import program_of

call_p = Primitive("gshard_call")
call_p.multiple_results = True


@with_tables
def call(jaxpr: Any, target: Target, arguments: Sequence[Any]) -> list[Any]:
    """Calls a function (a closed jaxpr), partitioned, with flat arguments; some belong to a transformation."""
    interpreted_by(call_p, _rebound)
    if target.around is not None:
        return call_p.bind(*varying_alike(arguments), jaxpr=jaxpr, target=target)  # type: ignore[no-any-return]
    here = mesh_of_context()
    named = here is not None and bool(here.explicit_axes)  # JAX names axes of this mesh for results, or refuses them
    given = target.leaves_by_axes
    target = dataclasses.replace(target, reorders=False, keep_uneven=False, leaves_by_axes=named or given)
    if target.mesh.devices is None:
        return call_p.bind(*arguments, jaxpr=jaxpr, target=target)  # type: ignore[no-any-return]
    over = target.mesh.jax_mesh
    if is_staging():
        # Which mesh names the axes of results is decided once. How they leave is planned again, when it is known how
        # operands come.
        shardings = [named_sharding(target.mesh, s) for s in _planned(jaxpr, target).leave]
        own = target.mesh.user_jax_mesh
        # Over a mesh of Explicit axes JAX takes no open sharding: over the atoms, the same devices, it does.
        ours = not own.explicit_axes and all(s.mesh == own for s in shardings)
        target = dataclasses.replace(target, leaves_by_axes=named or given or ours)
        over = own if ours else over
    return call_p.bind(*arguments, jaxpr=jaxpr, target=target, over=_placed_on(over))  # type: ignore[no-any-return]


@weakly_cached
def _placed_on(mesh: Any) -> Any:
    """A jaxpr that ``jax.jit`` finds in the parameters of a call. It tells on which devices the program runs."""
    return jax.make_jaxpr(jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec())))(0)


def refuse_references(arguments: Sequence[Any], name: str = "a partitioned function") -> None:
    """Refuses a call with references that is differentiated or mapped: a derivative would write to them twice."""
    if any(map(is_reference, arguments)):
        raise TraceError(
            f"{name} writes to a reference (jax.Ref), and a transformation around it would differentiate or map it.",
            user_line(),
            hint="Transform inside: gshard.jit(jax.grad(f), mesh=...), or give and return arrays.",
        )


@weakly_cached
def _planned(jaxpr: Any, target: Target, marks: tuple[Mark | None, ...] | None = None) -> Plan:
    program = _program(jaxpr, target, marks)
    with phase("planning", program.name, target.mesh.size):
        return target.planned(program).plan


def _program(jaxpr: Any, target: Target, marks: Sequence[Mark | None] | None = None) -> Program:
    names = [f"args[{i}]" for i in range(len(jaxpr.in_avals))]
    tree = jax.tree.structure([0] * len(jaxpr.out_avals))
    with phase("rewriting", "call"):
        layout, finite = target.layout, target.finite
        made = program_of(jaxpr, tree, "call", names, marks, as_typed=True, layout=layout, finite=finite)
        return target.with_kept_options(made)


@weakly_cached
@with_tables
def partitioned(jaxpr: Any, target: Target, marks: tuple[Mark | None, ...] | None = None) -> SpmdProgram:
    """The per-device program of a closed jaxpr, whose arguments come marked."""
    plan = _planned(jaxpr, dataclasses.replace(target, leaves_by_axes=False), marks)
    if target.leaves_by_axes:
        plan = dataclasses.replace(plan, leave=tuple(by_axes(s, plan.mesh) for s in plan.leave))
    with phase("partitioning", plan.program.name, target.mesh.size):
        made = target.partitioned(Planned(plan))
    target.check(plan, made)
    return made


def _shapes(avals: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [Leaf(a).shape for a in avals]


def _lower(ctx: Any, *arguments: Any, jaxpr: Any, target: Target, over: Any = None) -> Any:
    """The per-device program in the place of the equation. Its mesh is that of the atoms, whatever mesh is set."""
    if _is_of_scalars(jaxpr):
        return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(ctx, *arguments)
    if target.around is not None:
        with no_mesh_set(), jax.sharding.use_abstract_mesh(target.around):
            run = functools.partial(_run_inside, jaxpr=jaxpr, target=target)
            return mlir.lower_fun(run, multiple_results=True)(ctx, *arguments)
    marks: tuple[Mark | None, ...] | None = None
    try:
        marks = marks_of_operands(ctx, arguments, target)
    except Unknown:
        if may_wait(ctx, jaxpr, target) and cut_alike(ctx, target):
            program = _planned(jaxpr, dataclasses.replace(target, leaves_by_axes=False)).program
            return lowered_at_partitioning(ctx, arguments, jaxpr, target, program, partitioned)
        made = partitioned(jaxpr, target)
        tell_unknown(jaxpr, target, made.in_shardings[len(made.program.captured) :])
    spmd = partitioned(jaxpr, target, marks)

    def inline(*arrays: Any) -> list[Any]:
        return list(runnable(spmd.jaxpr)(*spmd.program.captured, *arrays))

    with no_mesh_set(), jax.sharding.use_abstract_mesh(target.mesh.abstract_jax_mesh):
        plain = ctx.replace(avals_in=_untyped(ctx.avals_in), avals_out=_untyped(ctx.avals_out))
        return mlir.lower_fun(inline, multiple_results=True)(plain, *arguments)


def _is_of_scalars(jaxpr: Any) -> bool:
    """Whether nothing can be split: the reducer of a ``lax.reduce``, for one, where XLA takes no region of devices."""
    inside = (v.aval for e in jaxpr.eqns for v in (*e.invars, *e.outvars))
    types = (*jaxpr.in_avals, *jaxpr.out_avals, *inside)
    return not jaxpr.effects and not any(getattr(a, "shape", True) for a in types)


def _run_inside(*arrays: Any, jaxpr: Any, target: Target) -> list[Any]:
    return run_inside(arrays, jaxpr, target, partitioned)


def _untyped(avals: Sequence[Any]) -> list[Any]:
    """The same without shardings of explicit axes."""
    typed = ((a, bool(getattr(a, "weak_type", False)), space(is_on_host(a))) for a in avals)
    return [jax.core.ShapedArray(a.shape, a.dtype, weak_type=weak, memory_space=where) for a, weak, where in typed]


# Equal calls in a program are lowered each by itself: their operands may be split in different ways.
mlir.register_lowering(call_p, _lower, cacheable=False)


@call_p.def_impl
def _run(*arguments: Any, jaxpr: Any, target: Target, over: Any = None) -> list[Any]:
    """A call whose arguments are all there: what a derivative taken outside of ``jax.jit`` comes to."""
    lowered = _lowered(jaxpr, target, tuple(getattr(x, "sharding", None) for x in arguments))
    with no_mesh_set():
        placed = put_arguments(arrays_of(arguments), lowered.argument_shardings)
    try:
        results = lowered.flat_results(lowered.executable(*placed), arguments)
    except Exception as error:
        if not nan_found(error):
            raise
        run = functools.partial(jax.core.eval_jaxpr, jaxpr.jaxpr, jaxpr.consts)
        results = without_jit(lambda: run(*placed), lowered.program.name)
    return [_typed(x, a, arguments) for x, a in zip(results, jaxpr.out_avals, strict=True)]


def _typed(x: Any, aval: Any, arguments: Sequence[Any]) -> Any:
    """A result with the type that the transformation around expects: over a mesh with Explicit axes, or without.

    The function is typed by its arguments, and its mesh may have axes of other types. No data is moved.
    """
    expected, made = explicit_sharding(aval), explicit_sharding(jax.typeof(x))
    if expected is None and made is not None and mesh_of_context() is None:
        own = x.sharding.mesh
        automatic = jax.sharding.Mesh(own.devices, own.axis_names, axis_types=(AxisType.Auto,) * own.devices.ndim)
        return jax.device_put(x, NamedSharding(automatic, x.sharding.spec))
    if expected is not None and made is None:
        meshes = (getattr(getattr(a, "sharding", None), "mesh", None) for a in arguments)
        given = next((m for m in meshes if getattr(m, "abstract_mesh", None) == expected.mesh), None)
        return x if given is None else jax.device_put(x, NamedSharding(given, expected.spec))
    return x


@weakly_cached
def _lowered(jaxpr: Any, target: Target, shardings: tuple[Any, ...]) -> Lowered:
    given = shardings if target.takes_arguments_as_marks else [None] * len(shardings)
    marks = [mark_of_sharding(s, len(a.shape), target.mesh) for s, a in zip(given, jaxpr.in_avals, strict=True)]
    program = _program(jaxpr, target, marks)
    return Lowered(program, target, jax.tree.structure([0] * len(marks)), tuple(jaxpr.in_avals), frozenset())


@call_p.def_effectful_abstract_eval
def _abstract(*arguments: Any, jaxpr: Any, target: Target, over: Any = None) -> tuple[Any, Any]:
    if target.around is not None:
        return types_alike(jaxpr.out_avals, arguments), effects_of_call(jaxpr)
    return list(jaxpr.out_avals), effects_of_call(jaxpr)


def _rebound(operands: Sequence[Any], jaxpr: Any, parameters: dict[str, Any]) -> list[Any]:
    """A call of the transformed function: of arrays for references, of series, or one that returns errors it found."""
    return call(jaxpr, parameters["target"], operands)


discharged_by(call_p, _rebound)
checked_by(call_p, _rebound)


# -- vmap ------------------------------------------------------------------------------------------------------------


def _batch(
    axis: Any, arguments: Sequence[Any], dims: Sequence[Any], *, jaxpr: Any, target: Target, over: Any = None
) -> tuple[list[Any], tuple[Any, ...]]:
    """A call of the mapped function."""
    refuse_references(arguments)
    inner, out_dims = mapped(jaxpr, axis, dims)
    return call(inner, target, arguments), out_dims


mapped_by(call_p, _batch)


@functools.partial(expanded_by, call_p)
def _expanded(operands: Sequence[Any], jaxpr: Any, parameters: dict[str, Any]) -> list[Any]:
    """A call of the function whose late operators are expanded; its target was completed when it was first bound."""
    results: list[Any] = call_p.bind(*operands, jaxpr=jaxpr, **parameters)
    return results


rematerialised_by(call_p)


# -- derivatives -----------------------------------------------------------------------------------------------------


@weakly_cached
def _linearize_split(jaxpr: Any, target: Target, nonzero_tangents: tuple[int, ...]) -> tuple[Any, Any]:
    """The function with what its derivative needs as further results, and the derivative, a function of those.

    The second is planned by itself, so what goes from one to the other is marked with its sharding.
    """
    f = jaxpr_as_fun(jaxpr)
    trees: list[Any] = []
    smooth = _differentiable(jaxpr.out_avals)

    def forward(*arguments: Any) -> list[Any]:
        def of_nonzero(*some: Any) -> list[Any]:
            full = list(arguments)
            for i, x in zip(nonzero_tangents, some, strict=True):
                full[i] = x
            return f(*full)  # type: ignore[no-any-return]

        results, jvp_fn = jax.linearize(of_nonzero, *(arguments[i] for i in nonzero_tangents))
        residuals, tree = jax.tree.flatten(jvp_fn)
        trees.append(tree)
        return [*results, *residuals]

    first = jax.make_jaxpr(forward)(*_shapes(jaxpr.in_avals))
    residuals = _shapes(first.out_avals[len(jaxpr.out_avals) :])
    plan = _planned(first if target.around is None else as_region(first, target.around), target)
    shardings = map(plan.sharding, plan.program.block.outputs[len(jaxpr.out_avals) :])
    residual_shardings = (s if target.around is None else in_region(s) for s in shardings)
    # What is whole may be cut further.
    marks = [mark_of_cut([atoms or None for atoms in s.dims], target.mesh) for s in residual_shardings]

    def tangents_of(*arguments: Any) -> list[Any]:
        sharded = [bind_mark(x, m) for x, m in zip(arguments[: len(residuals)], marks, strict=True)]
        jvp_fn = jax.tree.unflatten(trees[0], sharded)
        tangents = jvp_fn(*arguments[len(residuals) :])
        return [t for t, keep in zip(tangents, smooth, strict=True) if keep]

    second = jax.make_jaxpr(tangents_of)(*residuals, *_shapes([jaxpr.in_avals[i] for i in nonzero_tangents]))
    return first, second


def _differentiable(avals: Sequence[Any]) -> list[bool]:
    return [jnp.issubdtype(a.dtype, jnp.inexact) for a in avals]


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: Any, target: Target, over: Any = None
) -> tuple[list[Any], list[Any]]:
    refuse_references(primals)
    nonzero_tangents = tuple(i for i, t in enumerate(tangents) if type(t) is not ad.Zero)
    first, second = _linearize_split(jaxpr, target, nonzero_tangents)
    everything = call(first, target, primals)
    count = len(jaxpr.out_avals)
    results, residuals = everything[:count], everything[count:]
    found = iter(call(second, target, [*residuals, *(tangents[i] for i in nonzero_tangents)]))
    smooth = _differentiable(jaxpr.out_avals)
    flat = [None if s else ad.Zero(jax.typeof(x).to_tangent_aval()) for s, x in zip(smooth, results, strict=True)]
    return results, [next(found) if zero is None else zero for zero in flat]


ad.primitive_jvps[call_p] = _jvp


@weakly_cached
def _transposed(jaxpr: Any, linear: tuple[int, ...], given: tuple[int, ...]) -> Any:
    """(other arguments, cotangents of the results ``given``) -> cotangents of the arguments ``linear``."""
    f = jaxpr_as_fun(jaxpr)
    others = [i for i in range(len(jaxpr.in_avals)) if i not in linear]

    def backward(*arguments: Any) -> tuple[Any, ...]:
        known = dict(zip(others, arguments[: len(others)], strict=True))

        def of_linear(*some: Any) -> list[Any]:
            full = {**known, **dict(zip(linear, some, strict=True))}
            results = f(*(full[i] for i in range(len(jaxpr.in_avals))))
            return [results[i] for i in given]

        shapes = _shapes([jaxpr.in_avals[i] for i in linear])
        return jax.linear_transpose(of_linear, *shapes)(list(arguments[len(others) :]))  # type: ignore[no-any-return]

    known_avals = _shapes([jaxpr.in_avals[i] for i in others])
    return jax.make_jaxpr(backward)(*known_avals, *_shapes([jaxpr.out_avals[i] for i in given]))


def _transpose(cotangents: Sequence[Any], *arguments: Any, jaxpr: Any, target: Target, over: Any = None) -> list[Any]:
    linear = tuple(i for i, x in enumerate(arguments) if ad.is_undefined_primal(x))
    given = tuple(i for i, ct in enumerate(cotangents) if type(ct) is not ad.Zero)
    if not given:
        return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in arguments]
    known = [x for x in arguments if not ad.is_undefined_primal(x)]
    transposed = call(_transposed(jaxpr, linear, given), target, [*known, *(cotangents[i] for i in given)])
    found = dict(zip(linear, transposed, strict=True))
    return [found.get(i) for i in range(len(arguments))]


ad.primitive_transposes[call_p] = _transpose
