"""Sinks elementwise operators on slices below the pad of their result, so that the slices need not move.

A stencil, or an update of the inside of an array, slices windows, computes with them and pads the result. Each window
would be split evenly over the devices, so nearly all of its elements would move, and those of the result would move
back. Elementwise operators compute the same in the frame of the result, where a mask keeps the elements inside:

    pad(x[2:] + x[:-2], 1)               where(inside, pad(x, (-1, 1)) + pad(x, (1, -1)), 0)     two halos
    pad(sin(x[1:-1]), 1)                 where(inside, sin(x), 0)                                nothing is sent
    pad(2 * x[::2], interior=1)          where(inside, 2 * x, 0)                                 nothing is sent

Elements outside of the mask are computed in vain, so windows must cover a large part of their frame.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax import lax

from gshard.core.program import Equation
from gshard.language.traits import traits_of
from gshard.rewrite.driver import over
from gshard.rewrite.equation_graph import Array, Graph, Others, again
from gshard.rules.shape import one_array

_TIMES = 4  # largest ratio of computed and needed elements
_NODES = 64  # largest number of arrays in frames


@dataclasses.dataclass(frozen=True, slots=True)
class _Frame:
    """The position of an array in a larger one: element ``k`` is at ``offset + step * k`` in each dimension."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    steps: tuple[int, ...]

    def is_all_of(self, x: Array) -> bool:
        return x.shape == self.shape and not any(self.offsets) and all(s == 1 for s in self.steps)

    def padding(self, x: Array) -> tuple[tuple[int, int, int], ...]:
        """The padding configuration of the ``lax.pad`` that puts an array into the frame."""
        ends = [o + s * (m - 1) + 1 for o, s, m in zip(self.offsets, self.steps, x.shape, strict=True)]
        dims = zip(self.offsets, self.shape, ends, self.steps, strict=True)
        return tuple((o, n - end, s - 1) for o, n, end, s in dims)


@dataclasses.dataclass(frozen=True, slots=True)
class _Node:
    """An array in a frame: the result of an equation on arrays in frames, or, without an equation, a padded array."""

    frame: _Frame
    array: Array
    equation: Equation | None = None
    operands: tuple[_Node, ...] = ()


@over("pad")
def sink_pad(graph: Graph) -> Others:
    """Replaces pads of computations on slices by computations on pads."""
    frames = _Frames(graph)
    replacements = ((e, frames.instead_of(e)) for e in graph.equations)
    return {e: new for e, new in replacements if new is not None}


