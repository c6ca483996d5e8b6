"""The loops of a function: which dimensions of its arguments and results one loop runs over, and a run on shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal

from gshard.comm.shards import Shards
from gshard.core.jax_adapter import bind, closed, evaluate, scan_counts, shapes_of
from gshard.core.mesh import Atoms, Mesh
from gshard.core.program import Constant, Equation, Value
from gshard.core.rule import COMMUNICATE, PARALLEL, REDUCE, REPLICATE, Rule, Split, UnionFind, is_valid, result_sharding
from gshard.language.call import Call
from gshard.language.mark_primitive import mark_p
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
        self._classes = UnionFind[int]()
        self._parts: dict[int, tuple[int, int]] = {}
        self._whole: dict[int, Any] = {}
        self._monoids: dict[int, set[str]] = {}

    def new(self, size: int) -> int:
        """A loop of its own."""
        self.sizes.append(size)
        return len(self.sizes) - 1

    def leaves(self, loop: int) -> Iterator[int]:
        """The loops that a loop consists of, major to minor, without those of size 1."""
        root = self._classes.root(loop)
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
                self._classes.join(a, b)
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


# Runs a jaxpr on shards, with the split of its loops and without communication.


class NotProven(Exception):
    """The jaxpr on shards may compute something else."""

    def __init__(self, equation: Any = None) -> None:
        super().__init__()
        self.equation = equation  # the equation of the jaxpr that needs other shards


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A value on one device."""

    array: Any  # the shard
    unreduced: Mapping[str, str]  # the atoms over which it is still to be combined, with the monoid


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """One device, on which a jaxpr runs."""

    mesh: Mesh  # the devices
    atoms_of_loop: Callable[[int], Atoms]  # the atoms over which a loop of the steps is split
    finite: bool = False  # whether parts of sums are finite, so that they may pass more equations (``Rule.finite``)
    # makes a part of a sum over all atoms of a value that is equal on all devices: the value on one of them, and zeros
    # on the others. None if this is not possible.
    as_part: Callable[[Any], Any] | None = None
    rounds: bool = False  # whether parts of sums may be rounded to a narrower type, each by itself (``Rule.rounded``)


def on_shards(jaxpr: Any, arguments: Sequence[Part], steps: Sequence[Step], shard: Shard) -> list[Part]:
    """Runs the equations of a closed jaxpr on shards."""
    body, consts = closed(jaxpr)
    following = iter(steps)

    def run(eqn: Any, operands: Sequence[Part]) -> list[Part]:
        step = next(following)
        if not step.is_read:
            return [Part(None, {}) for _ in eqn.outvars]
        if step.body is not None:
            return _scan(eqn, step.body, operands, shard)
        if eqn.primitive is mark_p:  # an identity, also on parts of a sum
            (marked,) = bind(eqn.primitive, eqn.params, [operands[0].array])
            return [Part(marked, operands[0].unreduced)]
        return _equation(eqn, step, operands, shard)

    return evaluate(body, [Part(x, {}) for x in consts], arguments, run, lambda v: Part(v.val, {}))


