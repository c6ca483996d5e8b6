"""Traces a function and its arguments to a ``Program``, also functions of references, and finds unread marks."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from gshard import rules as _rules
from gshard.core.errors import ArgumentError, TraceError
from gshard.core.jax_adapter import (
    ShardingTypeError,
    closed,
    jaxpr_without_dead_code,
    line_of_exception,
    no_mesh_set,
    sub_jaxprs,
    user_line,
    user_place,
)
from gshard.core.jax_adapter_context import dtypes_in, wide_enough_for
from gshard.core.jax_adapter_jit import jaxpr_and_constants
from gshard.core.jax_adapter_references import (
    discharged,
    is_discharged,
    is_reference_type,
    with_references_as_arguments,
)
from gshard.core.jax_adapter_retracing import as_traced_here
from gshard.core.jax_adapter_tracebacks import without_our_frames
from gshard.core.layout import Layout
from gshard.core.mark import Mark, axes_of_entry
from gshard.core.memory_kinds import is_on_host, kind_in_space
from gshard.core.paths import leaf_names
from gshard.core.phases import collected_seldom
from gshard.core.planning_tables import tabulated, with_tables
from gshard.core.program import Block, Equation, Program
from gshard.core.rule import Rule
from gshard.language.mark_primitive import mark_p, name_p
from gshard.tracing.builder import Builder
from gshard.tracing.permitted import permitted


def traced_by(jitted: Any, *args: Any, **kwargs: Any) -> jax.stages.Traced:
    """The trace of a function from ``jax.jit``. An error of JAX to which gshard can add something is one of gshard."""
    try:
        return jitted.trace(*args, **kwargs)  # type: ignore[no-any-return]
    except (ShardingTypeError, TypeError, ValueError, NameError, OverflowError) as error:
        translated = _translated(jitted, error)
        if translated is error:
            raise
        raise translated from error


def closed_of(f: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The closed jaxpr of a function of pytrees, over its flat arguments, and the pytree of its results."""
    traced = traced_by(jax.jit(f), *args, **kwargs)
    return jaxpr_and_constants(traced)[0], jax.tree.structure(traced.out_info)


def _translated(f: Callable[..., Any], error: Exception) -> Exception:
    """The error to raise for an error of JAX; the same error if gshard has nothing to add."""
    text, name, line = str(error), name_of(f), line_of_exception(error)
    if (hint := _of_arguments(text)) is not None:
        text = text.split("\nThis typically")[0].replace(str(getattr(f, "__wrapped__", f)), name)
        return ArgumentError.like(error, text, user_line(), hint=hint)
    if isinstance(error, NameError):
        return _unbound_axis(error, name, line)
    if isinstance(error, jax.errors.UnexpectedTracerError):
        return leaked(error, name, line)
    if isinstance(error, ShardingTypeError):
        hint = (
            "jax.make_mesh makes axes of type Explicit, for which JAX wants such shardings from you. On a mesh with "
            "axis_types=(jax.sharding.AxisType.Auto,) * n, n axes, gshard chooses them."
        )
        return TraceError.like(error, f"{name} cannot be traced: {text}", line, hint=hint)
    return error


def _of_arguments(text: str) -> str | None:
    """The hint for an error of JAX about an argument of a jitted function; None for other errors."""
    if text.startswith("Non-hashable static arguments"):
        return "Give a tuple or another value that is hashable and does not change."
    if text.startswith("An overflow was encountered while parsing an argument"):
        return "Use integers of 64 bits: jax.config.update('jax_enable_x64', True)."
    if not text.startswith("Error interpreting argument to"):
        return None
    return (
        "A value that is no array is a static argument: gshard.jit(..., static_argnames=...); it must be hashable. "
        "Inside of an argument it is static with eqx.filter_jit in a block of gshard.instead_of_jit."
    )


def leaked(error: jax.errors.UnexpectedTracerError, name: str, line: str | None) -> TraceError:
    """The error for an array that a function computed while it was traced, and that another function reads."""
    made = re.search(r"created on line (\S+?)(?::\d+)? \((.*?)\)", str(error))
    where = f" at {os.path.basename(made[1])} ({made[2]})" if made else ""
    return TraceError.like(
        error,
        f"{name} reads an array that another function computed{where} and stored while it was traced.",
        line,
        str(error).splitlines()[0],
        "Return this array from that function, and pass it as an argument. Inside `with jax.checking_leaks():` JAX "
        "raises the error where the array is stored.",
    )


def _unbound_axis(error: NameError, name: str, line: str | None) -> Exception:
    """The error for a collective over an unbound axis, such as a remaining ``jax.lax.pmean`` of a ``pmap``."""
    match = re.search(r"unbound axis name: (\S+?)\.?(?:\s|$)", str(error))
    if match is None:
        return error  # an undefined Python name
    return TraceError.like(
        error,
        f"{name} uses the axis {match[1]!r} in a collective, and no jax.shard_map or jax.vmap around it has that axis.",
        line,
        str(error),
        "If jax.pmap needed the collective, remove it: here arrays are whole, so a mean over the batch is one over all "
        "devices. A collective of your own belongs inside jax.shard_map.",
    )


