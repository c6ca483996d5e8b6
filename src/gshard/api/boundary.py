"""Reads JAX shardings of arguments and results as marks and as memory kinds.

Arrays with a ``NamedSharding`` over the mesh's devices come marked; ``in_shardings`` and ``out_shardings`` take pytree
prefixes of specs. An argument of any size is cut inside; a result in unequal parts is refused, as by ``jax.jit``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding

from gshard.api.marks import is_spec, memories_of, spread
from gshard.api.marks import mark_of_spec as mark_of_spec
from gshard.api.signature import shape_to_trace
from gshard.api.target import Options
from gshard.core.errors import ArgumentError, ShardingError, counted
from gshard.core.jax_adapter import mesh_of_context, shapes_of, user_line
from gshard.core.jax_adapter_dispatch import weakly_cached
from gshard.core.jax_adapter_references import is_reference
from gshard.core.mark import Mark, resolve
from gshard.core.memory_kinds import is_in_host_space, is_on_host, kind_in_space, memory_of
from gshard.core.mesh import Mesh
from gshard.core.program import Program
from gshard.emit.compile import named_sharding
from gshard.language.mark_primitive import bind_mark
from gshard.language.transfer import transferred
from gshard.tracing.expand import mark_of_named_sharding


def mark_of_sharding(sharding: Any, ndim: int, mesh: Mesh) -> Mark | None:
    """The mark that an array's own ``NamedSharding`` is on a mesh; None if it says nothing about that mesh.

    A sharding over devices counts on a mesh of the same devices, and on an abstract mesh of the same axes. A sharding
    over an abstract mesh counts on each mesh: by the names of its axes, which may have other sizes there, or by
    positions if the mesh has no axes of these names.
    """
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return None
    own = sharding.mesh
    if not isinstance(own, jax.sharding.Mesh):
        return _mark_of_abstract(sharding, ndim, mesh) if own.size > 1 else None
    if mesh.devices is None:
        same = dict(own.shape) == dict(mesh.axes)
        return mark_of_named_sharding(NamedSharding(own.abstract_mesh, sharding.spec), ndim) if same else None
    if own.size != mesh.size or not set(own.devices.flat) <= set(mesh.devices):
        return None
    return mark_of_named_sharding(sharding, ndim)


def _mark_of_abstract(sharding: NamedSharding, ndim: int, mesh: Mesh) -> Mark:
    """A sharding over an abstract mesh as a mark: over the axes of ``mesh`` that have the names of its axes."""
    mark, names = mark_of_named_sharding(sharding, ndim), [name for name, _ in mesh.axes]
    if not all(name in names for name, size in mark.axes if size > 1):
        return mark
    return dataclasses.replace(mark, axes=(*mesh.axes, *(axis for axis in mark.axes if axis[0] not in names)))


def marks_of_arguments(
    program: Program, arrays: Sequence[tuple[Any, Any]], mesh: Mesh, given: Sequence[Mark | None], take: bool
) -> tuple[Mark | None, ...]:
    """The marks that the arguments of a call come with."""
    names = program.names[len(program.captured) :]
    for name, (aval, _) in zip(names, arrays, strict=True):
        _refuse_another_mesh(program, name, aval, mesh)
    marks: list[Mark | None] = [None] * len(arrays)
    if take:
        marks = [mark_of_sharding(sharding, len(aval.shape), mesh) for aval, sharding in arrays]
    marks[: len(given)] = [said or own for said, own in zip(given, marks, strict=False)]
    return tuple(marks)


def _refuse_another_mesh(program: Program, name: str, aval: Any, mesh: Mesh) -> None:
    """Refuses an argument with explicit axes of other devices, where types of results follow from its type."""
    theirs = getattr(getattr(aval, "sharding", None), "mesh", None)
    if theirs is None or theirs.empty or theirs.size == mesh.size:
        return
    axes = tuple((str(n), int(s)) for n, s in theirs.shape.items())
    if any(e.mark is not None and e.mark.axes == axes for e in program.block.walk()):
        raise ShardingError(
            f"argument {name} is on a mesh of {theirs.size} devices, and {program.name} is for one of {mesh.size}.",
            user_line(),
            f"{name}: {aval.str_short(short_dtypes=True)} on {' '.join(f'{n}={s}' for n, s in axes)}; "
            f"{program.name}: {mesh}",
            "Place it with jax.device_put on the mesh that gshard.jit is given, or give a NumPy array.",
        )


def marks_of_specs(what: str, prefix: Any, tree: Any, names: Collection[str] = ()) -> list[Mark | None]:
    """What a pytree prefix of shardings says of each leaf of the tree, as marks."""
    if isinstance(prefix, list) and isinstance(tree, tuple):
        prefix = tuple(prefix)  # arguments are a tuple, so a list can only mean one
    if names and isinstance(prefix, tuple) and not is_spec(prefix) and len(prefix) != len(tree):
        called = f": {', '.join(names)}" if len(names) == len(tree) else ""
        raise ShardingError(
            f"{what} has {counted(len(prefix), 'entry', 'entries')}, and the function has "
            f"{counted(len(tree), 'argument')}{called}.",
            user_line(),
            hint="Give one sharding for all arguments, or one for each; None leaves one open.",
        )
    found = [(mark_of_spec(spec, x, f"{what}{path}"), path) for path, spec, x in spread(what, prefix, tree)]
    for mark, path in found:
        if mark is not None and (mark.unreduced or mark.reduced):
            raise ShardingError(
                f"{what} cannot ask for unreduced or reduced axes: what comes to a program or leaves it is finished.",
                user_line(),
                f"{what}{path}: {mark.spec_text}",
                "Mark the value inside of the function: x = gshard.shard(x, P(..., unreduced={...})).",
            )
    return [mark for mark, _ in found]


def marks_of_in_shardings(
    in_shardings: Any, name: str, positional: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Mark | None]:
    """What ``in_shardings`` of a function say of each leaf of its positional arguments; nothing if they are None."""
    if in_shardings is None:
        return []
    if kwargs:
        raise ArgumentError.like(
            ValueError(),
            f"{name} has in_shardings, which are for positional arguments, and is called with arguments by name.",
            user_line(),
            ", ".join(f"{key}=..." for key in kwargs),
            "Give them by position; or leave in_shardings out and place the arguments, or mark them inside.",
        )
    return marks_of_specs("in_shardings", in_shardings, args, positional)


Results = tuple[tuple[Mark | None, str | None], ...]


def of_results(options: Options, jaxpr: Any, out_tree: Any) -> Results:
    """What ``out_shardings`` of a function say of each flat result: a mark, and the memory in which it leaves."""
    results = jax.tree.unflatten(out_tree, shapes_of(jaxpr.out_avals))
    marks = marks_of_specs("out_shardings", options.out_shardings, results)
    said = [None if m is None else dataclasses.replace(m, even=True) for m in marks]  # refuses what does not divide
    kinds = [memory_of(spec) for _, spec, _ in spread("out_shardings", options.out_shardings, results)]
    return tuple(zip(said, kinds, strict=True))


@weakly_cached
def marked(jaxpr: Any, inputs: tuple[Mark | None, ...], results: Results) -> Any:
    """A closed jaxpr with marks on its first inputs, and marks and memories of its results.

    The mark of a reference is put on the array that it holds when the function is called.
    """

    def with_marks(*arrays: Any) -> list[Any]:
        given = list(arrays)
        for i, mark in enumerate(inputs):
            if mark is not None and is_reference(given[i]):
                given[i][...] = _marked(given[i][...], mark)
            else:
                given[i] = _marked(given[i], mark)
        made = jaxpr_as_fun(jaxpr)(*given)
        for i, (mark, kind) in enumerate(results):
            made[i] = _marked(made[i], mark)
            if kind is not None and made[i].dtype != jax.dtypes.float0:
                made[i] = transferred(made[i], is_in_host_space(kind))
        return made

    return jax.make_jaxpr(with_marks)(*map(shape_to_trace, jaxpr.in_avals))


def _marked(x: Any, mark: Mark | None) -> Any:
    # The gradient of an integer has no elements.
    return x if mark is None or x.dtype == jax.dtypes.float0 else bind_mark(x, mark)


def shardings_of_results(options: Options, results: Any) -> list[NamedSharding | None]:
    """What ``out_shardings`` requires of each flat result, before planning; None where it leaves something open."""
    marks = marks_of_specs("out_shardings", options.out_shardings, results)
    if options.mesh is None and mesh_of_context() is None:
        return [None] * len(marks)
    mesh, found = Mesh.of(options.mesh), list[NamedSharding | None]()
    for mark, (_, spec, x) in zip(marks, spread("out_shardings", options.out_shardings, results), strict=True):
        demand = None if mark is None else resolve(mark, mesh, x.shape, user_line())
        if demand is None or any(demand.open):
            found.append(None)
        else:
            kind = memory_of(spec) or kind_in_space(False)
            found.append(named_sharding(mesh.reordered(demand.order), demand.sharding, kind))
    return found


def memories(
    program: Program, arrays: Sequence[tuple[Any, Any]], arguments: tuple[Any, Any], options: Options
) -> dict[str, Any]:
    """The fields of a ``Program`` that say in which memory kinds its inputs come and its results leave.

    An argument comes in the memory in which it is, or in the one that ``in_shardings`` names: an array that is in
    another is moved there before each call. A result leaves in the memory of its type, or in the one that
    ``out_shardings`` names. A ``PartitionSpec`` or an axis name is a sharding in the default memory of the devices.
    ``arrays`` are the types of ``arguments`` and of what the function closes over, and where these lie.
    """
    asked = itertools.zip_longest(memories_of(options.in_shardings, arguments), arrays)
    come = [kind or memory_of(sharding) or kind_in_space(is_on_host(aval)) for kind, (aval, sharding) in asked]
    leave = [program.output_memory(i) for i in range(len(program.block.outputs))]
    if options.out_shardings is not None:
        results = jax.tree.unflatten(program.out_tree, range(len(leave)))
        if program.references:  # their final values are further results
            results, _ = results
        said = [memory_of(spec) for _, spec, _ in spread("out_shardings", options.out_shardings, results)]
        leave[: len(said)] = [kind or typed for kind, typed in zip(said, leave, strict=False)]
    held = [program.input_memory(i) for i in range(len(program.captured))]
    return {"input_memories": (*held, *come), "output_memories": tuple(leave)}
