"""Exported arguments: a row for each array that a function takes, with its path and how the plan splits it.

All forms in which a plan is exported for a framework are made of these rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
from jax.sharding import PartitionSpec

from gshard.core.partition_spec import axes_of_entry
from gshard.core.paths import path_inside, path_of
from gshard.core.program import Value
from gshard.core.sharding import Sharding
from gshard.naming.dimension_metadata import boxes_of
from gshard.planning.added_marks import spec_of_cut
from gshard.xla_programs.plan_compiler import PlanCompiler, spec_text


@dataclasses.dataclass(frozen=True, slots=True)
class ExportedArgument:
    """One array that a function takes, and its sharding."""

    path: str  # ``params/up/kernel``; a node of Flax's that only holds the array and its metadata has no part in it
    value: Value  # its shape and dtype
    spec: PartitionSpec  # its sharding, an entry for each dimension
    memory: str  # the memory kind in which it is

    @property
    def axes(self) -> tuple[tuple[str, ...], ...]:
        """For each dimension the mesh axes that split it."""
        return tuple(map(axes_of_entry, self.spec))

    def __str__(self) -> str:
        shape = ",".join(map(str, self.value.shape))
        return f"{self.path}: {self.value.dtype_name}[{shape}] {spec_text(self.spec)}"


def arguments_of(made: PlanCompiler) -> tuple[ExportedArgument, ...]:
    """The rows of all arguments, those that were given by keyword last."""
    program, tree = made.program, made.found.in_tree
    first, inputs = len(program.captured), program.block.inputs
    numbered = jax.tree.unflatten(tree, range(tree.num_leaves))
    flat = [keys for keys, _ in jax.tree_util.tree_leaves_with_path(numbered)]
    rows = []
    for keys, node in boxes_of(numbered):
        (i,) = jax.tree.leaves(node)
        v, name = inputs[first + i], program.names[first + i]
        parameter = name.removesuffix(jax.tree_util.keystr(flat[i][2:]))
        spec = spec_of_cut(made.come[first + i], made.mesh)
        assert spec is not None, "it is split over whole axes"
        memory = program.input_memory(first + i)
        rows.append(ExportedArgument(path_of(parameter, keys[2:]), v, spec, memory))
    return tuple(rows)


def less_split(made: PlanCompiler) -> Iterator[str]:
    """Lists the arrays that ``jax.jit`` splits less at the boundary of the function than the plan does inside.

    JAX has no arrays in unequal parts, and no name for a part of an axis.
    """
    program, mesh = made.program, made.mesh
    results = jax.tree.unflatten(program.out_tree, range(program.out_tree.num_leaves))
    outs = [f"result {path_inside(keys)}".strip() for keys, _ in jax.tree_util.tree_leaves_with_path(results)]
    arrays = [
        *zip(program.names, program.block.inputs, made.come, strict=True),
        *zip(outs, program.block.outputs, made.leave, strict=False),
    ]
    for name, v, exported in arrays:
        if not isinstance(v, Value):
            continue
        planned = Sharding(made.plan.shardings[v].dims)
        uneven = [d for d, n in enumerate(v.shape) if n % mesh.count(planned.dims[d])]
        part = spec_of_cut(planned, mesh) is None
        if (uneven or part) and planned != exported:
            spec = spec_of_cut(exported, mesh)
            inside = planned.format(mesh, v.shape, v.dtype_name)
            reason = f"{v.shape[uneven[0]]} does not divide evenly" if uneven else "a part of an axis has no name"
            yield f"{name}: {inside} by the plan, {spec_text(spec) if spec is not None else ''} for jax.jit: {reason}"
