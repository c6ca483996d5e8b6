"""Computes along the dimensions that a dimension was merged from, instead of along the merged one.

Split along the inner one of two dimensions, their product would be in strides, which no sharding expresses. The array
would have to move before the dimensions are merged, and back after they are parted. Merged later or never, it stays:

    reshape(x, (B * S, D)) @ w, and reshaped back       einsum("bsd,df->bsf", x, w)       nothing is sent
    mean over B * S of losses of merged tokens          sums over b and s

An array in *fine* form has for each of its dimensions one or several, those that were merged. It is followed through
operators that treat them all alike (elementwise, products, sums, transposes, look-ups of each row), and merged at any
other operator. Where that merges as much as before, the program stays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jax import lax

from gshard.core.program import Equation, Value
from gshard.language.merged_dims import Fine, Groups, flat, groups_of
from gshard.language.region import with_edges
from gshard.language.traits import traits_of
from gshard.rewrite.driver import over
from gshard.rewrite.equation_graph import Array, Graph, Others


@over("reshape")
def split_merged_dims(graph: Graph) -> Others:
    """Equations on merged dimensions become equations on the dimensions apart, where fewer arrays are merged then."""
    kept: frozenset[Value] = frozenset()  # merged where they were
    while any(_merges(e) and e.outputs[0] not in kept for e in graph.equations):
        attempt = _Attempt(graph, kept)
        others = attempt.run()
        in_vain = attempt.in_vain()
        if not in_vain:
            return others
        kept |= in_vain
    return {}


def _merges(e: Equation) -> bool:
    if e.name != "reshape" or e.mark is not None or e.params.get("dimensions") is not None:
        return False
    (x,), (y,) = e.inputs, e.outputs
    if not isinstance(x, Value) or not math.prod(y.shape):
        return False
    return bool(_joints(groups_of(x.shape, y.shape) or ()))


def _joints(groups: Groups) -> int:
    """Where dimensions are joined."""
    return sum(len(group) - 1 for group in groups)


def _apart(groups: Groups) -> Groups:
    """The groups with only the first merged dimension apart, and none if its rows would become short.

    The last two dimensions are in tiles of so many rows on some devices, and would be padded to these.
    """
    at = next((i for i, group in enumerate(groups) if len(group) > 1), None)
    if at is not None and at == len(groups) - 2 and groups[at][-1] < _TILE:
        at = None
    return tuple(group if i == at else (math.prod(group),) for i, group in enumerate(groups))


def _groups(groups: Groups, x: Array) -> Groups:
    """The groups of an array, which may have dimensions of one element that stands for all."""
    return tuple(g if math.prod(g) == n else (1,) * len(g) for g, n in zip(groups, x.shape, strict=True))


def _wanted(groups: Groups, x: Array) -> tuple[int, ...]:
    return flat(_groups(groups, x))


_TILE = 8  # rows
_DEEP = 8  # equations that are rewritten for one


class _Attempt:
    """One block, with all that is merged apart but what is kept."""

    def __init__(self, graph: Graph, kept: frozenset[Value]):
        self.graph, self.kept = graph, kept
        self.fine: dict[Array, Fine] = {}
        self.is_there: set[Array] = set()  # of those in fine form, which are merged as well
        self.instead: dict[Array, Any] = {}  # another array, where that is the same
        self.roots: list[tuple[frozenset[Value], int]] = []  # what would have been merged: elements times joints
        self.merged: list[tuple[frozenset[Value], int]] = []  # what is
        self.made: list[Equation] = []
        self.mine: set[Array] = set()  # results of new equations

    def run(self) -> Others:
        made: dict[Equation, list[Equation]] = {}
        for e in self.graph.equations:
            if not self.follow(e):
                for x in e.inputs:
                    self.merge(x)
                self.made.append(e)
            made[e], self.made = self.made, []
        for x in self.graph.outputs:
            self.merge(x)
        made[e] += self.made
        renamed = ((e, [self.renamed(q) for q in new]) for e, new in made.items())
        return {e: new for e, new in renamed if new != [e]}

    def in_vain(self) -> frozenset[Value]:
        """Places where merging later is no less of it."""
        of: dict[Value, frozenset[Value]] = {}
        for roots, _ in (*self.roots, *self.merged):
            together = frozenset().union(roots, *(of.get(r, ()) for r in roots))
            of.update(dict.fromkeys(together, together))
        before, after = dict.fromkeys(of.values(), 0), dict.fromkeys(of.values(), 0)
        for roots, size in self.roots:
            before[of[next(iter(roots))]] += size
        for roots, size in self.merged:
            after[of[next(iter(roots))]] += size
        return frozenset().union(*(together for together in before if after[together] >= before[together]))

    def renamed(self, e: Equation) -> Equation:
        inputs = tuple(self.instead.get(x, x) for x in e.inputs)
        outputs = tuple(self.instead.get(y, y) for y in e.outputs)
        if inputs == e.inputs and outputs == e.outputs:
            return e
        new = dataclasses.replace(e, inputs=inputs, outputs=outputs)
        return with_edges(new) if e.blocks else new

    def add(self, at: Equation, params: dict[str, Any], inputs: Sequence[Array], shape: tuple[int, ...], dtype: Any,
            primitive: Any = None) -> Value:  # fmt: skip
        """Appends an equation, and returns its result."""
        value = self.graph.add(self.made, at, primitive or at.primitive, params, inputs, shape, dtype)
        self.mine.add(value)
        return value

    def reshaped(self, at: Equation, x: Array, shape: tuple[int, ...], result: Value | None = None) -> Array:
        """An array in another shape, as ``result`` or as a new value."""
        if x.shape == shape and result is None:
            return x
        params = {"new_sizes": shape, "dimensions": None, "sharding": None}
        value = self.graph.add(self.made, at, lax.reshape_p, params, (x,), shape, x.dtype, result)
        self.mine.add(value)
        return value

    def merge(self, x: Array) -> None:
        """Computes a value of the program whose fine form is known."""
        if x not in self.fine or x in self.is_there:
            return
        own, at = self.fine[x], self.graph.producer(x)
        assert isinstance(x, Value)
        assert at is not None
        self.reshaped(at, own.array, x.shape, x)
        self.is_there.add(x)
        self.merged.append((own.roots, _joints(own.groups) * math.prod(x.shape)))

    # Equations on arrays in fine form.

    def follow(self, e: Equation) -> bool:
        """Makes an equation on arrays in fine form; False if it has to stay unchanged."""
        if e.mark is not None or e.blocks:
            return False
        if e.name == "reshape":
            return self.reshape(e)
        if not any(x in self.fine for x in e.inputs):
            return False
        traits = traits_of(e.name)
        if traits.computes:
            return self.elementwise(e)
        return traits.merged is not None and traits.merged(self, e)

    def note(self, e: Equation, array: Value, groups: Groups, which: int = 0) -> bool:
        """Notes what a result of an equation is in fine form."""
        roots = self.roots_of(e)
        self.roots.append((roots, 0))  # they stand or fall together
        if _joints(groups):
            self.fine[e.outputs[which]] = Fine(array, groups, roots)
        else:
            self.instead[array] = e.outputs[which]
        return True

    def roots_of(self, e: Equation) -> frozenset[Value]:
        return frozenset[Value]().union(*(self.either(x).roots for x in e.inputs))

    def reshape(self, e: Equation) -> bool:
        (x,), (y,) = e.inputs, e.outputs
        own = self.fine.get(x)
        if own is None and (y in self.kept or not _merges(e)):
            return False
        source = x if own is None else own.array
        every = groups_of(source.shape, y.shape)
        if every is None or e.params.get("dimensions") is not None:
            return False
        groups = _apart(every)
        roots = frozenset((y,)) if own is None else own.roots
        self.roots.append((roots, _joints(groups_of(x.shape, y.shape) or ()) * math.prod(y.shape)))
        self.merged.append((roots, (_joints(every) - _joints(groups)) * math.prod(y.shape)))
        if _joints(groups):
            self.fine[y] = Fine(self.reshaped(e, source, flat(groups)), groups, roots)
        elif source.shape == y.shape and source in self.mine and source not in self.instead:
            self.instead[source] = y
        elif source.shape == y.shape and y not in self.graph.outputs:
            self.instead[y] = self.instead.get(source, source)
        else:
            self.made.append(self.graph.changed(e, (source,)))
        return True

    def elementwise(self, e: Equation) -> bool:
        if len(e.outputs) > 1:
            return False
        first = next(self.fine[x] for x in e.inputs if x in self.fine)
        shape = e.outputs[0].shape
        groups = tuple(g if math.prod(g) == n else (n,) for g, n in zip(first.groups, shape, strict=True))
        for x in e.inputs:
            if x in self.fine:
                groups = tuple(max(g, h, key=len) if len(g) == 1 or len(h) == 1 else g
                               for g, h in zip(groups, self.fine[x].groups, strict=True))  # fmt: skip
        operands = self.operands(e, [groups] * len(e.inputs))
        if operands is None:
            return False
        return self.note(e, self.add(e, e.params, operands, flat(groups), e.outputs[0].dtype), groups)

    def operands(self, e: Equation, groups: Sequence[Groups]) -> list[Array] | None:
        """The operands of an equation with their dimensions as in some groups; None if one was merged from others."""
        found = [self.free_in(x, own, e, _DEEP) for x, own in zip(e.inputs, groups, strict=True)]
        left = [i for i, x in enumerate(found) if x is None]
        if any(e.inputs[i] in self.fine for i in left):
            return None
        # To part one array is as bad as to merge another.
        parting = sum(_joints(groups[i]) * math.prod(e.inputs[i].shape) for i in left)
        own = {x: self.fine[x].groups for x in e.inputs if x in self.fine and x not in self.is_there}
        if left and parting >= sum(_joints(g) * math.prod(x.shape) for x, g in own.items()):
            return None
        self.merged.append((self.roots_of(e), parting))
        parted = {i: self.reshaped(e, e.inputs[i], _wanted(groups[i], e.inputs[i])) for i in left}
        return [parted[i] if x is None else x for i, x in enumerate(found)]

    def free_in(self, x: Array, groups: Groups, e: Equation, depth: int) -> Array | None:
        """The same, if that moves nothing."""
        if not x.shape:
            return x
        shape, own = _wanted(groups, x), self.fine.get(x)
        if own is not None:
            # Of one element there may be as many dimensions as one likes.
            alike = all(g == h or math.prod(g) == 1 for g, h in zip(own.groups, _groups(groups, x), strict=True))
            return self.reshaped(e, own.array, shape) if alike else None
        if all(len(g) == 1 or n == 1 for g, n in zip(groups, x.shape, strict=True)):
            return self.reshaped(e, x, shape)
        at = self.graph.producer(x)
        return None if at is None or depth == 0 else self.again(at, _groups(groups, x), depth)

    def again(self, at: Equation, wanted: Groups, depth: int) -> Array | None:
        """Computes a value that depends on no array, or on smaller ones, a second time."""
        shape, dtype = flat(wanted), at.outputs[0].dtype
        place = Fine(at.outputs[0], wanted, frozenset())
        if at.name == "iota" and len(wanted[at.params["dimension"]]) == 1:
            return self.add(at, {**at.params, "shape": shape, "dimension": place.dims(at.params["dimension"])[0]},
                            (), shape, dtype)  # fmt: skip
        if at.name == "broadcast_in_dim":
            (x,) = at.inputs
            dims = at.params["broadcast_dimensions"]
            found = self.free_in(x, tuple(wanted[d] for d in dims), at, depth - 1)
            if found is None:
                return None
            return self.add(at, {**at.params, "shape": shape, "broadcast_dimensions": place.all_dims(dims)},
                            (found,), shape, dtype)  # fmt: skip
        if traits_of(at.name).computes and len(at.outputs) == 1:
            operands = [self.free_in(x, wanted, at, depth - 1) for x in at.inputs]
            arrays = [x for x in operands if x is not None]
            return self.add(at, at.params, arrays, shape, dtype) if len(arrays) == len(operands) else None
        return None

    def either(self, x: Array) -> Fine:
        """An array in fine form, or one none of whose dimensions was merged."""
        return self.fine.get(x) or Fine(x, tuple((n,) for n in x.shape), frozenset())