def name_of(f: Any) -> str:
    """The name of a function in messages, HLO and profiles; also for partial functions and callable objects."""
    while not hasattr(f, "__name__") and hasattr(f, "func"):
        f = f.func
    return str(getattr(f, "__name__", type(f).__name__))


# Chooses short printed names for the user's source files.


def names_of_files(paths: Iterable[str]) -> dict[str, str]:
    """The shortest end of each path that is not an end of another path.

    >>> names_of_files(["/a/data/utils.py", "/a/model/utils.py", "/a/train.py"])
    {'/a/data/utils.py': 'data/utils.py', '/a/model/utils.py': 'model/utils.py', '/a/train.py': 'train.py'}
    """
    parts = {path: path.split("/") for path in paths}

    def name(path: str) -> str:
        ends = (parts[path][-n:] for n in range(1, len(parts[path])))
        alone = (end for end in ends if sum(other[-len(end) :] == end for other in parts.values()) == 1)
        return "/".join(next(alone, parts[path]))

    return {path: name(path) for path in sorted(parts)}


def with_names_of_files(block: Block, beside: Block | None = None) -> Block:
    """Sets the printed file names of equations whose files share their name with another file."""
    files = _files(block)
    all_files = [*files, *(_files(beside) if beside is not None else [])]
    names = names_of_files({path for _, path in all_files})
    for e, path in files:
        if "/" in names[path].strip("/"):
            e.call_file(names[path])
    return block


def _files(block: Block) -> list[tuple[Equation, str]]:
    """The equations that have a user's file, each with the path of the file."""
    return [(e, place[0]) for e in block.walk() if (place := user_place(e.source_info)) is not None]


# Converts a function of mutable arrays (``jax.new_ref``) to a function of arrays.


def without_references(whole: Any, name: str) -> tuple[Any, tuple[int, ...]]:
    """The closed jaxpr of arrays for a closed jaxpr of references."""
    if is_discharged(whole):
        return whole, ()
    whole = with_references_as_arguments(whole)
    references = tuple(i for i, a in enumerate(whole.in_avals) if is_reference_type(a))
    try:
        converted = discharged(whole)
    except NotImplementedError as error:
        primitive = re.search(r"primitive: (\w+)", str(error))
        line = _line_of(whole, primitive[1]) if primitive else ""
        raise TraceError.like(
            error,
            f"{name} uses a reference (jax.new_ref) where JAX cannot replace it by arrays.",
            line,
            f"JAX: {error}",
            "Read the reference before, give the operation the array, and write its result back after.",
        ) from error
    if len(converted.out_avals) != len(whole.out_avals) + len(references):
        raise TraceError(
            f"{name} freezes a reference that it was given.",
            _line_of(whole, "freeze"),
            hint="Read it with ref[...], and call jax.freeze outside of the function.",
        )
    return converted, references


def _line_of(jaxpr: Any, primitive: str) -> str:
    """The user's line of the first equation of a primitive."""
    for e in closed(jaxpr)[0].eqns:
        if e.primitive.name == primitive:
            return user_line(e.source_info)
        for body in sub_jaxprs(e.params):
            if line := _line_of(body, primitive):
                return line
    return ""


# Finds marks without effect, in all calls of their source line.


def unread_marks(whole: Any) -> tuple[str, ...]:
    """A text for each source line of a jaxpr with marks whose results nothing reads, or only a mark that undoes it."""
    found: dict[tuple[str, str], str] = {}
    for line, text, why in _marks(closed(whole)[0], set()):
        found[line, text] = why and found.get((line, text), why)
    return tuple(f"{line}: {why}" for (line, _), why in found.items() if line and why)


def _marks(jaxpr: Any, seen: set[int]) -> Iterator[tuple[str, str, str]]:
    """For each mark its line, its text, and why it has no effect, if it has none. Each body is visited once."""
    readers: dict[int, list[Any]] = defaultdict(list)
    for reader, values in ((None, jaxpr.outvars), *((eqn, eqn.invars) for eqn in jaxpr.eqns)):
        for v in values:
            readers[id(v)].append(reader)
    for eqn in jaxpr.eqns:
        if eqn.primitive in (mark_p, name_p):
            mark = eqn.params["mark"]
            text = str(mark) if isinstance(mark, Mark) else f"name(x, {str(mark)!r})"
            yield user_line(eqn.source_info), text, _without_effect(mark, text, readers[id(eqn.outvars[0])])
        for inner in sub_jaxprs(eqn.params):
            if id(inner) not in seen:
                seen.add(id(inner))
                yield from _marks(closed(inner)[0], seen)


