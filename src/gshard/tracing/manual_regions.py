"""Checks that values of one device's shard and whole values are not mixed in manual regions.

From ``auto_to_manual`` to ``manual_to_auto`` a value is a part; what is computed from parts is one too. Literals and
what is made from nothing (a counter) belong to either side. An equation that mixes both sides would compute something
else on every device without anybody having said so, and so would a derivative: it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from gshard.core.errors import ShardingError
from gshard.core.program import Block, Equation, Value
from gshard.rules.callback import ONCE

_ENTER, _LEAVE, _INSIDE = "auto_to_manual", "manual_to_auto", "part_index"
_HINT = "Bring it in by gshard.auto_to_manual(x, None, {n}), or parts out by gshard.manual_to_auto."

# Of a value: None for either side, 0 for whole, n for one of n parts.
Side = int | None


def check_manual_regions(block: Block) -> None:
    """Refuses programs that mix parts and wholes, mark parts, or return them.

    Raises:
        ShardingError: at the user's line.
    """
    if not any(e.name in (_ENTER, _LEAVE, _INSIDE) for e in block.walk()):
        return
    sides: dict[Value, Side] = dict.fromkeys(block.inputs, 0)
    for side, last in zip(_run(block, sides), block.outputs, strict=True):
        if side:
            raise ShardingError(
                "the function returns one device's part.",
                got=f"{last}, one of {side} parts",
                hint="Make it whole by gshard.manual_to_auto first.",
            )


def parts_of(block: Block) -> dict[Value, int]:
    """The values that stand for one device's part, each with the number of parts."""
    sides: dict[Value, Side] = dict.fromkeys(block.inputs, 0)
    if any(e.name in (_ENTER, _INSIDE) for e in block.walk()):
        _run(block, sides)
    return {v: side for v, side in sides.items() if side}


def _run(block: Block, sides: dict[Value, Side]) -> list[Side]:
    for e in block.equations:
        inputs = [sides[x] if isinstance(x, Value) else None for x in e.inputs]
        if e.blocks:
            _region(e, sides)
            continue
        side = _side_of(e, inputs)
        parts = e.params.get("partitions") if e.name in (_ENTER, _LEAVE, _INSIDE) else None
        if e.name == _ENTER and side:
            raise ShardingError(f"this is one of {side} parts already.", e.line, hint="Take it apart once.")
        if e.name == _LEAVE and side != parts and side is not None:
            what = "is whole" if side == 0 else f"is one of {side} parts"
            raise ShardingError(f"manual_to_auto of {parts} parts on a value that {what}.", e.line)
        if e.mark is not None and side:
            raise ShardingError(
                "one device's part cannot be marked.", e.line, f"one of {side} parts", "Mark it before or afterwards."
            )
        if side and e.name in ONCE and not e.params.get("partitioned"):
            raise ShardingError(
                f"'{e.name}' is called once, and this is one of {side} parts that differ.",
                e.line,
                hint="Say partitioned=True where the callback has it, or call it with whole arrays.",
            )
        result = parts if e.name in (_ENTER, _INSIDE) else 0 if e.name == _LEAVE else side
        sides.update(dict.fromkeys(e.outputs, result))
    return [sides[x] if isinstance(x, Value) else None for x in block.outputs]


def _side_of(e: Equation, inputs: Sequence[Side]) -> Side:
    """The side on which an equation is, from the sides of its operands."""
    found = {side for side in inputs if side is not None}
    if len(found) <= 1:
        return found.pop() if found else None
    parts = max(found)
    what = "whole arrays" if 0 in found else f"parts of {min(found)}"
    shapes = ", ".join(
        f"{x.dtype_name}[{','.join(map(str, x.shape))}] {'whole' if side == 0 else f'one of {side} parts'}"
        for x, side in zip(e.inputs, inputs, strict=True)
        if isinstance(x, Value) and side is not None
    )
    raise ShardingError(
        f"'{e.name}' mixes one device's part of {parts} with {what}.", e.line, shapes, _HINT.format(n=parts)
    )


def _region(e: Equation, sides: dict[Value, Side]) -> None:
    """Sides go along the edges of a loop or branch until nothing changes."""
    for block in e.blocks:
        sides.update({v: sides.get(v) for v in block.inputs})
    sides.update(dict.fromkeys(e.outputs))
    while True:
        for block in e.blocks:
            _run(block, sides)
        changed = False
        for edge in e.edges:
            for v, other in ((edge.outer, edge.inner), (edge.inner, edge.outer)):
                here, there = sides.get(v), sides.get(other)
                if there is None and here is not None:
                    sides[other] = here
                    changed = True
                elif here is not None and there is not None and here != there:
                    raise ShardingError(
                        f"'{e.name}' carries one device's part where it has a whole array elsewhere.",
                        e.line,
                        f"{v} and {other}",
                        _HINT.format(n=max(here, there)),
                    )
        if not changed:
            return
