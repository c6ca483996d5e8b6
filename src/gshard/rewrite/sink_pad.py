"""Framed: what is computed of windows and then padded is computed where the windows were cut from.

A stencil, or an update of the inside of an array, cuts windows, computes with them and puts the result back. Each
window would be spread evenly over the devices, so that nearly all of its elements move, and those of the result move
back. Elementwise it is the same to compute in the frame of the result, and to keep what lies inside:

    pad(x[2:] + x[:-2], 1)               where(inside, pad(x, (-1, 1)) + pad(x, (1, -1)), 0)     two halos
    pad(sin(x[1:-1]), 1)                 where(inside, sin(x), 0)                                nothing is sent
    pad(2 * x[::2], interior=1)          where(inside, 2 * x, 0)                                 nothing is sent

What lies outside is computed for nothing, so windows have to be a good part of their frame.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from gshard.core.program import Constant, Equation, Value
from gshard.core.rule import REDUCE
from gshard.rewrite.cse import is_repeatable
from gshard.rules.elementwise import N_ARY, UNARY

Array = Value | Constant

_ELEMENTWISE = frozenset((*UNARY, *N_ARY)) - {"copy_p", "name", "optimization_barrier"}
_TIMES = 4  # elements that are computed for one that is kept
_NEARLY = 1.25  # where it is hardly more than one
_NODES = 64  # arrays that are followed
_OF_PLACES: dict[str, Callable[..., Any]] = {
    "ge": np.greater_equal, "le": np.less_equal, "eq": np.equal, "and": np.logical_and, "sub": np.subtract,
    "rem": np.fmod,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class _Frame:
    """Where an array's elements stand in a larger one: element ``k`` at ``offset + step * k``."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    steps: tuple[int, ...]

    def is_all_of(self, x: Array) -> bool:
        return x.shape == self.shape and not any(self.offsets) and all(s == 1 for s in self.steps)

    def padding(self, x: Array) -> tuple[tuple[int, int, int], ...]:
        """As ``lax.pad`` has it."""
        ends = [o + s * (m - 1) + 1 for o, s, m in zip(self.offsets, self.steps, x.shape, strict=True)]
        found = zip(self.offsets, self.shape, ends, self.steps, strict=True)
        return tuple((o, n - end, s - 1) for o, n, end, s in found)


@dataclasses.dataclass(frozen=True, slots=True)
class _Node:
    """An array in a frame: an equation on arrays in frames, or (without one) an array that is put there."""

    frame: _Frame
    array: Array
    equation: Equation | None = None
    operands: tuple[_Node, ...] = ()


def in_frames(
    equations: Iterable[Equation],
    outputs: Sequence[Array],
    fresh: Callable[[tuple[int, ...], Any], Value],
    equation: Callable[..., Equation],
) -> list[Equation]:
    """The equations with windows computed in the frame that they are padded to.

    Args:
        equations: of one block.
        outputs: the block's results.
        fresh: a new value of a shape and a dtype.
        equation: an equation of a primitive, its parameters, operands, results, and the source that it is blamed on.
    """
    equations = list(equations)
    if not any(e.name == "pad" for e in equations):
        return equations
    frames = _Frames(equations, outputs, fresh, equation)
    made = [frames.instead_of(e) for e in equations]
    if all(new is None for new in made):
        return equations
    kept = []
    read: set[Any] = set(outputs)
    for e in reversed([e for old, new in zip(equations, made, strict=True) for e in (new or [old])]):
        if not read.isdisjoint(e.outputs) or not is_repeatable(e):
            kept.append(e)
            read.update(e.inputs)
    return kept[::-1]


