"""Finds windows of one array that several equations read, so that gshard fetches them once (``comm.shards``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gshard.core.program import Block, Equation, Value
from gshard.core.sharding import Sharding
from gshard.core.split import Split, operand_sharding
from gshard.planning.objective import Windows


class SharedWindows:
    """Collects the windows that strategies fetch. A strategy is given by its node and state in the planning problem."""

    def __init__(self, block: Block):
        self._block_of = dict(_blocks(block))
        self._receivers: dict[tuple[Value, Sharding, Block, object], dict[tuple[int, int], float]] = {}

    def add(self, e: Equation, split: Split, window: Windows, receiver: tuple[int, int], cost: float) -> None:
        """Adds the windows that an equation fetches under a split, and their cost in one call."""
        v, rule = e.inputs[window.operand], e.rule
        if isinstance(v, Value) and rule is not None:
            key = v, operand_sharding(rule, window.operand, split), self._block_of[e], window.which
            self._receivers.setdefault(key, {})[receiver] = cost

    def shared(self) -> Iterator[tuple[Value, Mapping[tuple[int, int], float]]]:
        """Windows that strategies of several nodes fetch: the array, and their cost for each strategy."""
        for (v, *_), receivers in self._receivers.items():
            if len({node for node, _ in receivers}) > 1:
                yield v, receivers


def _blocks(block: Block) -> Iterator[tuple[Equation, Block]]:
    """Each equation with the block that contains it."""
    for e in block.equations:
        yield e, block
        for body in e.blocks:
            yield from _blocks(body)
