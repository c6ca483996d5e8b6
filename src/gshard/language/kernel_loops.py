"""The loops of a function: which dimensions of its arguments and results are the same loop.

The rule of each equation (``core.rule``) names the loops of that equation. If one equation computes a
value and another reads it, the loops of both become one. If one of them has a product of loops where the other has one
loop, that loop is split into the product.

    scores = einsum("bqhd,bkhd->bhqk", q, k)      b, q, h, d, k
    softmax(scores)                               four loops, joined with b, h, q, k; k cannot be split
    k = repeat(k, 4, axis=2)                      h becomes (h r) with r = 4
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from gshard.core.jax_adapter import closed, evaluate, scan_counts
from gshard.core.program import Constant
from gshard.core.rule import COMMUNICATE, PARALLEL, REDUCE, REPLICATE, Rule
from gshard.language.call import Call
from gshard.language.region import REGIONS
from gshard.language.registry import rule_of

Loops = list[int]  # of one dimension, major to minor


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One equation of the function."""

    rule: Rule | None  # its rule; None if none of its loops may be split, as in an equation with bodies that is no scan
    loops: tuple[int, ...]  # the loop of each factor
    is_read: bool  # whether a result of the function depends on it
    body: tuple[Step, ...] | None = None  # the equations of the body of a scan; None for other equations


