"""Marks as constraints: writes marks as ``jax.lax.with_sharding_constraint``.

Under ``jax.jit`` a mark of gshard's is the identity. So those that a function has are constraints that a plan for
``jax.jit`` may need, like those that were found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gshard.core.mark import mark_of_cut, resolve
from gshard.core.program import Program, Value
from gshard.core.sharding import Sharding
from gshard.language.mark_primitive import mark_p
from gshard.planning.added_marks import spec_of_cut, with_marks
from gshard.search.as_marks import FoundMark
from gshard.xla.peer import xla_function
from gshard.xla_programs.plan_compiler import PlanCompiler


def constraint_text(mark: FoundMark) -> str:
    """A mark as JAX writes it."""
    text = mark.text.replace("gshard.replicate(x)", "gshard.shard(x, P())")
    return text.replace("gshard.shard(", "jax.lax.with_sharding_constraint(")


def own_marks(made: PlanCompiler) -> Iterator[FoundMark]:
    """The marks of gshard's that the function has inside, as far as they split over whole axes.

    A mark without a line is none of the function's text: ``out_shardings`` of ``gshard.jit`` are such marks.
    """
    for e in made.program.block.walk():
        if e.primitive is not mark_p or e.mark is None or e.mark.unreduced or not e.line:
            continue
        demand = resolve(e.mark, made.mesh, e.outputs[0].shape, e.line)
        spec = spec_of_cut(Sharding(demand.dims), made.mesh)
        if spec is None or all(demand.open):
            continue
        entries = ["P.UNCONSTRAINED" if is_open else repr(n) for n, is_open in zip(spec, demand.open, strict=True)]
        text = f"gshard.shard(x, P({', '.join(entries)}))"
        yield FoundMark(f"mark at {e.line}", text, 0.0, {e.outputs[0]: Sharding(demand.dims)})


def constrained(made: PlanCompiler, constraints: Sequence[FoundMark]) -> Callable[..., list[Any]] | None:
    """The program with these constraints and without other marks of gshard's; None where one cannot be added."""
    wanted = {v: s for mark in constraints for v, s in mark.shardings.items()}
    own = _marked_values(made.program)
    added = {v: mark_of_cut(s.dims, made.mesh) for v, s in wanted.items() if v not in own}
    program = with_marks(made.program, added) if added else made.program
    return None if program is None else xla_function(program, made.mesh, ignored=own - wanted.keys())


def _marked_values(program: Program) -> set[Value]:
    return {v for e in program.block.walk() if e.primitive is mark_p for v in e.outputs}
