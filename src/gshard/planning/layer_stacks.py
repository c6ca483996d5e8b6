"""Finds arguments that are stacks of layers, and makes stages of a pipeline of them.

A stack is an argument ``[layers, ...]`` that a loop scans over and that hands arrays on from layer to layer.
``gshard.search`` marks stacks as ``gshard.pipeline`` would, but on arguments of the traced, differentiated program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from jax.sharding import PartitionSpec

from gshard.core.jax_adapter import scan_counts
from gshard.core.mark import Mark, Schedule
from gshard.core.program import Block, Equation, Program, Value
from gshard.core.rule import PARALLEL
from gshard.rewrite.shard_scan import only_added_to


@dataclasses.dataclass(frozen=True, slots=True)
class LayerStacks:
    """The stacks of layers of a program."""

    layers: int  # their number
    arguments: tuple[int, ...]  # the numbers of the inputs that are stacks
    rows: int  # the length of the first dimension of the largest array that the loops hand on: usually of the batch


def layer_stacks(program: Program) -> LayerStacks | None:
    """The stacks with the most bytes that have one number of layers; None if no loop scans over an argument."""
    inputs = program.block.inputs
    number = {v: i for i, v in enumerate(inputs)}
    rows_of: dict[int, int] = {}
    arguments_of: dict[int, set[int]] = {}
    for e, read in _loops(program.block, {v: (v, 0) for v in inputs if v.shape}):
        layers = int(e.params["length"])
        arguments_of.setdefault(layers, set()).update(number[v] for v in read)
        rows_of.setdefault(layers, max(_carried(e), key=lambda v: v.bytes).shape[0])
    bytes_of = {layers: sum(inputs[i].bytes for i in arguments) for layers, arguments in arguments_of.items()}
    if not bytes_of:
        return None
    layers = max(bytes_of, key=lambda layers: bytes_of[layers])
    return LayerStacks(layers, tuple(sorted(arguments_of[layers])), rows_of[layers])


def with_schedules(program: Program, schedules: Mapping[int, Schedule]) -> Program | None:
    """The program with marks that make stacks of layers the stages of pipelines; None if one of them has a mark."""
    marks = list(program.argument_marks)
    for i, schedule in schedules.items():
        if (known := marks[i]) is not None and known.schedule != schedule:
            return None
        ndim = len(program.block.inputs[len(program.captured) + i].shape)
        open_dims = (PartitionSpec.UNCONSTRAINED,) * (ndim - 1)
        marks[i] = Mark(spec=(schedule.over, *open_dims), source_text=str(schedule), schedule=schedule)
    return dataclasses.replace(program, argument_marks=tuple(marks))


def schedules_of(program: Program) -> dict[int, Schedule]:
    """The arguments, counted without captured arrays, that are marked as stages, with their schedules."""
    marks = enumerate(program.argument_marks)
    return {i: mark.schedule for i, mark in marks if mark is not None and mark.schedule is not None}


def all_schedules(program: Program) -> Iterator[Schedule]:
    """The schedules of all marks."""
    yield from (e.mark.schedule for e in program.block.walk() if e.mark is not None and e.mark.schedule is not None)
    yield from schedules_of(program).values()


def hands_on(e: Equation) -> bool:
    """Whether a loop hands arrays on from iteration to iteration that it does not only add to."""
    return any(_carried(e))


def layers_handed_on(e: Equation, dim_of: Mapping[Value, int]) -> Iterator[tuple[Value, Value, int]]:
    """The results of an equation that are stacks of the same layers as an operand."""
    if e.rule is None:
        return
    for x, own in zip(e.inputs, e.rule.operands, strict=True):
        if not isinstance(x, Value) or x not in dim_of:
            continue
        factors = own[dim_of[x]]
        if len(factors) != 1 or e.rule.factors[factors[0]].kind != PARALLEL:
            continue
        for v, of_result in zip(e.outputs, e.rule.results, strict=True):
            d = of_result.index(factors) if factors in of_result else 0
            if factors in of_result and v.shape[d] == x.shape[dim_of[x]]:
                yield x, v, d


def entering(e: Equation, known: Iterable[Value]) -> dict[Value, Value]:
    """For inputs of an equation's bodies, the value among ``known`` that enters as a whole."""
    values = set(known)
    return {edge.inner: edge.outer for edge in e.edges if not edge.stacked and edge.outer in values}


def _carried(e: Equation) -> list[Value]:
    consts, carry = scan_counts(e.params)
    carried = e.blocks[0].inputs[consts : consts + carry]
    return [v for v, added in zip(carried, only_added_to(e), strict=True) if v.shape and not added]


def _loops(block: Block, known: Mapping[Value, tuple[Value, int]]) -> Iterator[tuple[Equation, set[Value]]]:
    """The loops that hand arrays on, each with the arguments whose layers it scans over."""
    known = dict(known)
    for e in block.equations:
        if e.name == "scan" and hands_on(e):
            stacked = [known[x] for x in e.inputs[sum(scan_counts(e.params)) :] if isinstance(x, Value) and x in known]
            if read := {argument for argument, d in stacked if not d}:
                yield e, read
        for body in e.blocks:
            inner = {v: known[x] for v, x in entering(e, known).items()}
            yield from _loops(body, {v: stack for v, stack in inner.items() if v in body.inputs})
        for x, v, d in layers_handed_on(e, {x: d for x, (_, d) in known.items()}):
            known[v] = known[x][0], d