def _scan(eqn: Any, steps: Sequence[Step], operands: Sequence[Part], shard: Shard) -> list[Part]:
    """Runs a scan whose body, with these equations, runs on shards."""
    consts, carry = scan_counts(eqn.params)
    first, as_part = consts + carry, shard.as_part
    unreduced = [dict(part.unreduced) for part in operands]
    arrays = [part.array for part in operands]
    results: list[Part] = []

    def body(*shards: Any) -> list[Any]:
        arguments = [Part(x, own) for x, own in zip(shards, unreduced, strict=True)]
        results[:] = on_shards(eqn.params["jaxpr"], arguments, steps, shard)
        if as_part is None and any(part.unreduced for part in (*operands, *results)):
            raise NotProven(eqn)
        for i, own in enumerate(unreduced[consts:first]):
            if own and not results[i].unreduced:
                assert as_part is not None
                results[i] = Part(as_part(results[i].array), own)
        return [part.array for part in results]

    avals = [jax.typeof(x) for x in arrays]
    avals[first:] = [aval.update(shape=aval.shape[1:]) for aval in avals[first:]]
    while True:
        traced = jax.make_jaxpr(body)(*shapes_of(avals))
        new = [i for i in range(carry) if results[i].unreduced and not unreduced[consts + i]]
        if not new:
            break
        for i in new:
            assert as_part is not None
            unreduced[consts + i] = dict(results[i].unreduced)
            arrays[consts + i] = as_part(arrays[consts + i])
    if any(own != dict(part.unreduced) for own, part in zip(unreduced[consts:first], results, strict=False)):
        raise NotProven(eqn)
    if any(before.shape != after.shape for before, after in zip(avals[consts:first], traced.out_avals, strict=False)):
        raise NotProven(eqn)
    if not any(part.unreduced for part in (*operands, *results)):
        out = bind(eqn.primitive, {**eqn.params, "jaxpr": traced}, arrays)
        return [Part(x, {}) for x in out]

    def step(carried: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        made = body(*arrays[:consts], *carried, *slices)
        return made[:carry], made[carry:]

    params = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    end, stacked = lax.scan(step, arrays[consts:first], arrays[first:], **params)
    return [Part(x, dict(part.unreduced)) for x, part in zip((*end, *stacked), results, strict=True)]


def _equation(eqn: Any, step: Step, operands: Sequence[Part], shard: Shard) -> list[Part]:
    """Runs an equation on shards as its rule says."""
    rule, split, mesh = step.rule, Split(), shard.mesh
    if rule is not None:
        if shard.finite:
            rule = rule.permitting((way, None) for way in (*rule.finite, *(rule.rounded if shard.rounds else ())))
        split = {f: atoms for f, loop in enumerate(step.loops) if (atoms := shard.atoms_of_loop(loop))}
        operands = _as_parts(rule, split, operands, shard)
        split.update(_passing(eqn, rule, operands))
    if rule is None or not split:  # every device computes all of it
        if any(part.unreduced for part in operands):
            raise NotProven(eqn)
        return [Part(x, {}) for x in bind(eqn.primitive, eqn.params, [part.array for part in operands])]
    if not is_valid(rule, split, mesh):
        raise NotProven(eqn)

    def refuse(kind: str, atoms: Atoms, sent: int, x: Any, times: int = 1) -> None:
        raise NotProven(eqn)  # it communicates

    inputs = tuple(
        Constant(v.val) if hasattr(v, "val") else Value(tuple(v.aval.shape), v.aval.dtype, i)
        for i, v in enumerate(eqn.invars)
    )
    outputs = tuple(Value(tuple(v.aval.shape), v.aval.dtype, i) for i, v in enumerate(eqn.outvars))
    shards = Shards(
        Equation(eqn.primitive, dict(eqn.params), inputs, outputs, rule, eqn.source_info), split, mesh, refuse
    )
    arrays = [part.array for part in operands]
    if not rule.masks_itself:
        arrays = [shards.masked(x, i) for i, x in enumerate(arrays)]
    results = shards.bind(*arrays) if rule.local is None else list(rule.local(shards, *arrays))
    if any(np.shape(x) != shards.out_shape(i) for i, x in enumerate(results)):
        raise NotProven(eqn)
    return [Part(x, dict(result_sharding(rule, i, split).unreduced)) for i, x in enumerate(results)]


def _as_parts(rule: Rule, split: Split, operands: Sequence[Part], shard: Shard) -> Sequence[Part]:
    """The operands, with equal values as parts of a sum where parts only pass together with them.

    A gradient may be a sum over the batch and a term that does not depend on the batch.
    """
    unreduced = next((dict(part.unreduced) for part in operands if part.unreduced), {})
    at = frozenset(i for i, part in enumerate(operands) if part.unreduced)
    if shard.as_part is None or set(unreduced.values()) != {"add"} or ("add", at) in rule.linear:
        return operands
    whole = {i for i, dims in enumerate(rule.operands) if not any(split.get(f) for own in dims for f in own)}
    together = [own for monoid, own in rule.linear if monoid == "add" and at < own and own - at <= whole]
    if not together:
        return operands
    added = min(together, key=len) - at
    return [Part(shard.as_part(p.array), unreduced) if i in added else p for i, p in enumerate(operands)]


def _passing(eqn: Any, rule: Rule, operands: Sequence[Part]) -> Split:
    """The ways of a rule (``Rule.linear``) in which its unreduced operands pass."""
    ways: dict[tuple[str, frozenset[int]], list[str]] = {}
    for atom in sorted({a for part in operands for a in part.unreduced}):
        at = {i: part.unreduced[atom] for i, part in enumerate(operands) if atom in part.unreduced}
        monoids = set(at.values())
        if len(monoids) > 1:
            raise NotProven(eqn)
        ways.setdefault((*monoids, frozenset(at)), []).append(atom)  # type: ignore[arg-type]
    found: Split = {}
    for way, atoms in ways.items():
        if way not in rule.linear:
            raise NotProven(eqn)
        found[-1 - rule.linear.index(way)] = tuple(atoms)
    return found