class _Frames:
    """The equations of a block, and what of them can be computed in a frame."""

    def __init__(
        self,
        equations: Sequence[Equation],
        outputs: Sequence[Array],
        fresh: Callable[..., Value],
        equation: Callable[..., Equation],
    ):
        self.fresh, self.equation = fresh, equation
        self.producers: dict[Any, Equation] = {
            e.outputs[0]: e for e in equations if len(e.outputs) == 1 and e.mark is None
        }
        self.readers: dict[Any, list[Equation]] = {}
        for e in equations:
            for x in dict.fromkeys(e.inputs):
                self.readers.setdefault(x, []).append(e)
        self.needed: set[Any] = set(outputs)  # what is there anyway
        self.summed: set[Any] = set()  # what may be in parts of sums
        for e in equations:
            if e.name not in _ELEMENTWISE and e.name not in ("slice", "pad"):
                self.needed.update(e.inputs)
            if e.mark is None and (_sums(e) or (e.rule and e.rule.linear and not self.summed.isdisjoint(e.inputs))):
                self.summed.update(e.outputs)
        # Where what is padded is moved on, it is not made at all (``rewrite.compose_movement``).
        self.moved = {x for e in equations if self._moves(e) for x in e.inputs}

    def _moves(self, e: Equation) -> bool:
        if e.name in ("add", "add_any"):
            return all(x in self.producers and self.producers[x].name == "pad" for x in e.inputs)
        return e.name not in _ELEMENTWISE

    def instead_of(self, e: Equation) -> list[Equation] | None:
        """The equations that stand for a padding, or None if it stays."""
        if e.name != "pad" or e.mark is not None or _is_key(e.outputs[0]):
            return None
        u, result = e.inputs[0], e.outputs[0]
        config = [tuple(map(int, c)) for c in e.params["padding_config"]]
        maker = self.producers.get(u)
        if 0 in u.shape or maker is None or maker.name not in self.starts(result) or any(min(c) < 0 for c in config):
            return None
        frame = _Frame(result.shape, tuple(low for low, _, _ in config), tuple(i + 1 for _, _, i in config))
        nodes: dict[Any, _Node] = {}
        top = self.node(u, frame, nodes)
        times = math.prod(result.shape) / math.prod(u.shape)
        if top.equation is None or not _is_worth_it(nodes.values(), times):
            return None
        # Of sums that are still to be finished a part is less than all.
        if times > _NEARLY and any(not x.equation and x.array in self.summed for x in nodes.values()):
            return None
        # Every second element, and the one beside each: both are on the same device as they are.
        in_step = [s > 1 and s * m == n for n, m, s in zip(frame.shape, u.shape, frame.steps, strict=True)]
        if any(not x.equation and x.array.shape and any(o for o, s in zip(x.frame.offsets, in_step, strict=True) if s)
               for x in nodes.values()):  # fmt: skip
            return None
        out: list[Equation] = []
        made: dict[Any, Array] = {}
        whole = self.emit(top, e, made, out)
        if result not in self.needed and self.is_chosen_inside(frame, u, result):
            out[-1] = dataclasses.replace(out[-1], outputs=(result,))
            return out
        inside = self.inside(frame, u, e, out)
        outside = self.add(
            lax.broadcast_in_dim_p, _broadcast(frame.shape, ()), (e.inputs[1],), result.dtype, frame, e, out
        )
        out.append(self.equation(lax.select_n_p, {}, (inside, outside, whole), (result,), e.source_info))
        return out

    def starts(self, result: Value) -> Iterable[str]:
        """What may make an array that is padded to ``result``."""
        return _ELEMENTWISE if result in self.moved else _ELEMENTWISE | {"broadcast_in_dim"}

    # What an array is in a frame.

    def node(self, x: Array, frame: _Frame, nodes: dict[Any, _Node]) -> _Node:
        key = x, frame
        if key not in nodes:
            nodes[key] = _Node(frame, x)  # those under way count, too
            nodes[key] = self._node(x, frame, nodes)
        return nodes[key]

    def _node(self, x: Array, frame: _Frame, nodes: dict[Any, _Node]) -> _Node:
        e = self.producers.get(x)
        if not x.shape or frame.is_all_of(x) or e is None or len(nodes) > _NODES:
            return _Node(frame, x)
        if e.name == "slice":
            steps = [int(s) for s in e.params["strides"] or (1,) * len(x.shape)]
            if any(s % own for s, own in zip(frame.steps, steps, strict=True)):
                return _Node(frame, x)
            wide = [s // own for s, own in zip(frame.steps, steps, strict=True)]
            starts = zip(frame.offsets, e.params["start_indices"], wide, strict=True)
            return self.node(
                e.inputs[0], _Frame(frame.shape, tuple(o - int(a) * w for o, a, w in starts), tuple(wide)), nodes
            )
        if e.name == "broadcast_in_dim":
            if any(d for d in e.inputs[0].shape):
                return _Node(frame, x)
            return _Node(frame, x, e, (_Node(frame, e.inputs[0]),))
        same = e.name in _ELEMENTWISE and all(y.shape in ((), x.shape) and not _is_key(y) for y in e.inputs)
        if not same or x in self.needed:
            return _Node(frame, x)
        return _Node(frame, x, e, tuple(self.node(y, frame, nodes) for y in e.inputs))

    # What is made of it.

    def emit(self, node: _Node, at: Equation, made: dict[Any, Array], out: list[Equation]) -> Array:
        key = node.array, node.frame
        if key not in made:
            made[key] = self._emit(node, at, made, out)
        return made[key]

    def _emit(self, node: _Node, at: Equation, made: dict[Any, Array], out: list[Equation]) -> Array:
        x, e = node.array, node.equation
        if e is None:
            if not x.shape or node.frame.is_all_of(x):
                return x
            params = {"padding_config": node.frame.padding(x)}
            return self.add(lax.pad_p, params, (x, Constant(np.zeros((), x.dtype))), x.dtype, node.frame, at, out)
        operands = tuple(self.emit(y, at, made, out) for y in node.operands)
        params = _broadcast(node.frame.shape, ()) if e.name == "broadcast_in_dim" else e.params
        return self.add(e.primitive, params, operands, x.dtype, node.frame, e, out)

    def inside(self, frame: _Frame, u: Array, e: Equation, out: list[Equation]) -> Array:
        """Where the elements of ``u`` stand."""
        found: Array | None = None
        for d, (n, o, s, m) in enumerate(zip(frame.shape, frame.offsets, frame.steps, u.shape, strict=True)):
            if (n, o, s) == (m, 0, 1):
                continue
            own = self.along(n, o, s, m, e, out)
            here = self.add(lax.broadcast_in_dim_p, _broadcast(frame.shape, (d,)), (own,), own.dtype, frame, e, out)
            both = () if found is None else (found, here)
            found = self.add(lax.and_p, {}, both, own.dtype, frame, e, out) if both else here
        assert found is not None, "something is padded"
        return found

    def is_chosen_inside(self, frame: _Frame, u: Array, result: Value) -> bool:
        """Whether all that is read of a padding is what it holds of ``u``: it is chosen from at known places."""
        readers = self.readers.get(result, [])
        if len(readers) != 1 or readers[0].name != "select_n" or readers[0].inputs.index(result) != 2:
            return False
        chosen = self.places(readers[0].inputs[0])
        for d, (n, o, s, m) in enumerate(zip(frame.shape, frame.offsets, frame.steps, u.shape, strict=True)):
            outside = np.ones(n, bool)
            outside[o : o + s * (m - 1) + 1 : s] = False
            if outside.any() and (d not in chosen or (chosen[d] & outside).any()):
                return False
        return True

    def places(self, x: Array) -> dict[int, Any]:
        """Where flags at known places may be true: bool [n] for some dimensions."""
        e = self.producers.get(x)
        if len(x.shape) == 1:
            line = self.line(x)
            return {} if line is None or line.shape != x.shape else {0: line}
        if e is not None and e.name == "broadcast_in_dim":
            dims, own = e.params["broadcast_dimensions"], self.places(e.inputs[0])
            return {dims[d]: line for d, line in own.items() if len(line) == x.shape[dims[d]]}
        if e is None or e.name != "and":
            return {}
        a, b = map(self.places, e.inputs)
        return {d: a[d] & b[d] if d in a and d in b else a.get(d, b.get(d)) for d in {**a, **b}}

    def line(self, x: Array) -> Any:
        """A number, or what is computed along one dimension of its positions; None if more is needed."""
        if isinstance(x, Constant):
            return np.asarray(x.value) if x.shape == () else None
        e = self.producers.get(x)
        if e is None or len(x.shape) > 1:
            return None
        if e.name == "iota":
            return np.arange(x.shape[0], dtype=x.dtype)
        operands = [self.line(y) for y in e.inputs]
        if e.name not in _OF_PLACES or any(y is None for y in operands):
            return None
        return _OF_PLACES[e.name](*operands)

    def along(self, n: int, offset: int, step: int, count: int, e: Equation, out: list[Equation]) -> Array:
        """Where ``count`` elements from an offset on, a step apart, stand among ``n`` of a dimension: bool [n]."""
        line, found = _Frame((n,), (0,), (1,)), list[Array]()

        def made(primitive: Any, operands: tuple[Array, ...], dtype: Any = bool) -> Array:
            return self.add(primitive, {}, operands, np.dtype(dtype), line, e, out)

        counting = {"dtype": np.dtype(np.int32), "shape": (n,), "dimension": 0, "sharding": None}
        place = self.add(lax.iota_p, counting, (), np.dtype(np.int32), line, e, out)
        last = offset + step * (count - 1)
        if offset > 0:
            found.append(made(lax.ge_p, (place, _number(offset))))
        if last < n - 1:
            found.append(made(lax.le_p, (place, _number(last))))
        if step > 1:
            away = made(lax.sub_p, (place, _number(offset % step)), np.int32)
            found.append(made(lax.eq_p, (made(lax.rem_p, (away, _number(step)), np.int32), _number(0))))
        return functools.reduce(lambda a, b: made(lax.and_p, (a, b)), found)

    def add(
        self, primitive: Any, params: dict[str, Any], operands: Any, dtype: Any, frame: _Frame, e: Equation, out: Any
    ) -> Value:
        """One more equation; its result."""
        value = self.fresh(frame.shape, dtype)
        out.append(self.equation(primitive, params, operands, (value,), e.source_info))
        return value


def _is_worth_it(nodes: Iterable[_Node], times: float) -> bool:
    """Whether more is saved than computed for nothing: less has to move than the one array that is padded."""
    computed = [node.equation.name for node in nodes if node.equation is not None]
    put = [node for node in nodes if node.equation is None and node.array.shape]
    if len(computed) == 1 and not put:
        return True  # a number
    if times > _TIMES:
        return False
    far = sum(not _is_near(node) for node in put)
    return far <= (1 if len({node.array for node in put}) > 1 else 0)


def _is_near(node: _Node) -> bool:
    """Whether an array is in its frame already, but for few elements at its ends."""
    near = zip(node.frame.offsets, node.frame.shape, node.array.shape, node.frame.steps, strict=True)
    return all(s == 1 and 8 * max(abs(o), abs(n - m - o)) <= max(n, 16) and m >= n for o, n, m, s in near)


def _sums(e: Equation) -> bool:
    """Whether parts of sums may come out."""
    return bool(e.blocks) or (e.rule is not None and any(f.kind == REDUCE for f in e.rule.factors))


def _is_key(x: Array) -> bool:
    """Whether it holds keys of random numbers, of which there is no zero."""
    return bool(jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended))


def _number(n: int) -> Constant:
    return Constant(np.int32(n))


def _broadcast(shape: tuple[int, ...], dims: tuple[int, ...]) -> dict[str, Any]:
    return {"shape": shape, "broadcast_dimensions": dims, "sharding": None}
