"""Transformations: binds a partitioned function as one equation of a program, in JAX's transformations and inside
``jax.jit``.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import logging
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from gshard.api.boundary import mark_of_sharding, marked
from gshard.api.lowered import Lowered
from gshard.api.signature import arrays_of, explicit_sharding, shape_to_trace
from gshard.api.target import Target
from gshard.core.errors import ShardingError, TraceError, listed
from gshard.core.jax_adapter import closed, impl_of_keys, mesh_of_context, no_mesh_set, user_line
from gshard.core.jax_adapter_dispatch import is_staging, put_arguments, weakly_cached
from gshard.core.jax_adapter_lowering import (
    ThreadSettings,
    has_devices,
    is_placed,
    lowered_with_devices,
    meshes_of,
    under_settings,
)
from gshard.core.jax_adapter_references import discharged_by, effects_of_call, is_reference
from gshard.core.jax_adapter_retracing import (
    PMAP_AXIS,
    checked_by,
    expanded_by,
    mapped,
    mapped_by,
    rematerialised_by,
    with_mapping,
)
from gshard.core.jax_adapter_tracebacks import carried_through_xla, nan_found, without_jit
from gshard.core.mark import Mark, mark_of_cut
from gshard.core.memory_kinds import is_on_host, space
from gshard.core.phases import phase
from gshard.core.plan import Plan
from gshard.core.planning_tables import with_tables
from gshard.core.program import Constant, Program, Value
from gshard.core.sharding import Sharding
from gshard.core.spmd import SpmdProgram
from gshard.core.xla_workarounds import runnable
from gshard.emit.compile import named_sharding, over_atoms
from gshard.language.mark_primitive import bind_mark
from gshard.lowering.pipeline import Planned
from gshard.naming.dimension_classes import DimensionClasses
from gshard.planning.demands import by_axes
from gshard.tracing.expand import mark_of_any_sharding, mark_of_type
from gshard.tracing.trace import program_of

_log = logging.getLogger("gshard")


def cut_alike(ctx: Any, target: Target) -> bool:
    """Whether all meshes on which arguments of the program are cut its devices as the axes of the target do.

    JAX names the axes of results by the mesh that it was told of, the target's, and fails where XLA has split a result
    over a part of one, as it may where an argument lies on a mesh with smaller axes.
    """
    own, atoms = _bounds(n for _, n in target.mesh.axes), tuple(target.mesh.atom_sizes.items())
    return all(axes == atoms or (not ids and _bounds(n for _, n in axes) <= own) for axes, ids in meshes_of(ctx))


def _bounds(sizes: Iterable[int]) -> set[int]:
    return {1, *itertools.accumulate(sizes, operator.mul)}


def tell_unknown(jaxpr: Any, target: Target, come: Sequence[Sharding]) -> None:
    """Logs that a call was planned without a way to see how its operands are split, or refuses it.

    That is so in a program that is exported, for a function with effects, and where arguments are on a mesh with
    smaller axes. What is split may be gathered.
    """
    whole = [
        a.str_short(short_dtypes=True) for a, s in zip(jaxpr.in_avals, come, strict=True) if a.shape and not any(s.dims)
    ]
    if not whole or not target.takes_arguments_as_marks or target.mesh.size == 1:
        return
    what = "a partitioned function is called where nothing says how its operands are split."
    got = f"taken as whole: {', '.join(listed(whole))}"
    hint = "Give gshard.jit in_shardings and arguments on its own mesh, mark them inside, or use gshard.jit outside."
    if target.strict:
        raise ShardingError(what, user_line(), got, hint)
    _log.warning("gshard: %s", ShardingError(what, user_line(), got, hint))


# Plans a partitioned function inside ``jax.jit`` once XLA's partitioner has found the shardings of its operands.


def may_wait(ctx: Any, jaxpr: Any, target: Target) -> bool:
    """Whether a call can be left to XLA's partitioner: it has no effects, and the program is not exported."""
    has_devices_of_target = target.mesh.devices is not None and target.mesh.size > 1
    if not has_devices_of_target or jaxpr.effects or not all(a.size for a in (*jaxpr.in_avals, *jaxpr.out_avals)):
        return False
    return has_devices(ctx, target.mesh.size) and cut_alike(ctx, target)


