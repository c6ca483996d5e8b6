"""Zones: which values stand for one device's part, and that they do not meet values that stand for the whole.

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
_WAY_OUT = "Bring it in by gshard.auto_to_manual(x, None, {n}), or parts out by gshard.manual_to_auto."

# Of a value: None for either side, 0 for whole, n for one of n parts.
Zone = int | None


def check_zones(block: Block) -> None:
    """Refuses programs that mix parts and wholes, mark parts, or return them.

    Raises:
        ShardingError: at the user's line.
    """
    if not any(e.name in (_ENTER, _LEAVE, _INSIDE) for e in block.walk()):
        return
    zones: dict[Value, Zone] = dict.fromkeys(block.inputs, 0)
    for zone, last in zip(_run(block, zones), block.outputs, strict=True):
        if zone:
            raise ShardingError(
                "the function returns one device's part.",
                got=f"{last}, one of {zone} parts",
                way_out="Make it whole by gshard.manual_to_auto first.",
            )


def parts_of(block: Block) -> dict[Value, int]:
    """The values that stand for one device's part, each with the number of parts."""
    zones: dict[Value, Zone] = dict.fromkeys(block.inputs, 0)
    if any(e.name in (_ENTER, _INSIDE) for e in block.walk()):
        _run(block, zones)
    return {v: zone for v, zone in zones.items() if zone}


def _run(block: Block, zones: dict[Value, Zone]) -> list[Zone]:
    for e in block.equations:
        inputs = [zones[x] if isinstance(x, Value) else None for x in e.inputs]
        if e.blocks:
            _region(e, zones)
            continue
        zone = _joined(e, inputs)
        parts = e.params.get("partitions") if e.name in (_ENTER, _LEAVE, _INSIDE) else None
        if e.name == _ENTER and zone:
            raise ShardingError(f"this is one of {zone} parts already.", e.line, way_out="Take it apart once.")
        if e.name == _LEAVE and zone != parts and zone is not None:
            what = "is whole" if zone == 0 else f"is one of {zone} parts"
            raise ShardingError(f"manual_to_auto of {parts} parts on a value that {what}.", e.line)
        if e.mark is not None and zone:
            raise ShardingError(
                "one device's part cannot be marked.", e.line, f"one of {zone} parts", "Mark it before or afterwards."
            )
        if zone and e.name in ONCE and not e.params.get("partitioned"):
            raise ShardingError(
                f"'{e.name}' is called once, and this is one of {zone} parts that differ.",
                e.line,
                way_out="Say partitioned=True where the callback has it, or call it with whole arrays.",
            )
        result = parts if e.name in (_ENTER, _INSIDE) else 0 if e.name == _LEAVE else zone
        zones.update(dict.fromkeys(e.outputs, result))
    return [zones[x] if isinstance(x, Value) else None for x in block.outputs]


def _joined(e: Equation, inputs: Sequence[Zone]) -> Zone:
    """The side on which an equation is, from the sides of its operands."""
    sides = {zone for zone in inputs if zone is not None}
    if len(sides) <= 1:
        return sides.pop() if sides else None
    parts = max(sides)
    what = "whole arrays" if 0 in sides else f"parts of {min(sides)}"
    shapes = ", ".join(
        f"{x.dtype_name}[{','.join(map(str, x.shape))}] {'whole' if zone == 0 else f'one of {zone} parts'}"
        for x, zone in zip(e.inputs, inputs, strict=True)
        if isinstance(x, Value) and zone is not None
    )
    raise ShardingError(
        f"'{e.name}' mixes one device's part of {parts} with {what}.", e.line, shapes, _WAY_OUT.format(n=parts)
    )


def _region(e: Equation, zones: dict[Value, Zone]) -> None:
    """Sides go along the edges of a loop or branch until nothing changes."""
    for block in e.blocks:
        zones.update({v: zones.get(v) for v in block.inputs})
    zones.update(dict.fromkeys(e.outputs))
    while True:
        for block in e.blocks:
            _run(block, zones)
        changed = False
        for edge in e.edges:
            for v, other in ((edge.outer, edge.inner), (edge.inner, edge.outer)):
                here, there = zones.get(v), zones.get(other)
                if there is None and here is not None:
                    zones[other] = here
                    changed = True
                elif here is not None and there is not None and here != there:
                    raise ShardingError(
                        f"'{e.name}' carries one device's part where it has a whole array elsewhere.",
                        e.line,
                        f"{v} and {other}",
                        _WAY_OUT.format(n=max(here, there)),
                    )
        if not changed:
            return
