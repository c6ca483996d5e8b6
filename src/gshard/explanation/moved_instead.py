"""Moved instead: operands that are gathered because moving the other arrays sends less.

In Megatron's tensor parallelism weights stay where they are. Activations are all-gathered before a product, or its
sums are reduce-scattered or all-reduced after it. An all-to-all of a smaller activation, and a gather of the weight,
can send less: then the product runs with the batch split over the axis of the weight. gshard lists
each such line with both numbers, because a user who marks a weight expects it to stay in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from gshard.core.mesh import Atoms
from gshard.core.plan import Plan
from gshard.core.program import Equation, Value, format_bytes
from gshard.core.split import Split, operand_sharding, parts, result_sharding
from gshard.device.fusion_model import is_product
from gshard.explanation.replicated import sent_by
from gshard.planning.candidates import arrays_of, candidates


@dataclasses.dataclass(frozen=True, slots=True)
class MovedInstead:
    """The products of a line that gather their smaller operand over an axis and move other arrays over it."""

    line: str  # the user's source line
    operand: str  # type and shape of what is gathered, a weight as a rule
    axes: str  # names of the mesh axes
    times: int  # how many products run in one call
    sent: int  # bytes that each device sends for them in one call
    stayed: int  # bytes that it would send if the gathered operands stayed, each product by itself

    def __str__(self) -> str:
        products = f"{self.times} product{'s' if self.times > 1 else ''}"
        return (
            f"{self.line}: {products} with {self.operand}: it is gathered over {self.axes}, and the larger arrays are "
            f"moved over {self.axes} by all-to-all: {format_bytes(self.sent)} instead of {format_bytes(self.stayed)} "
            "to all-gather or reduce-scatter them"
        )


def moved_instead(plan: Plan) -> tuple[MovedInstead, ...]:
    """The products of a plan that gather their smallest array and move others over the same axes, most bytes first.

    Equal products of a line are one row. Products that would send as much or less if their operand stayed are left
    out: what decides there is what else reads the same arrays.
    """
    rows: dict[tuple[str, str, str], MovedInstead] = {}
    for e, times in plan.program.block.runs():
        split = plan.splits.get(e)
        if e.rule is None or split is None or not is_product(e.rule) or not e.rule.is_free:
            continue
        found = next(_alternatives(e, split, plan), None)
        if found is not None and found[1] < found[2]:
            (v, axes), sent, stayed = found
            key = e.line, repr(v).partition(":")[2], axes
            old = rows.get(key, MovedInstead(*key, 0, 0, 0))
            sums = old.times + times, old.sent + times * sent, old.stayed + times * stayed
            rows[key] = MovedInstead(*key, *sums)
    return tuple(sorted(rows.values(), key=lambda row: -row.sent))


def _alternatives(e: Equation, split: Split, plan: Plan) -> Iterator[tuple[tuple[Value, str], int, int]]:
    """What is gathered while others move, and over which axes, with the bytes that are sent so and if it stayed."""
    assert e.rule is not None
    rule, mesh, arrays = e.rule, plan.mesh, arrays_of(e, plan.shardings)
    used = {a for atoms in split.values() for a in atoms}
    taken = [operand_sharding(rule, i, split).dims for i in range(len(rule.operands))]
    taken += [result_sharding(rule, i, split).dims for i in range(len(rule.results))]
    homes = [x.sharding.dims if x is not None else () for x in arrays]
    smaller = min((x.bytes for x in arrays if x is not None), default=0)
    for i, v in enumerate(e.inputs):
        if not isinstance(v, Value) or v.bytes > smaller:
            continue
        for d, own in enumerate(homes[i]):
            gathered = tuple(a for a in own if a in used and not any(a in dim for dim in taken[i]))
            if not gathered or not any(_moves(homes[j], taken[j], gathered) for j in range(len(arrays)) if j != i):
                continue
            stays = [
                other
                for other in candidates(rule, arrays, mesh)
                if parts(other, mesh) >= parts(split, mesh)
                and set(gathered) <= set(operand_sharding(rule, i, other).dims[d])
            ]
            if stays:
                least = min(sent_by(rule, other, arrays, mesh) for other in stays)
                yield (v, mesh.format_atoms(gathered)), sent_by(rule, split, arrays, mesh), least


def _moves(home: tuple[Atoms, ...], taken: tuple[Atoms, ...], atoms: Atoms) -> bool:
    """Whether some of the atoms go from one dimension of an array to another."""
    return any(
        a in before and a not in after and any(a in other for other in taken)
        for a in atoms
        for before, after in zip(home, taken, strict=False)
    )
