"""Reads JAX shardings of arguments and results as marks and as memory kinds.

Arrays with a ``NamedSharding`` over the mesh's devices come marked; ``in_shardings`` and ``out_shardings`` take pytree
prefixes of specs. An argument of any size is cut inside; a result in unequal parts is refused, as by ``jax.jit``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from gshard.api.signature import Leaf, Signature
from gshard.api.specs import as_array, is_spec, memories_of, spread
from gshard.api.specs import mark_of_spec as mark_of_spec
from gshard.api.target import Options
from gshard.core.errors import ArgumentError, ShardingError, counted
from gshard.core.jax_adapter import mesh_of_context, user_line
from gshard.core.mark import Mark, resolve
from gshard.core.memory_kinds import is_in_host_space, is_on_host, kind_in_space, memory_of
from gshard.core.mesh import Mesh
from gshard.core.paths import positional_names
from gshard.core.program import Program
from gshard.emit.compile import named_sharding
from gshard.language.mark_primitive import bind_mark
from gshard.language.transfer import transferred
from gshard.tracing.by_jax import name_of
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
    in_shardings: Any, f: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Mark | None]:
    """What ``in_shardings`` of a function say of each leaf of its positional arguments; nothing if they are None."""
    if in_shardings is None:
        return []
    _refuse_named(kwargs, f)
    return marks_of_specs("in_shardings", in_shardings, args, positional_names(f, len(args)))


def _refuse_named(kwargs: Mapping[str, Any], f: Callable[..., Any]) -> None:
    """Refuses arguments given by name to a function with ``in_shardings``, which are of positional ones."""
    if kwargs:
        raise ArgumentError.like(
            ValueError(),
            f"{name_of(f)} has in_shardings, which are for positional arguments, and is called with arguments by name.",
            user_line(),
            ", ".join(f"{name}=..." for name in kwargs),
            "Give them by position; or leave in_shardings out and place the arguments, or mark them inside.",
        )


def with_marked_arguments(f: Callable[..., Any], in_shardings: Any) -> Callable[..., Any]:
    """The function with its positional arguments marked as ``in_shardings`` says."""

    @functools.wraps(f)
    def marked(*args: Any, **kwargs: Any) -> Any:
        _refuse_named(kwargs, f)
        return f(*_marked("in_shardings", in_shardings, args))

    return marked


def with_marked_results(f: Callable[..., Any], out_shardings: Any, *, even: bool = False) -> Callable[..., Any]:
    """The function with its results marked as ``out_shardings`` says; ``even`` refuses what does not divide."""

    @functools.wraps(f)
    def marked(*args: Any, **kwargs: Any) -> Any:
        results = _marked("out_shardings", out_shardings, f(*args, **kwargs), even=even)
        return _in_memories(out_shardings, results)

    return marked


def _marked(what: str, specs: Any, tree: Any, *, even: bool = False) -> Any:
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    marked = [
        x
        if mark is None or (array := as_array(x, f"{what}{jax.tree_util.keystr(path)}", what)) is None
        else bind_mark(array, dataclasses.replace(mark, even=even))
        for (path, x), mark in zip(leaves, marks_of_specs(what, specs, tree), strict=True)
    ]
    return jax.tree.unflatten(structure, marked)


def _in_memories(out_shardings: Any, tree: Any) -> Any:
    """The results in the memory that ``out_shardings`` names; where it says nothing in that of their types."""
    said = [memory_of(spec) for _, spec, _ in spread("out_shardings", out_shardings, tree)]
    leaves, structure = jax.tree.flatten(tree)
    moved = [
        x if kind is None or not hasattr(x, "aval") else transferred(x, is_in_host_space(kind))
        for kind, x in zip(said, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, moved)


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


def memories(program: Program, signature: Signature, options: Options) -> dict[str, Any]:
    """The fields of a ``Program`` that say in which memory kinds its inputs come and its results leave.

    An argument comes in the memory in which it is, or in the one that ``in_shardings`` names: an array that is in
    another is moved there before each call. A result leaves in the memory of its type, or in the one that
    ``out_shardings`` names. A ``PartitionSpec`` or an axis name is a sharding in the default memory of the devices.
    """
    asked: list[str | None] = [None] * len(signature.every)
    if options.in_shardings is not None:
        asked[: len(signature.leaves)] = memories_of(options.in_shardings, signature.arguments())
    come = [kind or _kind_of(leaf) for kind, leaf in zip(asked, signature.every, strict=True)]
    leave = [program.output_memory(i) for i in range(len(program.block.outputs))]
    if options.out_shardings is not None:
        results = jax.tree.unflatten(program.out_tree, range(len(leave)))
        if program.references:  # their final values are further results
            results, _ = results
        said = [memory_of(spec) for _, spec, _ in spread("out_shardings", options.out_shardings, results)]
        leave[: len(said)] = [kind or typed for kind, typed in zip(said, leave, strict=False)]
    held = [program.input_memory(i) for i in range(len(program.captured))]
    return {"input_memories": (*held, *come), "output_memories": tuple(leave)}


def _kind_of(leaf: Leaf) -> str:
    """The memory kind in which an argument is; of one that is in none yet, that of its type."""
    return (None if leaf.sharding is None else memory_of(leaf.sharding)) or kind_in_space(is_on_host(leaf.aval))
