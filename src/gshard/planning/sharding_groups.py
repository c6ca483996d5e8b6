"""Sharding groups: values that elementwise equations give one common sharding.

    y = jnp.exp(x + 1) * m        x, x + 1, exp(x + 1), m and y are one group

To move one of them and not the others would cost a collective and spare nothing that moving all of them does not. A
value that the user marked, an argument and a value at the boundary of a loop are groups of their own: there a sharding
may change. So is, in ``x + y``, a value that others read, too: what they want it to be need not be what the sum is.
A sum over devices, and what it is converted to, are two groups where their elements have not equally many bytes: a
sum in bfloat16 is combined before it becomes float32, with half the bytes.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping
from types import MappingProxyType

import jax.numpy as jnp

from gshard.core.planning_tables import tabulated
from gshard.core.program import Constant, Equation, Program, Value, itemsize
from gshard.core.rule import PARALLEL, REDUCE, Rule

_ADDED = frozenset({"add", "mul"})  # what only numbers can be combined by
_NONE: Mapping[Value, str] = MappingProxyType({})


@dataclasses.dataclass(frozen=True, eq=False)
class ShardingGroups:
    """The sharding groups of a program.

    Attributes:
        members: the values of each group, in program order.
        of: the number of each value's group.
        tied: the equations all of whose arrays are in one group: they have no choice of their own.
        unreduced: by which monoids all members of a group may be parts still to be combined.
    """

    members: tuple[tuple[Value, ...], ...]
    of: dict[Value, int]
    tied: frozenset[Equation]
    unreduced: dict[int, tuple[str, ...]]


def sharding_groups_of(
    program: Program,
    alone: Collection[Value],
    finished: Collection[Value] = (),
    unreduced: Mapping[Value, str] = _NONE,
    *,
    fused: bool = False,
) -> ShardingGroups:
    """Finds the sharding groups of a program.

    Args:
        program: its equations.
        alone: values that are not tied to others.
        finished: those in which nothing is left to be combined.
        unreduced: those that marks want in parts, and by which monoid these are combined.
        fused: whether elementwise equations cost what the kernel costs that they are part of: then nothing in it moves
            by itself, whoever reads it.
    """
    monoids = _unfinished(program, finished, unreduced)
    shared = set() if fused else _shared(program)
    parent: dict[Value, Value] = {}

    def root(v: Value) -> Value:
        while parent.setdefault(v, v) is not v:
            parent[v] = v = parent[parent[v]]
        return v

    tied: list[Equation] = []
    for v in program.block.values():
        root(v)
    for e in program.block.walk():
        together = _together(e, alone, monoids, shared)
        for v in together[1:]:
            parent[root(v)] = root(together[0])
        if _has_no_choice(e, together, monoids):
            tied.append(e)
    members: dict[Value, list[Value]] = {}
    for v in program.block.values():
        members.setdefault(root(v), []).append(v)
    of = {v: k for k, group in enumerate(members.values()) for v in group}
    partial: dict[int, tuple[str, ...]] = {}
    for k, group in enumerate(members.values()):
        own = dict.fromkeys(m for v in group for m in monoids.get(v, ()))
        found = [m for m in own if m not in _ADDED or all(map(_is_number, group))]
        if found and not any(v in finished for v in group):
            partial[k] = tuple(found)
    return ShardingGroups(tuple(map(tuple, members.values())), of, frozenset(tied), partial)


def free_to_leave(program: Program, groups: ShardingGroups, results: Collection[Value]) -> set[int]:
    """The groups of results that may leave as they like, and of what nothing but these is made of, in place."""
    found = {groups.of[v] for v in results}
    users: dict[int, set[Equation]] = {}
    for e in program.block.walk() if found else ():
        for v in e.inputs:
            if isinstance(v, Value):
                users.setdefault(groups.of[v], set()).add(e)
    for e in reversed(program.block.equations):
        made = [groups.of[v] for v in e.outputs]
        if e.rule is not None and e.mark is None and made and found.issuperset(made):
            if all(f.kind == PARALLEL for f in e.rule.factors):
                own = (groups.of[v] for v in e.inputs if isinstance(v, Value))
                found.update(k for k in own if users[k] - groups.tied <= {e})
    return found


def _shared(program: Program) -> set[Value]:
    """What more than one equation reads."""
    readers = Counter(v for e in program.block.walk() for v in {v for v in e.inputs if isinstance(v, Value)})
    return {v for v, n in readers.items() if n > 1}


def _together(
    e: Equation, alone: Collection[Value], monoids: Mapping[Value, Collection[str]], shared: Collection[Value]
) -> list[Value]:
    """The arrays of an elementwise equation that are cut alike: its result and operands of the same dimensions.

    What may be parts still to be combined is among them only where it may pass, together with the others, and where
    elements have as many bytes. Where an equation reads several, what others read is not, even if it alone is left.
    """
    if e.rule is None or e.mark is not None or not (ties := _ties(e.rule)) or e.outputs[0] in alone:
        return []
    result = e.outputs[0]
    own, at = monoids.get(result, ()), {}
    alike = {v for i, _ in ties if isinstance(v := e.inputs[i], Value) and v.shape == result.shape and v not in alone}
    for i, passing in ties:
        v = e.inputs[i]
        if v in alike and not (own and itemsize(v.dtype) != itemsize(result.dtype)):
            if passing.issuperset(own) and passing.issuperset(monoids.get(v, ())):
                at[i] = v
    for monoid in own:
        at = _passing_together(e.rule, monoid, at, monoids)
    found = list(dict.fromkeys([result, *at.values()]))
    if len(alike) > 1:
        found = [v for v in found if v not in shared or v is result]
    return found if len(found) > 1 else []


def _passing_together(
    rule: Rule, monoid: str, at: dict[int, Value], monoids: Mapping[Value, Collection[str]]
) -> dict[int, Value]:
    """Those of some operands that can be parts at once: of a product only one of them."""
    ways = [operands for name, operands in rule.linear if name == monoid]
    if any(operands.issuperset(at) for operands in ways):
        return at
    first = next((i for i, v in at.items() if monoid in monoids.get(v, ())), None)
    way = next((operands for operands in ways if first in operands), frozenset[int]())
    return {i: v for i, v in at.items() if i in way}


@tabulated(4096)
def _ties(rule: Rule) -> tuple[tuple[int, frozenset[str]], ...]:
    """The operands of an elementwise rule that have the dimensions of its result, and by which monoids parts pass."""
    dims = rule.results[0] if len(rule.results) == 1 else ()
    if not rule.is_free or rule.allowed or not rule.known or not dims or any(len(d) != 1 for d in dims):
        return ()
    if not all(f.kind == PARALLEL for f in rule.factors):
        return ()
    same = [i for i, d in enumerate(rule.operands) if d == dims]
    ways = [way for way in rule.linear if way not in rule.finite]  # of those that are permitted each is a choice
    return tuple((i, frozenset(monoid for monoid, operands in ways if i in operands)) for i in same)


def _has_no_choice(e: Equation, together: Collection[Value], monoids: Mapping[Value, Collection[str]]) -> bool:
    """Whether all arrays of an equation are in one group, and parts still to be combined pass all of them alike."""
    if not together or not all(isinstance(v, Constant) or v in together for v in e.inputs):
        return False
    assert e.rule is not None
    every = frozenset(i for i, v in enumerate(e.inputs) if isinstance(v, Value))
    return all((monoid, every) in e.rule.linear for v in together for monoid in monoids.get(v, ()))


def _unfinished(
    program: Program, finished: Collection[Value], unreduced: Mapping[Value, str]
) -> dict[Value, dict[str, None]]:
    """By which monoids the parts of each value may still have to be combined."""
    monoids: dict[Value, dict[str, None]] = {v: {monoid: None} for v, monoid in unreduced.items()}

    def may(v: Value, monoid: str) -> bool:
        if v in finished or v in unreduced or (monoid in _ADDED and not _is_number(v)):
            return False
        new = monoid not in monoids.setdefault(v, {})
        monoids[v][monoid] = None
        return new

    around = [(edge, e) for e in program.block.walk() for edge in e.edges if edge.outer not in e.inputs]
    news = True
    while news:
        news = False
        for e in program.block.walk():
            if e.rule is not None and e.rule.fixed is None:
                for monoid in _made(e, e.rule, monoids):
                    news |= any([may(v, monoid) for v in e.outputs])
        for edge, _ in around:  # what leaves a loop, or goes round in it
            for monoid in tuple(monoids.get(edge.inner, ())):
                news |= may(edge.outer, monoid)
        news = news and bool(around)
    return monoids


def _made(e: Equation, rule: Rule, monoids: Mapping[Value, Collection[str]]) -> dict[str, None]:
    """The monoids by which parts of an equation's results may have to be combined."""
    found = {f.monoid or "add": None for f in rule.factors if f.kind == REDUCE and f.size > 1}
    have = {i: own for i, v in enumerate(e.inputs) if isinstance(v, Value) and (own := monoids.get(v))}
    for monoid, operands in rule.linear if have else ():
        if any(monoid in have.get(i, ()) for i in operands):
            found[rule.after(monoid)] = None
    return found


def _is_number(v: Value) -> bool:
    return bool(jnp.issubdtype(v.dtype, jnp.number))
