"""Batches equal functions of separate arrays, so that devices compute whole ones ("owners" of Muon and Shampoo).

    u = orthogonal(m0), v = orthogonal(m1)     ──▶     u, v = vmap(orthogonal)(stack([m0, m1]))

A split of the batch gives each device whole arrays. They move once before and once after the function, instead of in
each of its products. Planning compares the batched program with the original one (``search.pipeline``), because the
arrays may be too small, or split well already.

A batch is as large as is necessary to keep devices busy, because a device holds the intermediate results of all its
arrays of a batch at a time: one array for each device, or several small ones. A batch that devices cannot share evenly
repeats its last array. The devices that compute it again would wait for the others otherwise.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gshard.core.errors import PlanError
from gshard.core.fired import BATCH_EQUAL_FUNCTIONS, Fired
from gshard.core.jax_adapter import no_mesh_set
from gshard.core.mesh import Mesh
from gshard.core.plan import Plan
from gshard.core.program import Block, Equation, Program
from gshard.language.interpret import Interpreter
from gshard.language.region import with_edges
from gshard.planning.settled import settled
from gshard.rewrite.driver import recorded
from gshard.rewrite.equal_functions import Function, equal_functions, in_order, needed_parts
from gshard.rewrite.equation_graph import written
from gshard.tracing.builder import Builder
from gshard.tracing.permitted import permitted

# Bytes of the arrays that a device has of one batch, unless one array is larger. A kernel that reads and writes as many
# takes several times as long as its launch.
_BUSY = 2**25


def batched(program: Program, mesh: Mesh) -> Program:
    """The program with equal functions batched; the same object if there are none."""
    if mesh.size == 1 or any(fired.rewrite == BATCH_EQUAL_FUNCTIONS for fired in program.fired):
        return program
    made = program.decomposed.get(
        (program.block, BATCH_EQUAL_FUNCTIONS, mesh.size), lambda: _batched(program, mesh.size)
    )
    return program if made is None else dataclasses.replace(program, block=made[0], fired=made[1])


def plan_of_either(program: Program, mesh: Mesh, make: Callable[[Program], Plan]) -> Plan:
    """A plan that was made before, for a settled program or for the same program with batches."""
    try:
        return make(program)
    except PlanError as error:
        with_batches = batched(program, mesh)
        if with_batches is program:
            raise
        try:
            return make(settled(with_batches, mesh).program)
        except PlanError:
            raise error from None


@no_mesh_set()
def _batched(program: Program, devices: int) -> tuple[Block, tuple[Fired, ...]] | None:
    counter = itertools.count(1 + max((v.index for v in program.block.values()), default=0))
    fired: list[Fired] = []
    block = _with_batches(program.block, devices, Builder(counter), fired)
    if block is program.block:
        return None
    return permitted(block, finite=program.finite), (*program.fired, *fired)


def _with_batches(block: Block, devices: int, builder: Builder, fired: list[Fired]) -> Block:
    """The block with batches of equal functions, also in bodies of its equations."""
    batches: list[tuple[Sequence[Function], list[Equation]]] = []
    for group in equal_functions(block):
        for functions, size in _shares(group, devices):
            equations = _batch(functions, size, builder)
            if equations is not None:
                batches.append((functions, equations))
                replaced = dict.fromkeys((e for f in functions for e in f.equations), ())
                others = {**replaced, functions[0].equations[0]: equations}
                fired.append(recorded(BATCH_EQUAL_FUNCTIONS, others, _note(functions, size)))
    gone = {e for functions, _ in batches for f in functions for e in f.equations}
    parts, is_changed = list[tuple[int, Sequence[Equation]]](), bool(batches)
    number = {e: i for i, e in enumerate(block.equations)}
    for e in block.equations:
        if e in gone:
            continue
        bodies = tuple(_with_batches(body, devices, builder, fired) for body in e.blocks)
        if bodies == e.blocks:
            parts.append((number[e], (e,)))
            continue
        is_changed = True
        parts.append((number[e], (with_edges(dataclasses.replace(e, blocks=bodies)),)))
    if not is_changed:
        return block
    parts += [(number[functions[0].equations[0]], equations) for functions, equations in batches]
    places = [place for place, _ in parts]
    order = in_order(places, needed_parts([equations for _, equations in parts], places))
    return Block(block.inputs, tuple(e for i in order for e in parts[i][1]), block.outputs)


def _shares(group: Sequence[Function], devices: int) -> Iterator[tuple[Sequence[Function], int]]:
    """Divides equal functions into batches, each with a size that devices can share evenly.

    If one function would be left over for an additional round, it is not batched: gathering its array sends as much.
    """
    most = devices * max(1, _BUSY // max(group[0].root.bytes, 1))
    for start in range(0, len(group), most):
        functions = group[start : start + most]
        if len(functions) % devices == 1:
            functions = functions[:-1]
        if len(functions) > devices:
            yield functions, -(-len(functions) // devices) * devices
        elif functions:
            yield functions, next(n for n in range(len(functions), devices + 1) if devices % n == 0)


def _note(functions: Sequence[Function], size: int) -> str:
    root, line = functions[0].root, functions[0].equations[0].line
    shape = f"{root.dtype_name}[{','.join(map(str, root.shape))}]"
    repeated = f", one of them {size - len(functions) + 1} times" if size > len(functions) else ""
    return f"{len(functions)} functions of {shape}{repeated}{f' at {line}' if line else ''}"


def _batch(functions: Sequence[Function], size: int, builder: Builder) -> list[Equation] | None:
    """The equations that compute equal functions as one batch; None if one of their operators has no batched form."""
    first, count = functions[0], len(functions)
    outside = list(zip(*(f.outside for f in functions), strict=True))
    own = [i for i, values in enumerate(outside) if any(v is not values[0] for v in values)]  # of each function
    common = [v for i, v in enumerate(first.outside) if i not in own]
    inputs = [*(f.root for f in functions), *(v for i in own for v in outside[i]), *common]

    def function(*arrays: Any) -> list[Any]:
        rows = [*range(count), *[count - 1] * (size - count)]
        columns = [jnp.stack([arrays[k * count + i] for i in rows]) for k in range(1 + len(own))]
        known = dict(zip(common, arrays[(1 + len(own)) * count :], strict=True))

        def of_one(root: Any, *others: Any) -> list[Any]:
            env = {**known, first.root: root, **{first.outside[i]: x for i, x in zip(own, others, strict=True)}}
            Interpreter().evaluate(first.equations, env)
            return [env[v] for v in first.outputs]

        results = jax.vmap(of_one)(*columns)
        return [jax.lax.index_in_dim(y, i, keepdims=False) for y in results for i in range(count)]

    outputs = [v for values in zip(*(f.outputs for f in functions), strict=True) for v in values]
    try:
        return written(builder, function, inputs, outputs, first.equations[0])
    except NotImplementedError:
        return None
