"""Adds marks to values of a program, and prints marks as text.

``explain`` and ``search`` plan a program again under other marks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jax.sharding import PartitionSpec

from gshard.core.mark import Mark, spec_of_axes, text_of_spec
from gshard.core.mesh import Mesh
from gshard.core.program import Block, Equation, Program, Value
from gshard.core.sharding import Sharding
from gshard.language.mark_primitive import mark_p
from gshard.language.region import with_edges
from gshard.language.registry import Call, rule_of
from gshard.tracing.permitted import permitted


def with_marks(program: Program, marks: Mapping[Value, Mark]) -> Program | None:
    """The program with additional marks on these values.

    None if a value cannot be marked: it is marked already, an input of a body, or not an array of the user's program.
    """
    if any(v.made for v in marks):
        return None
    inputs, captured = program.block.inputs, len(program.captured)
    arguments = list(program.argument_marks)
    left = dict(marks)
    for i, v in enumerate(inputs):
        if v in left:
            if i < captured or arguments[i - captured] is not None:
                return None
            arguments[i - captured] = left.pop(v)
    block = _marked(program.block, left) if left else program.block
    if any(mark.unreduced for mark in marks.values()):
        block = permitted(block, finite=program.finite)
    return None if left else dataclasses.replace(program, block=block, argument_marks=tuple(arguments))


def _marked(block: Block, wanted: dict[Value, Mark]) -> Block:
    """The block with marks on its values that are in ``wanted``. Removes these values from ``wanted``."""
    marked_value: dict[Value, Value] = {}
    equations = []
    for e in block.equations:
        bodies = tuple(_marked(body, wanted) for body in e.blocks)
        reads = tuple(marked_value.get(x, x) if isinstance(x, Value) else x for x in e.inputs)
        if any(a is not b for a, b in zip((*bodies, *reads), (*e.blocks, *e.inputs), strict=True)):
            e = with_edges(e, blocks=bodies, inputs=reads)
        equations.append(e)
        for value in e.outputs if e.mark is None else ():
            if value in wanted:
                mark = wanted.pop(value)
                marked = marked_value[value] = Value(value.shape, value.dtype, value.index)
                call = Call(mark_p.name, {"mark": mark}, (value.shape,), (value.shape,), (value.dtype,), mark_p)
                rule = rule_of(call, None)
                equations.append(Equation(mark_p, {"mark": mark}, (value,), (marked,), rule, e.source_info, mark=mark))
    if len(equations) == len(block.equations) and all(a is b for a, b in zip(equations, block.equations, strict=True)):
        return block
    outputs = tuple(marked_value.get(v, v) if isinstance(v, Value) else v for v in block.outputs)
    return Block(block.inputs, tuple(equations), outputs)


def text_of_mark(sharding: Sharding, mesh: Mesh) -> str | None:
    """The mark as users write it; None if it uses a part of an axis, which has no name."""
    spec = spec_of_cut(sharding, mesh)
    if spec is None:
        return None
    return f"gshard.shard(x, {text_of_spec(spec)})" if sharding.atoms else "gshard.replicate(x)"


def spec_of_cut(sharding: Sharding, mesh: Mesh) -> PartitionSpec | None:
    """The splits of the dimensions as a ``PartitionSpec``; None if one uses a part of an axis, which has no name."""
    axes_of_dims = []
    for atoms in sharding.dims:
        names = mesh.format_atoms(atoms).split(",") if atoms else []
        if any(name not in mesh.atoms_of for name in names):
            return None
        axes_of_dims.append(names)
    return spec_of_axes(axes_of_dims)
