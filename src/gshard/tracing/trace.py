"""Traces a function and its arguments to a ``Program``.

JAX traces the function to a jaxpr. gshard then opens calls (jit, custom derivatives, remat), removes dead code, merges
equal equations, and expands random bits to counters and arithmetic. Each variable becomes a separate value, and each
equation gets its rule or its region.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from gshard import rules as _rules
from gshard.core.garbage import collected_seldom
from gshard.core.jax_adapter import (
    closed,
    jaxpr_without_dead_code,
    no_mesh_set,
)
from gshard.core.jax_adapter_retracing import as_traced_here
from gshard.core.jax_adapter_tracebacks import without_our_frames
from gshard.core.layout import Layout
from gshard.core.mark import Mark
from gshard.core.memory_kinds import is_on_host, kind_in_space
from gshard.core.paths import leaf_names
from gshard.core.planning_tables import tabulated, with_tables
from gshard.core.program import Block, Program
from gshard.core.rule import Rule
from gshard.core.wide import dtypes_in, wide_enough_for
from gshard.tracing.builder import Builder
from gshard.tracing.by_jax import closed_of, name_of
from gshard.tracing.files import with_names_of_files
from gshard.tracing.permitted import permitted
from gshard.tracing.references import without_references
from gshard.tracing.stage_loops import with_stage_loops
from gshard.tracing.unread_marks import unread_marks

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
        body = jaxpr_without_dead_code(with_stage_loops(as_traced_here(jaxpr)))
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
