"""Computes along the dimensions from which a dimension was merged, instead of along the merged dimension.

If two dimensions are merged and the inner one is split, the parts of the merged dimension are strided, which no
sharding can express. The array would have to move before the merge, and back after the dimensions are separated. If the
merge happens later or never, the array stays:

    reshape(x, (B * S, D)) @ w, and reshaped back       einsum("bsd,df->bsf", x, w)       nothing is sent
    mean over B * S of losses of merged tokens          sums over b and s

An array in *fine* form has one or several dimensions for each dimension of the merged array. The rewrite keeps the fine
form through operators that work along each dimension separately (elementwise operators, products, sums, transposes,
look-ups of rows), and merges the array at other operators. If this merges as many elements as before, the program
stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax import lax

from gshard.core.program import Equation, Value
from gshard.language.traits import Fine, Groups, flat, groups_of, traits_of
from gshard.rewrite.driver import over
from gshard.rewrite.equation_graph import Array, Graph, Others, substituted


@over("reshape")
def split_merged_dims(graph: Graph) -> Others:
    """Replaces equations on merged dimensions by equations on separate dimensions, if fewer arrays are merged then."""
    kept: frozenset[Value] = frozenset()  # values that are merged at their original position
    while any(_merges(e) and e.outputs[0] not in kept for e in graph.equations):
        attempt = _Attempt(graph, kept)
        others = attempt.run()
        useless = attempt.useless_roots()
        if not useless:
            return others
        kept |= useless
    return {}


def _merges(e: Equation) -> bool:
    if e.name != "reshape" or e.mark is not None or e.params.get("dimensions") is not None:
        return False
    (x,), (y,) = e.inputs, e.outputs
    if not isinstance(x, Value) or not math.prod(y.shape):
        return False
    return bool(_joints(groups_of(x.shape, y.shape) or ()))


def _joints(groups: Groups) -> int:
    """The number of boundaries between merged dimensions."""
    return sum(len(group) - 1 for group in groups)


def _apart(groups: Groups) -> Groups:
    """The groups in which only the first merged dimension is separate; no dimension if its rows would be short.

    Some devices store the last two dimensions in tiles of ``_TILE`` rows, and would pad shorter rows.
    """
    separate = next((i for i, group in enumerate(groups) if len(group) > 1), None)
    if separate is not None and separate == len(groups) - 2 and groups[separate][-1] < _TILE:
        separate = None
    return tuple(group if i == separate else (math.prod(group),) for i, group in enumerate(groups))


def _groups(groups: Groups, x: Array) -> Groups:
    """The groups of an array, which may have dimensions of one element that broadcast."""
    return tuple(g if math.prod(g) == n else (1,) * len(g) for g, n in zip(groups, x.shape, strict=True))


def _fine_shape(groups: Groups, x: Array) -> tuple[int, ...]:
    return flat(_groups(groups, x))


_TILE = 8  # rows
_DEEP = 8  # largest depth of equations that are computed again


class _Attempt:
    """One attempt to rewrite a block: keeps arrays in fine form, except for the roots in ``kept``."""

    def __init__(self, graph: Graph, kept: frozenset[Value]):
        self.graph = graph
        self.kept = kept
        self.fine: dict[Array, Fine] = {}
        self.is_there: set[Array] = set()  # arrays with a fine form that are also merged
        self.same_as: dict[Array, Any] = {}  # the array that replaces an equal one
        self.roots: list[tuple[frozenset[Value], int]] = []  # merges of the program: elements times joints
        self.merged: list[tuple[frozenset[Value], int]] = []  # merges of the rewritten program
        self.made: list[Equation] = []
        self.mine: set[Array] = set()  # results of new equations

    def run(self) -> Others:
        """The replaced equations with their replacements."""
        new_equations: dict[Equation, list[Equation]] = {}
        for e in self.graph.equations:
            if not self.follow(e):
                for x in e.inputs:
                    self.merge(x)
                self.made.append(e)
            new_equations[e], self.made = self.made, []
        for x in self.graph.outputs:
            self.merge(x)
        new_equations[e] += self.made
        others = ((e, [substituted(q, self.same_as) for q in new]) for e, new in new_equations.items())
        return {e: new for e, new in others if new != [e]}

    def useless_roots(self) -> frozenset[Value]:
        """The roots for which the rewritten program merges as many elements as before."""
        component_of: dict[Value, frozenset[Value]] = {}
        for roots, _ in (*self.roots, *self.merged):
            component = frozenset().union(roots, *(component_of.get(r, ()) for r in roots))
            component_of.update(dict.fromkeys(component, component))
        before, after = dict.fromkeys(component_of.values(), 0), dict.fromkeys(component_of.values(), 0)
        for roots, size in self.roots:
            before[component_of[next(iter(roots))]] += size
        for roots, size in self.merged:
            after[component_of[next(iter(roots))]] += size
        return frozenset().union(*(component for component in before if after[component] >= before[component]))

    def add(self, at: Equation, params: dict[str, Any], inputs: Sequence[Array], shape: tuple[int, ...], dtype: Any,
            primitive: Any = None) -> Value:  # fmt: skip
        """Appends an equation, and returns its result."""
        value = self.graph.add(self.made, at, primitive or at.primitive, params, inputs, shape, dtype)
        self.mine.add(value)
        return value

    def reshaped(self, at: Equation, x: Array, shape: tuple[int, ...], result: Value | None = None) -> Array:
        """Reshapes an array to ``result``, or to a new value."""
        if x.shape == shape and result is None:
            return x
        params = {"new_sizes": shape, "dimensions": None, "sharding": None}
        value = self.graph.add(self.made, at, lax.reshape_p, params, (x,), shape, x.dtype, result)
        self.mine.add(value)
        return value

    def merge(self, x: Array) -> None:
        """Computes an array from its fine form, if it has one."""
        if x not in self.fine or x in self.is_there:
            return
        fine = self.fine[x]
        producer = self.graph.producer(x)
        assert isinstance(x, Value)
        assert producer is not None
        self.reshaped(producer, fine.array, x.shape, x)
        self.is_there.add(x)
        self.merged.append((fine.roots, _joints(fine.groups) * math.prod(x.shape)))

    # Equations on arrays in fine form.

    def follow(self, e: Equation) -> bool:
        """Appends an equation in fine form; returns False if the equation must stay unchanged."""
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
        """Records the fine form of a result of an equation; returns True."""
        roots = self.roots_of(e)
        self.roots.append((roots, 0))  # connects the roots: they are kept or rewritten together
        if _joints(groups):
            self.fine[e.outputs[which]] = Fine(array, groups, roots)
        else:
            self.same_as[array] = e.outputs[which]
        return True

    def roots_of(self, e: Equation) -> frozenset[Value]:
        """The roots of all operands of an equation."""
        return frozenset[Value]().union(*(self.either(x).roots for x in e.inputs))

    def reshape(self, e: Equation) -> bool:
        """Follows a reshape; returns False if it must stay unchanged."""
        (x,), (y,) = e.inputs, e.outputs
        fine = self.fine.get(x)
        if fine is None and (y in self.kept or not _merges(e)):
            return False
        source = x if fine is None else fine.array
        all_groups = groups_of(source.shape, y.shape)
        if all_groups is None or e.params.get("dimensions") is not None:
            return False
        groups = _apart(all_groups)
        roots = frozenset((y,)) if fine is None else fine.roots
        self.roots.append((roots, _joints(groups_of(x.shape, y.shape) or ()) * math.prod(y.shape)))
        self.merged.append((roots, (_joints(all_groups) - _joints(groups)) * math.prod(y.shape)))
        if _joints(groups):
            self.fine[y] = Fine(self.reshaped(e, source, flat(groups)), groups, roots)
        elif source.shape == y.shape and source in self.mine and source not in self.same_as:
            self.same_as[source] = y
        elif source.shape == y.shape and y not in self.graph.outputs:
            self.same_as[y] = self.same_as.get(source, source)
        else:
            self.made.append(self.graph.changed(e, (source,)))
        return True

    def elementwise(self, e: Equation) -> bool:
        """Follows an elementwise equation; returns False if it must stay unchanged."""
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
        """The operands of an equation in fine form with these groups; None if an operand has other groups."""
        operands = [self.free_in(x, groups_of_x, e, _DEEP) for x, groups_of_x in zip(e.inputs, groups, strict=True)]
        missing = [i for i, x in enumerate(operands) if x is None]
        if any(e.inputs[i] in self.fine for i in missing):
            return None
        # Separating the dimensions of one array costs as much as merging those of another.
        separated = sum(_joints(groups[i]) * math.prod(e.inputs[i].shape) for i in missing)
        not_merged = {x: self.fine[x].groups for x in e.inputs if x in self.fine and x not in self.is_there}
        if missing and separated >= sum(_joints(g) * math.prod(x.shape) for x, g in not_merged.items()):
            return None
        self.merged.append((self.roots_of(e), separated))
        reshaped = {i: self.reshaped(e, e.inputs[i], _fine_shape(groups[i], e.inputs[i])) for i in missing}
        return [reshaped[i] if x is None else x for i, x in enumerate(operands)]

    def free_in(self, x: Array, groups: Groups, e: Equation, depth: int) -> Array | None:
        """An array in fine form with these groups, if this moves no elements; otherwise None."""
        if not x.shape:
            return x
        shape = _fine_shape(groups, x)
        fine = self.fine.get(x)
        if fine is not None:
            # A dimension of one element fits any group.
            is_same = all(g == h or math.prod(g) == 1 for g, h in zip(fine.groups, _groups(groups, x), strict=True))
            return self.reshaped(e, fine.array, shape) if is_same else None
        if all(len(g) == 1 or n == 1 for g, n in zip(groups, x.shape, strict=True)):
            return self.reshaped(e, x, shape)
        producer = self.graph.producer(x)
        return None if producer is None or depth == 0 else self.again(producer, _groups(groups, x), depth)

    def again(self, e: Equation, groups: Groups, depth: int) -> Array | None:
        """Computes the result of an equation in fine form again, if it depends on no array or on smaller arrays."""
        shape, dtype = flat(groups), e.outputs[0].dtype
        fine = Fine(e.outputs[0], groups, frozenset())
        if e.name == "iota" and len(groups[e.params["dimension"]]) == 1:
            params = {**e.params, "shape": shape, "dimension": fine.dims(e.params["dimension"])[0]}
            return self.add(e, params, (), shape, dtype)
        if e.name == "broadcast_in_dim":
            (x,) = e.inputs
            dims = e.params["broadcast_dimensions"]
            operand = self.free_in(x, tuple(groups[d] for d in dims), e, depth - 1)
            if operand is None:
                return None
            params = {**e.params, "shape": shape, "broadcast_dimensions": fine.all_dims(dims)}
            return self.add(e, params, (operand,), shape, dtype)
        if traits_of(e.name).computes and len(e.outputs) == 1:
            operands = [self.free_in(x, groups, e, depth - 1) for x in e.inputs]
            arrays = [x for x in operands if x is not None]
            return self.add(e, e.params, arrays, shape, dtype) if len(arrays) == len(operands) else None
        return None

    def either(self, x: Array) -> Fine:
        """The fine form of an array. An array without merged dimensions is its own fine form."""
        return self.fine.get(x) or Fine(x, tuple((n,) for n in x.shape), frozenset())