class LoopTable:
    """Loops that are joined and split while equations are read."""

    def __init__(self) -> None:
        self.sizes: list[int] = []  # the size of each loop
        self.reading: Any = None  # the equation that is read
        self._joined_with: list[int] = []
        self._parts: dict[int, tuple[int, int]] = {}
        self._whole: dict[int, Any] = {}
        self._monoids: dict[int, set[str]] = {}

    def new(self, size: int) -> int:
        """A loop of its own."""
        self.sizes.append(size)
        self._joined_with.append(len(self._joined_with))
        return len(self.sizes) - 1

    def leaves(self, loop: int) -> Iterator[int]:
        """The loops that a loop consists of, major to minor, without those of size 1."""
        root = self._root(loop)
        if root in self._parts:
            for part in self._parts[root]:
                yield from self.leaves(part)
        elif self.sizes[root] != 1:
            yield root

    def keep_whole(self, loops: Iterable[int]) -> None:
        """The equation that is read does not allow a split of these loops."""
        for loop in loops:
            self._whole.setdefault(loop, self.reading)

    def reduced(self, loop: int, monoid: str) -> None:
        """An equation combines parts along this loop."""
        self._monoids.setdefault(loop, set()).add(monoid)

    def whole(self) -> dict[int, Any]:
        """All leaves that cannot be split, each with the first equation that does not allow it (None: no equation)."""
        found: dict[int, Any] = {}
        for loop, eqn in self._whole.items():
            for leaf in self.leaves(loop):
                found.setdefault(leaf, eqn)
        return found

    def monoids(self) -> dict[int, set[str]]:
        """For each leaf that an equation reduces, how."""
        found: dict[int, set[str]] = {}
        for loop, monoids in self._monoids.items():
            for leaf in self.leaves(loop):
                found.setdefault(leaf, set()).update(monoids)
        return found

    def join(self, some: Sequence[int], others: Sequence[int]) -> None:
        """Joins two descriptions of one dimension. If their sizes do not agree, the dimension stays whole."""
        left, right = list(some), list(others)
        while True:
            left = [leaf for loop in left for leaf in self.leaves(loop)]
            right = [leaf for loop in right for leaf in self.leaves(loop)]
            if not left or not right:
                break
            a, b = left[0], right[0]
            if self.sizes[a] == self.sizes[b]:
                if a != b:
                    self._joined_with[b] = a
                left, right = left[1:], right[1:]
            elif self.sizes[a] % self.sizes[b] == 0:
                self._split(a, self.sizes[b])
            elif self.sizes[b] % self.sizes[a] == 0:
                self._split(b, self.sizes[a])
            else:
                break
        self.keep_whole((*left, *right))

    def _split(self, loop: int, major: int) -> None:
        self._parts[loop] = self.new(major), self.new(self.sizes[loop] // major)

    def _root(self, loop: int) -> int:
        while self._joined_with[loop] != loop:
            loop = self._joined_with[loop]
        return loop


Leaves = tuple[tuple[tuple[int, ...], ...], ...]  # for each dimension of each array


@dataclasses.dataclass(frozen=True, slots=True)
class FunctionLoops:
    """The loops of a function."""

    table: LoopTable  # the loops
    steps: tuple[Step, ...]  # its equations, those of calls in place of them, in order
    flops: int  # floating-point operations
    products: int  # those of matrix products
    _arguments: list[list[Loops]]
    _results: list[list[Loops]]

    @property
    def arguments(self) -> Leaves:
        """The leaves of the arguments."""
        return self._leaves(self._arguments)

    @property
    def results(self) -> Leaves:
        """The leaves of the results."""
        return self._leaves(self._results)

    def _leaves(self, arrays: list[list[Loops]]) -> Leaves:
        leaves = self.table.leaves
        return tuple(tuple(tuple(x for loop in dim for x in leaves(loop)) for dim in dims) for dims in arrays)


def loops_of(jaxpr: Any) -> FunctionLoops:
    """The loops of a closed jaxpr without calls (``flat_jaxpr``).

    Equations that no result depends on join loops, and do nothing else.
    """
    reader = _Reader()
    arguments = [[[reader.table.new(n)] for n in v.aval.shape] for v in closed(jaxpr)[0].invars]
    values, steps = reader.read(jaxpr, arguments, 1)
    return FunctionLoops(reader.table, steps, reader.flops, reader.products, arguments, values)


class _Reader:
    """Reads equations, and joins their loops."""

    def __init__(self) -> None:
        self.table = LoopTable()  # the loops so far
        self.flops = self.products = 0  # flops, products: operations so far, and those of matrix products

    def read(
        self, jaxpr: Any, arguments: Sequence[list[Loops]], times: int
    ) -> tuple[list[list[Loops]], tuple[Step, ...]]:
        """The loops of the results of a jaxpr, and its equations."""
        body, consts = closed(jaxpr)
        read, steps = _read_equations(body), list[Step]()

        def run(eqn: Any, operands: Sequence[list[Loops]]) -> list[list[Loops]]:
            self.table.reading = eqn
            one = self._scan if eqn.primitive.name == "scan" and eqn in read else self._equation
            step, results = one(eqn, operands, eqn in read, times)
            steps.append(step)
            return results

        held = [self._whole(np.shape(x)) for x in consts]
        return evaluate(body, held, arguments, run, lambda v: self._whole(np.shape(v.val))), tuple(steps)

    def _whole(self, shape: Sequence[int]) -> list[Loops]:
        loops = [self.table.new(n) for n in shape]
        self.table.keep_whole(loops)
        return [[loop] for loop in loops]

    def _equation(
        self, eqn: Any, operands: Sequence[list[Loops]], is_read: bool, times: int
    ) -> tuple[Step, list[list[Loops]]]:
        table = self.table
        rule = None if eqn.primitive.name in REGIONS else rule_of(call_of(eqn), eqn.source_info)
        if rule is None or rule.on_mesh is not None or not rule.is_free:
            table.keep_whole(loop for dims in operands for dim in dims for loop in dim)
            return Step(None, (), is_read), [self._whole(v.aval.shape) for v in eqn.outvars]
        loops = tuple(table.new(factor.size) for factor in rule.factors)
        joins = [factor.kind in (PARALLEL, REDUCE) or is_read for factor in rule.factors]
        for loop, factor in zip(loops, rule.factors, strict=True) if is_read else ():
            if factor.kind in (COMMUNICATE, REPLICATE):
                table.keep_whole([loop])
            elif factor.kind == REDUCE:
                table.reduced(loop, factor.monoid or "add")
        for dims, factors in zip(operands, rule.operands, strict=True):
            for dim, own in zip(dims, factors, strict=True):
                if all(joins[f] for f in own):
                    table.join(dim, [loops[f] for f in own])
        if is_read:
            self.flops += rule.flops * times
            self.products += rule.flops * times if _multiplies(rule) else 0
        return Step(rule, loops, is_read), [[[loops[f] for f in own] for own in dims] for dims in rule.results]

    def _scan(
        self, eqn: Any, operands: Sequence[list[Loops]], is_read: bool, times: int
    ) -> tuple[Step, list[list[Loops]]]:
        """The iterations of a scan are one loop that stays whole. A carry has the same loops before and after."""
        consts, carry = scan_counts(eqn.params)
        first, length = consts + carry, int(eqn.params["length"])
        iterations = self.table.new(length)
        self.table.keep_whole([iterations])
        for dims in operands[first:]:
            self.table.join(dims[0], [iterations])
        inside = [*operands[:first], *(dims[1:] for dims in operands[first:])]
        results, steps = self.read(eqn.params["jaxpr"], inside, times * length)
        for before, after in zip(operands[consts:first], results, strict=False):
            for some, others in zip(before, after, strict=True):
                self.table.join(some, others)
        stacked = [[[iterations], *dims] for dims in results[carry:]]
        return Step(None, (), is_read, steps), [*operands[consts:first], *stacked]


def _multiplies(rule: Rule) -> bool:
    """Whether an equation adds up products of two operands."""
    if rule.products is not None:
        return rule.products > 0
    held = [{f for dim in dims for f in dim} for dims in rule.operands]
    summed = [f for f, factor in enumerate(rule.factors) if factor.kind == REDUCE and factor.monoid == "add"]
    return any(sum(f in own for own in held) > 1 for f in summed)


def _read_equations(body: Any) -> set[Any]:
    """The equations that a result depends on, or that have effects."""
    read, needed = set(), {v for v in body.outvars if not isinstance(v, Literal)}
    for eqn in reversed(body.eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            read.add(eqn)
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
    return read


def call_of(eqn: Any) -> Call:
    """An equation of a jaxpr as rules read it."""
    takes, makes = (tuple(tuple(map(int, v.aval.shape)) for v in own) for own in (eqn.invars, eqn.outvars))
    dtypes, numbers = tuple(v.aval.dtype for v in eqn.invars), tuple(map(_number, eqn.invars))
    return Call(eqn.primitive.name, dict(eqn.params), takes, makes, dtypes, eqn.primitive, numbers)


def _number(v: Any) -> float | None:
    return Constant(v.val).number if isinstance(v, Literal) else None