def _without_effect(mark: Any, text: str, readers: list[Any]) -> str:
    """Why a mark has no effect; an empty string if it has one."""
    if not readers:
        return f"nothing reads the result of {text}: write x = {text}, or leave it out"
    if len(readers) > 1 or readers[0] is None or readers[0].primitive is not mark_p:
        return ""
    after = readers[0].params["mark"]
    first, second = _split_by(mark), _split_by(after)
    axes = [name for entry in (*first.values(), *second.values()) for name in axes_of_entry(entry)]
    if not first or not second or first.keys() == second.keys() or len({*axes}) < len(axes):
        return ""  # to move an axis to another dimension is a reshard
    both = dict(sorted((first | second).items()))
    return f"{after} makes dimension {min(first)} of {text} whole again: write split(x, {both})"


def _split_by(mark: Any) -> dict[int, Any]:
    """The dimension that a call of ``split`` splits over axes, with these; none for other marks."""
    if not isinstance(mark, Mark) or not mark.source_text.startswith("split("):
        return {}
    split = {d: entry for d, entry in enumerate(mark.spec) if axes_of_entry(entry)}
    return split if len(split) == 1 else {}


assert _rules  # the import registers the rules


@without_our_frames
@collected_seldom()
def trace(
    f: Callable[..., Any], *args: Any, argument_marks: Sequence[Mark | None] | None = None, **kwargs: Any
) -> Program:
    """Traces a function with arguments (arrays or ``jax.ShapeDtypeStruct``) without running it.

    Args:
        f: a function of pytrees of arrays.
        args, kwargs: its arguments.
        argument_marks: for each leaf of ``(args, kwargs)`` a mark or None.

    Returns:
        the program, which does not depend on a mesh.

    Raises:
        TraceError: ``f`` branches on the values of its arguments, or is not a function of arrays.

    >>> import jax.numpy as jnp
    >>> print(trace(lambda x: jnp.sin(x).sum(), jnp.zeros((4, 2))))
    program <lambda>
      (%0:f32[4,2]) ->
      %1:f32[4,2] = sin %0   # a b -> a b
      %2:f32[] = reduce_sum %1   # a b -> (); add over a=4; add over b=2
      return %2
    """
    whole, out_tree = closed_of(f, *args, **kwargs)
    return program_of(whole, out_tree, name_of(f), leaf_names(f, (args, kwargs)), argument_marks)


@with_tables
@no_mesh_set()
def program_of(
    whole: Any,
    out_tree: Any,
    name: str,
    names: Sequence[str],
    argument_marks: Sequence[Mark | None] | None = None,
    *,
    as_typed: bool = False,
    layout: Layout | None = None,
    finite: bool = False,
) -> Program:
    """The program of a closed jaxpr."""
    whole, references = without_references(whole, name)
    closed_over = len(whole.in_avals) - len(names)
    if argument_marks is None:
        argument_marks = (None,) * len(names)
    names = (*names, *(f"closed-over reference {i}" for i in range(closed_over)))
    marks = (*argument_marks, *(None,) * closed_over)
    if references:
        out_tree = jax.tree_util.treedef_tuple((out_tree, jax.tree.structure([0] * len(references))))
    unread = unread_marks(whole)
    jaxpr, consts = closed(whole)
    builder = Builder(layout=layout)
    with wide_enough_for(dtypes_in(jaxpr)):
        body = jaxpr_without_dead_code(as_traced_here(jaxpr))
        block = builder.block(body, captured=consts)
        block = builder.marked_by_type(block, jaxpr.outvars, as_typed)
    block = permitted(block, finite=finite)
    with_names_of_files(block)
    inputs = (*consts, *(v.aval for v in jaxpr.invars))
    return Program(
        block=block,
        captured=tuple(consts),
        argument_marks=marks,
        names=(*(f"captured[{i}]" for i in range(len(consts))), *names),
        out_tree=out_tree,
        name=name,
        weak=tuple(bool(getattr(v.aval, "weak_type", False)) for v in jaxpr.outvars),
        named=tuple(builder.named),
        layout=layout,
        references=tuple(len(consts) + i for i in references),
        finite=finite,
        input_memories=tuple(kind_in_space(is_on_host(x)) for x in inputs),
        output_memories=tuple(kind_in_space(is_on_host(v.aval)) for v in jaxpr.outvars),
        dropped=tuple(dict.fromkeys(builder.dropped)),
        fired=tuple(builder.fired),
        unread_marks=unread,
    )


@no_mesh_set()
def block_of(jaxpr: Any, program: Program | None) -> Block:
    """The block of an existing jaxpr, such as the jaxpr of a per-device program."""
    block = Builder(rules=_shared_rules()).block(jaxpr_without_dead_code(jaxpr))
    return with_names_of_files(block, None if program is None else program.block)


@tabulated(1)
def _shared_rules() -> dict[Any, Rule]:
    """The rules that the equations of all these blocks share: shards of one program are of few shapes."""
    return {}
