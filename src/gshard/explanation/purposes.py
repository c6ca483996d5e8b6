"""Purposes: what the collectives of a program are for, in the terms of data, fully sharded and tensor parallelism.

    all_gather      over data   x12  18.0 MiB  gathers weights for products (FSDP, ZeRO-3)
    all_reduce      over model   x5  15.0 MiB  sums partial results of products (tensor parallelism: row-parallel in the
                                               forward pass, column-parallel in the backward pass)

A purpose follows from the array that is moved, and from the equation that makes or reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from gshard.core.jax_adapter import is_transposed
from gshard.core.plan import Plan
from gshard.core.program import Equation, Value, format_bytes
from gshard.core.spmd import Collective
from gshard.device.fusion_model import is_product
from gshard.naming.array_names import GRADIENT, UPDATE, ArrayNames

_PRODUCT = "sums partial results of products (tensor parallelism: row-parallel forward, column-parallel backward)"
_SCATTERED = f"{_PRODUCT[:-1]}, with sequence parallelism)"
_OTHER = {
    "all_gather": "gathers an array",
    "all_reduce": "combines partial results of a reduction (a norm, a loss, a maximum)",
    "reduce_scatter": "combines partial results of a reduction, and splits the result",
    "all_to_all": "moves a split from one dimension of an activation to another",
    "collective_permute": "sends shards or edges of shards to other devices",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Purpose:
    """Collectives of one kind over the same axes with one purpose."""

    kind: str  # kind, axes: as of a row of ``Explanation.collectives``
    axes: str
    times: int  # how many run in one call of the program
    bytes: int  # what each device sends in all of them
    purpose: str  # what they are for

    def __str__(self) -> str:
        return f"{self.kind:<18} over {self.axes:<12} x{self.times:<4} {format_bytes(self.bytes):>10}  {self.purpose}"


class Purposes(tuple[Purpose, ...]):
    """All purposes, most bytes first; prints as lines."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    __repr__ = __str__


def purposes_of(plan: Plan, collectives: tuple[Collective, ...], names: ArrayNames) -> Purposes:
    """What the collectives of a plan's per-device program are for."""
    program = plan.program
    state = {i for i, _ in program.state(range(len(program.block.inputs)))}
    data = {names.arguments[v].text: v for i, v in enumerate(program.block.inputs) if i not in state}
    atoms_of_data = {a for v in data.values() for a in plan.shardings[v].atoms}
    producers = {v: e for e in program.block.walk() for v in e.outputs}
    sums: dict[tuple[str, str, str], tuple[int, int]] = {}
    for c in collectives:
        key = c.kind, plan.mesh.format_atoms(c.atoms), _purpose(c, names, plan, producers, data, atoms_of_data)
        times, sent = sums.get(key, (0, 0))
        sums[key] = times + c.times, sent + c.total_bytes
    rows = [Purpose(kind, axes, times, sent, purpose) for (kind, axes, purpose), (times, sent) in sums.items()]
    return Purposes(sorted(rows, key=lambda row: -row.bytes))


def _purpose(
    c: Collective,
    names: ArrayNames,
    plan: Plan,
    producers: Mapping[Value, Equation],
    data: Collection[str],
    atoms_of_data: set[str],
) -> str:
    name = names.array(c.value).text
    if name.startswith(GRADIENT):
        if c.kind == "reduce_scatter" and atoms_of_data.isdisjoint(c.atoms):
            return "sums gradients of weights that products gathered over an axis that splits no input"
        if c.kind == "reduce_scatter":
            return "sums gradients of weights, one shard for each device (FSDP, ZeRO)"
        if c.kind == "all_reduce":
            return "sums gradients of weights (data parallelism)"
        return "moves gradients of weights"
    if name.startswith(UPDATE):
        return "gathers updated weights (ZeRO-1)" if c.kind == "all_gather" else "moves updated weights"
    is_read = c.cause is not None and c.cause.rule is not None and is_product(c.cause.rule)
    if c.kind == "all_gather":
        if name in data:
            return "gathers an input"
        if names.is_named(c.value):
            if atoms_of_data.isdisjoint(c.atoms):
                return "gathers weights over an axis that splits no input: this costs less than moving activations"
            return "gathers weights for products (FSDP, ZeRO-3)" if is_read else "gathers weights"
        return "gathers activations for products (sequence parallelism)" if is_read else "gathers activations"
    if c.kind in ("all_reduce", "reduce_scatter") and c.value is not None and _sums_product(c.value, plan, producers):
        if atoms_of_data.isdisjoint(c.atoms):
            return _PRODUCT if c.kind == "all_reduce" else _SCATTERED
        if c.cause is not None and is_transposed(c.cause.source_info):
            return "sums gradients over the batch (data parallelism)"
        return "sums partial results of products whose summed dimension is split"
    if c.kind == "all_to_all" and c.value is None and c.cause is not None:
        return f"sends elements to other devices inside {c.cause.name}"
    return _OTHER[c.kind]


def _sums_product(v: Value, plan: Plan, producers: Mapping[Value, Equation]) -> bool:
    """Whether a value is made of partial results of a product, through equations that keep parts of sums."""
    open_values, seen = [v], set[Value]()
    while open_values:
        value = open_values.pop()
        e = producers.get(value)
        if value in seen or e is None:
            continue
        seen.add(value)
        if e.rule is not None and is_product(e.rule):
            return True
        open_values += [x for x in e.inputs if isinstance(x, Value) and plan.shardings[x].unreduced]
    return False