class _Frames:
    """Finds the equations of a block that can be computed in a frame."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.needed: set[Any] = set(graph.outputs)  # values that are computed anyway
        for e in graph.equations:
            if not traits_of(e.name).computes and e.name not in ("slice", "pad"):
                self.needed.update(e.inputs)

    def producer(self, x: Array, *names: str) -> Equation | None:
        e = self.graph.producer(x, *names)
        return e if e is not None and len(e.outputs) == 1 else None

    def instead_of(self, e: Equation) -> list[Equation] | None:
        """The equations that replace a pad; None if it stays."""
        if e.name != "pad" or e.mark is not None or _is_key(e.outputs[0]):
            return None
        u, result = e.inputs[0], e.outputs[0]
        config = [tuple(map(int, c)) for c in e.params["padding_config"]]
        producer = self.producer(u)
        if 0 in u.shape or producer is None or any(min(c) < 0 for c in config):
            return None
        if not traits_of(producer.name).computes:
            return None
        frame = _Frame(result.shape, tuple(low for low, _, _ in config), tuple(i + 1 for _, _, i in config))
        nodes: dict[Any, _Node] = {}
        top = self.node(u, frame, nodes)
        times = math.prod(result.shape) / math.prod(u.shape)
        if top.equation is None or not _is_worth_it(nodes.values(), times):
            return None
        # For slices with a stride, elements next to each other are already on the same device.
        in_step = [s > 1 and s * m == n for n, m, s in zip(frame.shape, u.shape, frame.steps, strict=True)]
        if any(not x.equation and x.array.shape and any(o for o, s in zip(x.frame.offsets, in_step, strict=True) if s)
               for x in nodes.values()):  # fmt: skip
            return None
        leaves = list({x.array: None for x in nodes.values() if x.equation is None})

        def sunk(number: Any, *arrays: Any) -> Any:
            whole = _computed(top, dict(zip(leaves, arrays, strict=True)), {})
            return lax.select(_inside(frame, u.shape), whole, lax.broadcast_in_dim(number, frame.shape, ()))

        return self.graph.write(sunk, (e.inputs[1], *leaves), (result,), e)

    # Arrays in frames.

    def node(self, x: Array, frame: _Frame, nodes: dict[Any, _Node]) -> _Node:
        """The node of an array in a frame; ``nodes`` contains all nodes so far."""
        key = x, frame
        if key not in nodes:
            nodes[key] = _Node(frame, x)  # counts towards ``_NODES`` while its operands are added
            nodes[key] = self._node(x, frame, nodes)
        return nodes[key]

    def _node(self, x: Array, frame: _Frame, nodes: dict[Any, _Node]) -> _Node:
        e = self.producer(x)
        if not x.shape or frame.is_all_of(x) or e is None or len(nodes) > _NODES:
            return _Node(frame, x)
        if e.name == "slice":
            cuts = one_array(e)[0]
            if any(s % cut.step for s, cut in zip(frame.steps, cuts, strict=True)):
                return _Node(frame, x)
            wide = tuple(s // cut.step for s, cut in zip(frame.steps, cuts, strict=True))
            offsets = tuple(o - cut.start * w for o, cut, w in zip(frame.offsets, cuts, wide, strict=True))
            return self.node(e.inputs[0], _Frame(frame.shape, offsets, wide), nodes)
        if e.name == "broadcast_in_dim":
            if any(d for d in e.inputs[0].shape):
                return _Node(frame, x)
            return _Node(frame, x, e, (self.node(e.inputs[0], frame, nodes),))
        same = traits_of(e.name).computes and all(y.shape in ((), x.shape) and not _is_key(y) for y in e.inputs)
        if not same or x in self.needed:
            return _Node(frame, x)
        return _Node(frame, x, e, tuple(self.node(y, frame, nodes) for y in e.inputs))


def _computed(node: _Node, arrays: Mapping[Array, Any], known: dict[Any, Any]) -> Any:
    """Computes the array of a node in its frame, inside a function that ``Graph.write`` traces."""
    key, e = (node.array, node.frame), node.equation
    if key not in known and e is not None:
        operands = [_computed(x, arrays, known) for x in node.operands]
        shape = {"shape": node.frame.shape, "broadcast_dimensions": ()} if e.name == "broadcast_in_dim" else {}
        known[key] = again(e, operands, **shape)
    elif key not in known:
        known[key] = x = arrays[node.array]
        if node.array.shape and not node.frame.is_all_of(node.array):
            known[key] = lax.pad(x, np.zeros((), node.array.dtype), node.frame.padding(node.array))
    return known[key]


def _inside(frame: _Frame, shape: tuple[int, ...]) -> Any:
    """A mask of the elements of a frame that belong to an array of a shape."""
    masks = []
    for d, (n, o, s, m) in enumerate(zip(frame.shape, frame.offsets, frame.steps, shape, strict=True)):
        if (n, o, s) != (m, 0, 1):
            masks.append(lax.broadcast_in_dim(_along(n, o, s, m), frame.shape, (d,)))
    return functools.reduce(lax.bitwise_and, masks)


def _along(n: int, offset: int, step: int, count: int) -> Any:
    """A mask, bool [n], of ``count`` positions from an offset on with a step."""
    position = lax.iota(np.int32, n)
    last = offset + step * (count - 1)
    conditions = []
    if offset > 0:
        conditions.append(position >= np.int32(offset))
    if last < n - 1:
        conditions.append(position <= np.int32(last))
    if step > 1:
        conditions.append(lax.rem(position - np.int32(offset % step), np.int32(step)) == np.int32(0))
    return functools.reduce(lax.bitwise_and, conditions)


def _is_worth_it(nodes: Iterable[_Node], times: float) -> bool:
    """Whether computing in the frame saves more than it wastes: less data moves than with the pad."""
    padded = [node for node in nodes if node.equation is None and node.array.shape]
    if times > _TIMES:
        return False
    moved = sum(not _is_near(node) for node in padded)
    return moved <= (1 if len({node.array for node in padded}) > 1 else 0)


def _is_near(node: _Node) -> bool:
    """Whether an array fills its frame except few elements at the ends."""
    dims = zip(node.frame.offsets, node.frame.shape, node.array.shape, node.frame.steps, strict=True)
    return all(s == 1 and 8 * max(abs(o), abs(n - m - o)) <= max(n, 16) and m >= n for o, n, m, s in dims)


def _is_key(x: Array) -> bool:
    """Whether an array contains random keys, which have no zero."""
    return bool(jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended))
