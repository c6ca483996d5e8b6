"""Runs the iterations of a scan on the devices that hold their slices, if the iterations are independent.

Such scans are ``lax.map`` over a split dimension, its derivative, and every scan that only adds to its carry. No data
moves between iterations, and sums are reduced once, after the scan. Values inside the body are not split.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from gshard.comm.shards import Shards, identity
from gshard.core.jax_adapter import scan_counts
from gshard.core.program import Block, Constant, Edge, Equation, Program, Value
from gshard.core.rule import REDUCE, Rule, RuleMaker
from gshard.language.region import Interpreter
from gshard.language.traits import sums_in_range, traits_of
from gshard.language.transfer import changes_memory, in_memory_of, is_handed_on, transferred
from gshard.rewrite.driver import Split, where_split
from gshard.rewrite.equation_graph import Neighbours, Others


def _stacked(program: Program) -> list[tuple[Equation, Edge]]:
    return [(e, edge) for e in program.block.walk() for edge in e.edges if edge.stacked]


@where_split(_stacked)
def shard_scan(candidate: tuple[Equation, Edge], split: Split) -> Iterator[Others]:
    """Replaces a scan over a split dimension by an operator without a body."""
    loop, edge = candidate
    inside = (v for body in loop.blocks for v in body.values())
    if split.parts(edge.outer, 0) > 1 and not any(map(split.is_split, inside)) and (rule := rule_of_rounds(loop)):
        yield {loop: [dataclasses.replace(loop, rule=rule, blocks=(), edges=())]}


def rule_of_rounds(e: Equation) -> Rule | None:
    """The rule of a loop as one operator whose iterations are split; None if an iteration depends on another one.

    It is also None if the body contains a mark, a manual region, an effect, or a callback that names a device.
    """
    if e.name != "scan" or e.trip_count < 2 or e.params["jaxpr"].effects:
        return None
    (body,) = e.blocks
    if any(q.mark is not None or (q.rule is not None and not q.rule.is_free) for q in body.walk()):
        return None
    if any(q.params.get("sharding") is not None for q in body.walk()):  # of a callback
        return None
    consts, carry = scan_counts(e.params)
    if not all(only_added_to(e)) or any(v.on_host for v in body.inputs[consts : consts + carry]):
        return None
    make = RuleMaker()
    rounds = make.factor(e.trip_count, REDUCE, "add") if carry else make.factor(e.trip_count)

    def dims(shape: Sequence[int], *, stacked: bool) -> list[tuple[int, ...]]:
        return [rounds, *map(make.replicate, shape[1:])] if stacked else [*map(make.replicate, shape)]

    operands = [dims(v.shape, stacked=i >= consts + carry) for i, v in enumerate(e.inputs)]
    results = [dims(v.shape, stacked=i >= carry) for i, v in enumerate(e.outputs)]

    def local(shards: Shards, *arrays: Any) -> list[Any]:
        atoms = shards.atoms(rounds[0])
        constants = arrays[:consts]
        carried = list(arrays[consts : consts + carry])
        stacks = list(arrays[consts + carry :])
        count = shards.size(rounds[0])
        even = count * shards.mesh.count(atoms) == e.trip_count  # whether all devices have the same number
        if atoms:
            first = shards.is_first(atoms)
            carried = [jnp.where(first, x, jnp.asarray(identity("add", x.dtype), x.dtype)) for x in carried]
        numbers = shards.offset(rounds) + jnp.arange(count, dtype=jnp.int32)  # of the iterations
        replay = _OnDevice()

        def run(carried: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            out = replay.run(body, [*constants, *carried, *slices])
            return out[:carry], out[carry:]

        def skip(carried: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            return list(carried), [in_memory_of(v, jnp.zeros(v.shape, v.dtype)) for v in body.outputs[carry:]]

        def step(carried: Sequence[Any], iteration: tuple[Any, Sequence[Any]]) -> tuple[list[Any], list[Any]]:
            number, slices = iteration
            if even:
                return run(carried, slices)
            return lax.cond(number < e.trip_count, run, skip, list(carried), list(slices))

        final_carry, stacked = lax.scan(
            step, carried, (numbers, stacks), length=count, reverse=e.params["reverse"], unroll=e.params["unroll"]
        )
        return [*final_carry, *stacked]

    return make.rule(operands, results, local=local, flops=e.trip_count * _flops(body), masks_itself=True)


class _OnDevice(Interpreter):
    """Computes in device memory: each equation fetches its operands that are in host memory."""

    def equation(self, e: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
        """Runs one equation without a body."""
        if changes_memory(e):
            return [in_memory_of(e.outputs[0], inputs[0])]
        operands = inputs if is_handed_on(e, {}) else [transferred(x, False) for x in inputs]
        return [in_memory_of(v, x) for v, x in zip(e.outputs, super().equation(e, operands), strict=True)]


def _flops(block: Block) -> int:
    own = sum(e.rule.flops for e in block.equations if e.rule is not None)
    return own + sum(e.trip_count * _flops(body) for e in block.equations for body in e.blocks)


def only_added_to(e: Equation) -> list[bool]:
    """For each carried value of a scan whether an iteration only adds to it or subtracts from it."""
    consts, carry = scan_counts(e.params)
    (body,) = e.blocks
    pairs = zip(body.inputs[consts : consts + carry], body.outputs[:carry], strict=True)
    return [_is_only_added_to(body, start, end) for start, end in pairs]


def _is_only_added_to(body: Block, start: Value, end: Value | Constant) -> bool:
    """Whether an iteration only adds to a carried value or subtracts from it."""
    producer = next((q for q in body.equations if end in q.outputs), None)
    users = [q for q in body.equations for x in q.inputs if x is start or x is end]
    if producer is None or users != [producer] or sum(x is start or x is end for x in body.outputs) != 1:
        return False
    return traits_of(producer.name).adds or (producer.name == "sub" and producer.inputs[0] is start)


_LOOPS = ("scan", "while")
_SAME = ("convert_element_type", "copy", "name")

# The smallest permitted scale. Smaller ones would flush too many parts to zero.
_LEAST = 2.0**-32


def added_in_rounds(name: str, blocks: Sequence[Block]) -> tuple[Block, ...]:
    """The bodies of a region, with rules that permit parts to pass a scaling before they are added to a carry."""
    return tuple(map(_changed, blocks)) if name in _LOOPS else tuple(blocks)


def _changed(block: Block) -> Block:
    graph = Neighbours(block.equations, block.outputs)
    carried = set(block.inputs)
    for e in block.equations:
        if (traits_of(e.name).adds or e.name in _SAME) and not carried.isdisjoint(e.inputs):
            carried.update(e.outputs)

    added: set[Value] = set()  # values that are only scaled and added to a value from the previous iteration
    for e in reversed(block.equations):
        if (traits_of(e.name).adds or _scaled(e) is not None) and (
            e.outputs[0] in added or (e.outputs[0] in graph.outputs and not carried.isdisjoint(e.inputs))
        ):
            added.update(v for v in e.inputs if isinstance(v, Value) and graph.is_read_once(v))

    def changed(e: Equation) -> Equation:
        operand = _scaled(e)
        if operand is None or e.rule is None or e.outputs[0] not in added:
            return e
        linear = (*e.rule.linear, ("add", frozenset((operand,))))
        return dataclasses.replace(e, rule=dataclasses.replace(e.rule, linear=linear))

    equations = tuple(map(changed, block.equations))
    return block if equations == block.equations else Block(block.inputs, equations, block.outputs)


def _scaled(e: Equation) -> int | None:
    """The number of the operand that a product or a division by a literal scales down; None for other equations."""
    if e.name not in ("mul", "div") or not sums_in_range(e.outputs[0].dtype):
        return None
    for scaled, by in ((0, 1), (1, 0)) if e.name == "mul" else ((0, 1),):
        x, literal = e.inputs[scaled], e.inputs[by]
        number = literal.number if isinstance(literal, Constant) else None
        if number and isinstance(x, Value) and _LEAST <= (number if e.name == "mul" else 1 / number) < 1:
            return scaled
    return None
