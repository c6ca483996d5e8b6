"""Finds the batch dimensions of a loop, and the body of the loop on one micro-batch.

If rows of a batch are one parallel loop from carry to carry (``language.kernel_loops``), the body runs on some rows
without communication. Sums over the batch add up over micro-batches, and must be finite.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from gshard.core.errors import GShardError
from gshard.core.jax_adapter import closed, jaxpr_without_dead_code, no_mesh_set, scan_counts
from gshard.core.mesh import Atoms, Mesh
from gshard.core.program import Equation
from gshard.language.kernel_loops import FunctionLoops, NotProven, Part, Shard, loops_of, on_shards
from gshard.language.region import Interpreter

_AXIS = "micro"


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """The batch dimension of an array."""

    dim: int  # the dimension
    inner: int = 1  # the number of elements of the dimension for each row, if it is merged with other dimensions


@dataclasses.dataclass(frozen=True, slots=True)
class MicroBody:
    """The body of a scan on one micro-batch."""

    rows: int  # the number of rows of a micro-batch
    # the body, a closed jaxpr. Its first argument is whether this is the first micro-batch: values that are equal for
    # all micro-batches are added to a sum only there.
    jaxpr: Any
    # the batch dimension of each input of the body; None for one without a batch dimension
    inputs: tuple[Rows | None, ...]
    outputs: tuple[Rows | None, ...]  # the same for the outputs
    # for each output whether it is a sum over the batch. The sum over all micro-batches is the output then.
    sums: tuple[bool, ...]
    # for each input whether it is a carry that is a sum. It starts with zeros, except for the first micro-batch.
    start_as_sums: tuple[bool, ...]


class Mixed(Exception):
    """An iteration mixes rows of the batch, or its batch cannot be found."""

    def __init__(self, equation: Any = None, rows: int = 0) -> None:
        super().__init__()
        # equation: the equation of a jaxpr that mixes them, or None; rows: the number of rows that the micro-batches do
        # not divide; 0 if they do
        self.equation, self.rows = equation, rows


@no_mesh_set()
def micro_body(loop: Equation, micro_batches: int, known: Mapping[int, Rows]) -> MicroBody:
    """The body of a scan on one micro-batch."""
    shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype, weak_type=v.weak) for v in loop.blocks[0].inputs]
    jaxpr = jax.make_jaxpr(lambda *arrays: Interpreter().run(loop.blocks[0], arrays))(*shapes)
    loops = loops_of(jaxpr)
    first: Mixed | None = None
    for leaf in _candidates(loop, loops, known):
        try:
            return _with_batch(loop, jaxpr, loops, leaf, micro_batches)
        except Mixed as mixed:
            first = first or mixed
    raise first or Mixed()


def _candidates(loop: Equation, loops: FunctionLoops, known: Mapping[int, Rows]) -> Iterator[int]:
    """The loops that may be the batch, the likeliest first."""
    for i, rows in known.items():
        yield from loops.arguments[i][rows.dim][:1]
        return
    consts, carry = scan_counts(loop.params)
    inputs = loop.blocks[0].inputs
    tried = set[int]()
    for i in sorted(range(consts, consts + carry), key=lambda i: -inputs[i].bytes):
        for own in loops.arguments[i]:
            if own and own[0] not in tried:
                tried.add(own[0])
                yield own[0]


def _with_batch(loop: Equation, jaxpr: Any, loops: FunctionLoops, leaf: int, micro_batches: int) -> MicroBody:
    """The body if this loop is the batch."""
    whole, size = loops.table.whole(), loops.table.sizes[leaf]
    if leaf in whole:
        raise Mixed(whole[leaf])
    inputs, outputs = (tuple(_rows(dims, leaf, loops) for dims in own) for own in (loops.arguments, loops.results))
    consts, carry = scan_counts(loop.params)
    if not any(inputs[consts : consts + carry]):
        raise Mixed
    if size % micro_batches:
        raise Mixed(rows=size)
    mesh = Mesh.abstract(**{_AXIS: micro_batches})
    shapes = [
        jax.ShapeDtypeStruct(_shape_of_part(v.shape, rows, micro_batches), v.dtype, weak_type=v.weak)
        for v, rows in zip(loop.blocks[0].inputs, inputs, strict=True)
    ]
    flag = jax.ShapeDtypeStruct((), jnp.bool)
    start_as_sums = [micro_batches > 1 and x for x in _carried_sums(jaxpr, inputs, consts, carry)]
    found: list[Part] = []

    def atoms_of_loop(loop: int) -> Atoms:
        return mesh.atoms if leaf in loops.table.leaves(loop) else ()

    def local(is_first: Any, *arrays: Any) -> list[Any]:
        of_first = lambda x: jnp.where(is_first, x, jnp.zeros_like(x))  # noqa: E731
        shard = Shard(mesh, atoms_of_loop, finite=True, as_part=of_first, rounds=True)
        sum_over = dict.fromkeys(mesh.atoms, "add")
        parts = [Part(x, sum_over if is_sum else {}) for x, is_sum in zip(arrays, start_as_sums, strict=True)]
        found[:] = on_shards(jaxpr, parts, loops.steps, shard)
        return [part.array for part in found]

    try:
        traced = jax.make_jaxpr(local, axis_env=list(mesh.atom_sizes.items()))(flag, *shapes)
    except NotProven as error:
        raise Mixed(error.equation) from None
    except GShardError:
        raise Mixed from None
    sums = tuple(map(_is_sum, found))
    if inputs[consts : consts + carry] != outputs[:carry] or sums[:carry] != tuple(start_as_sums[consts:][:carry]):
        raise Mixed
    _check_position_free(traced)
    return MicroBody(size // micro_batches, traced, inputs, outputs, sums, tuple(start_as_sums))


def _carried_sums(jaxpr: Any, inputs: Sequence[Rows | None], consts: int, carry: int) -> list[bool]:
    """For each input of the body whether it is a carry without a batch dimension that depends on the batch: a sum."""
    body, _ = closed(jaxpr)
    carried = body.invars[consts : consts + carry]
    depends = {v for v, rows in zip(body.invars, inputs, strict=True) if rows is not None}
    while True:
        for eqn in body.eqns:
            if any(not isinstance(v, Literal) and v in depends for v in eqn.invars):
                depends.update(eqn.outvars)
        new = {v for v, w in zip(carried, body.outvars, strict=False) if not isinstance(w, Literal) and w in depends}
        if new <= depends:
            break
        depends |= new
    return [v in depends and rows is None for v, rows in zip(body.invars, inputs, strict=True)]


def _rows(dims: Sequence[Sequence[int]], leaf: int, loops: FunctionLoops) -> Rows | None:
    """The batch dimension of an array of these loops."""
    found = [d for d, own in enumerate(dims) if leaf in own]
    if not found:
        return None
    own = dims[found[0]]
    if len(found) > 1 or own[0] != leaf or own.count(leaf) > 1:
        raise Mixed
    return Rows(found[0], math.prod(loops.table.sizes[other] for other in own[1:]))


def _shape_of_part(shape: Sequence[int], rows: Rows | None, parts: int) -> tuple[int, ...]:
    return tuple(n if rows is None or d != rows.dim else n // parts for d, n in enumerate(shape))


def _is_sum(part: Part) -> bool:
    """Whether a value is a part of a sum over the batch."""
    if any(part.unreduced.get(a) != "add" for a in part.unreduced):
        raise Mixed
    return bool(part.unreduced)


def _check_position_free(jaxpr: Any) -> None:
    """Checks that a body on one micro-batch does not depend on the number of the micro-batch, and has no effects."""
    body, _ = closed(jaxpr)
    for eqn in jaxpr_without_dead_code(body).eqns:
        if eqn.effects:  # those that read the number of a device have an effect, too
            raise Mixed(eqn)