@weakly_cached
def _of_numbers(jaxpr: Any) -> Any:
    """A closed jaxpr that takes and returns random keys as arrays of numbers, which XLA's partitioner knows."""

    def f(*arrays: Any) -> list[Any]:
        return _numbers(jaxpr_as_fun(jaxpr)(*_with_keys(arrays, jaxpr.in_avals)))

    numbers = [jax.eval_shape(jax.random.key_data, a) if _is_key(a) else a for a in _shapes(jaxpr.in_avals)]
    return jax.make_jaxpr(f)(*numbers)


def _is_key(aval: Any) -> bool:
    return bool(jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key))


def _with_keys(arrays: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    pairs = zip(arrays, avals, strict=True)
    return [jax.random.wrap_key_data(x, impl=impl_of_keys(a)) if _is_key(a) else x for x, a in pairs]


def _numbers(arrays: Sequence[Any]) -> list[Any]:
    return [jax.random.key_data(x) if _is_key(x) else x for x in arrays]


def lowered_at_partitioning(ctx: Any, operands: Sequence[Any], whole: Any, target: Target) -> Any:
    """Lowers a call to an operator that XLA asks for its per-device program."""
    jaxpr = _of_numbers(whole) if any(map(_is_key, (*whole.in_avals, *whole.out_avals))) else whole
    program = _planned(jaxpr, dataclasses.replace(target, leaves_by_axes=False)).program
    body, constants = closed(jaxpr)
    first = len(constants)

    @custom_partitioning
    def call(*arrays: Any) -> list[Any]:
        return list(jaxpr_as_fun(ClosedJaxpr(body, arrays[:first]))(*arrays[first:]))

    settings = ThreadSettings.here()  # XLA may ask in a thread of its own

    def partition(_: Any, arrays: Sequence[Any], results: list[Any]) -> Any:
        with carried_through_xla(), no_mesh_set(), settings.set():
            leaving = tuple((mark, None) for mark in _marks(results))  # as what reads the results has them
            spmd = partitioned(marked(jaxpr, (), leaving), target, _marks(arrays[first:]))
        said = [[over_atoms(spmd.mesh, s) for s in side] for side in (spmd.in_shardings, spmd.out_shardings)]
        return spmd.mesh.jax_mesh, _on_one_device(spmd, settings), said[1], tuple(said[0])

    call.def_partition(partition=partition, decode_shardings=False, sharding_rule=sharding_rule(program))
    # What XLA keeps on disk it finds by the text of a program, in which an operator is an address in this process.
    digest = hashlib.sha256(f"{jaxpr}\n{target}".encode()).hexdigest()

    def inline(*arrays: Any) -> list[Any]:
        with set_xla_metadata(gshard=digest):
            return _with_keys(call(*constants, *_numbers(arrays)), whole.out_avals)

    return lowered_with_devices(ctx, target.mesh.devices or (), inline, operands)


def _marks(arrays: Sequence[Any]) -> tuple[Mark | None, ...]:
    """The marks that XLA's shardings of some arrays are; none for parts that are not equal."""
    return tuple(
        None if x.sharding is None else dataclasses.replace(mark_of_any_sharding(x.sharding, x.shape), source_text="")
        for x in arrays
    )


def sharding_rule(program: Program) -> str:
    """Which dimensions of results are those of arguments, in Shardy's words: ``a b, c d -> a, e``.

    Before XLA asks for the per-device program it spreads shardings over all of the program around: by this from
    operands to results and back. Of dimensions of arguments alone nothing is said: none is split for another's sake.

    >>> import jax.numpy as jnp
    >>> from gshard.tracing.trace import trace
    >>> sharding_rule(trace(lambda x, w: x @ w, jnp.zeros((8, 4)), jnp.zeros((4, 2))))
    'a0 a1, a2 a3 -> a0 a3'
    """
    classes, numbers = DimensionClasses(program), itertools.count()

    def factors(v: Value | Constant) -> list[Any]:
        """The dimension of the program that each one is; None for a number of its own."""
        found = [(classes.root((v, d)), n) for d, n in enumerate(v.shape)]
        return [x if x[1] != 1 and found.count(x) == 1 else None for x in found]

    sides = [[factors(v) for v in side] for side in (program.block.inputs, program.block.outputs)]
    shared = set.intersection(*({x for dims in side for x in dims if x is not None} for side in sides))
    known: dict[Any, str] = {}

    def letter(x: Any) -> str:
        return known.setdefault(x, f"a{next(numbers)}") if x in shared else f"a{next(numbers)}"

    return " -> ".join(", ".join(" ".join(map(letter, dims)) for dims in side) for side in sides)


def _on_one_device(spmd: SpmdProgram, settings: ThreadSettings) -> Callable[..., list[Any]]:
    """What one device does, as a function of its parts, to be lowered under some settings of JAX's."""
    outer, tables = closed(spmd.jaxpr)
    (mapping,) = outer.eqns
    inner = ClosedJaxpr(mapping.params["jaxpr"], ())
    return lambda *parts: with_mapping(outer, lambda *xs: under_settings(inner, settings, xs), (*tables, *parts))


def refuse_in_region(name: str) -> None:
    """Refuses a call inside of a ``jax.shard_map``, where arrays are parts."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if not manual:
        return
    outside = "jax.pmap, which is a jax.shard_map" if PMAP_AXIS in manual else "jax.shard_map"
    hint = (
        "Use gshard.jit outside, of the function that holds the jax.shard_map: it partitions axes that stay automatic."
    )
    if PMAP_AXIS in manual:
        hint = "Leave out jax.pmap: gshard.jit takes whole arrays and splits them itself."
    what = f"{name} is called inside {outside}: arrays are one device's parts."
    raise TraceError(what, user_line(), f"manual axes: {', '.join(map(str, manual))}", hint)


call_p = Primitive("gshard_call")
call_p.multiple_results = True


@with_tables
def call(jaxpr: Any, target: Target, arguments: Sequence[Any]) -> list[Any]:
    """Calls a function (a closed jaxpr), partitioned, with flat arguments; some belong to a transformation."""
    here = mesh_of_context()
    named = here is not None and bool(here.explicit_axes)  # JAX names axes of this mesh for results, or refuses them
    given = target.leaves_by_axes
    target = dataclasses.replace(target, reorders=False, leaves_by_axes=named or given)
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
    return list(map(shape_to_trace, avals))


def _lower(ctx: Any, *arguments: Any, jaxpr: Any, target: Target, over: Any = None) -> Any:
    """The per-device program in the place of the equation. Its mesh is that of the atoms, whatever mesh is set."""
    # Nothing can be split: the reducer of a ``lax.reduce``, for one, where XLA takes no region of devices.
    inside = (v.aval for e in jaxpr.eqns for v in (*e.invars, *e.outvars))
    types = (*jaxpr.in_avals, *jaxpr.out_avals, *inside)
    if not jaxpr.effects and not any(getattr(a, "shape", True) for a in types):
        return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(ctx, *arguments)
    typed = tuple(mark_of_type(getattr(a, "sharding", None), len(a.shape)) for a in ctx.avals_in)
    has_types = target.takes_arguments_as_marks and any(typed)  # of a mesh with axes of type Explicit
    is_known = has_types or not target.takes_arguments_as_marks or not any(is_placed(ctx, x) for x in arguments)
    if not is_known and may_wait(ctx, jaxpr, target):
        return lowered_at_partitioning(ctx, arguments, jaxpr, target)
    spmd = partitioned(jaxpr, target, typed if has_types else None)
    if not is_known:
        tell_unknown(jaxpr, target, spmd.in_shardings[len(spmd.program.captured) :])

    def inline(*arrays: Any) -> list[Any]:
        return list(runnable(spmd.jaxpr)(*spmd.program.captured, *arrays))

    with no_mesh_set(), jax.sharding.use_abstract_mesh(target.mesh.abstract_jax_mesh):
        plain = ctx.replace(avals_in=_untyped(ctx.avals_in), avals_out=_untyped(ctx.avals_out))
        return mlir.lower_fun(inline, multiple_results=True)(plain, *arguments)


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
    return list(jaxpr.out_avals), effects_of_call(jaxpr)


def _rebound(operands: Sequence[Any], jaxpr: Any, parameters: dict[str, Any]) -> list[Any]:
    """A call of the transformed function: of arrays for references, or one that returns errors it found."""
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
    plan = _planned(first, target)
    residual_shardings = map(plan.sharding, plan.program.block.outputs[len(jaxpr.out_avals) :])
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
        found = jax.linear_transpose(of_linear, *shapes)(list(arguments[len(others) :]))
        # JAX makes the zeros of an argument that is not read in the memory of devices.
        return tuple(
            jax.device_put(ct, space(on_host=True)) if is_on_host(x) else ct
            for ct, x in zip(found, shapes, strict=True)
        )

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
