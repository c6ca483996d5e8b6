"""Finds sharding groups: values that elementwise equations give one common sharding.

    y = jnp.exp(x + 1) * m        x, x + 1, exp(x + 1), m and y are one group

To reshard one of them alone would cost a collective and save nothing that a reshard of all of them does not save. A
marked value, an argument and a value at the boundary of a loop each start a group of their own, because a sharding may
change there. In ``x + y``, a value that other equations read too is a group of its own: these readers may need another
sharding than the sum. A sum over devices and its conversion to another type are two groups if their elements differ in
size: gshard combines a sum in bfloat16 before it becomes float32, with half the bytes. A conversion to a wider type
separates two groups if its operand is computed elementwise: gshard moves an array in int8 before it widens it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping
from types import MappingProxyType

import jax.numpy as jnp

from gshard.core.planning_tables import tabulated
from gshard.core.program import Constant, Equation, Program, Value, itemsize
from gshard.core.rule import PARALLEL, REDUCE, Rule, UnionFind

_ADDED = frozenset({"add", "mul"})  # monoids that only numbers have
_NONE: Mapping[Value, str] = MappingProxyType({})


@dataclasses.dataclass(frozen=True, eq=False)
class ShardingGroups:
    """The sharding groups of a program."""

    members: tuple[tuple[Value, ...], ...]  # for each group, its values in program order
    of: dict[Value, int]  # the number of each value's group
    tied: frozenset[Equation]  # the equations whose arrays are all in one group. They have no choice of their own.
    unreduced: dict[int, tuple[str, ...]]  # for each group whose members may be unreduced, the monoids


def sharding_groups_of(
    program: Program,
    alone: Collection[Value],
    finished: Collection[Value] = (),
    unreduced: Mapping[Value, str] = _NONE,
    *,
    fused: bool = False,
) -> ShardingGroups:
    """Finds the sharding groups of a program."""
    monoids = _possible_monoids(program, finished, unreduced)
    readers = Counter(v for e in program.block.walk() for v in {v for v in e.inputs if isinstance(v, Value)})
    read_by_several = set() if fused else {v for v, n in readers.items() if n > 1}
    classes = UnionFind[Value]()
    tied: list[Equation] = []
    in_place: set[Value] = set()  # results that are in a group with operands
    for e in program.block.walk():
        together = _together(e, alone, monoids, read_by_several, in_place)
        for v in together[1:]:
            classes.join(together[0], v)
        in_place.update(together[:1])
        if _has_no_choice(e, together, monoids):
            tied.append(e)
    members: dict[Value, list[Value]] = {}
    for v in program.block.values():
        members.setdefault(classes.root(v), []).append(v)
    of = {v: k for k, group in enumerate(members.values()) for v in group}
    unreduced_groups: dict[int, tuple[str, ...]] = {}
    for k, group in enumerate(members.values()):
        candidates = dict.fromkeys(m for v in group for m in monoids.get(v, ()))
        combinable = [m for m in candidates if m not in _ADDED or all(map(_is_number, group))]
        if combinable and not any(v in finished for v in group):
            unreduced_groups[k] = tuple(combinable)
    return ShardingGroups(tuple(map(tuple, members.values())), of, frozenset(tied), unreduced_groups)


def free_result_groups(program: Program, groups: ShardingGroups, results: Collection[Value]) -> set[int]:
    """The groups of results that may leave in any sharding, and groups whose only use is to compute these in place."""
    free = {groups.of[v] for v in results}
    users: dict[int, set[Equation]] = {}
    for e in program.block.walk() if free else ():
        for v in e.inputs:
            if isinstance(v, Value):
                users.setdefault(groups.of[v], set()).add(e)
    for e in reversed(program.block.equations):
        result_groups = [groups.of[v] for v in e.outputs]
        if e.rule is not None and e.mark is None and result_groups and free.issuperset(result_groups):
            if all(f.kind == PARALLEL for f in e.rule.factors):
                operand_groups = (groups.of[v] for v in e.inputs if isinstance(v, Value))
                free.update(group for group in operand_groups if users[group] - groups.tied <= {e})
    return free


def _together(
    e: Equation,
    alone: Collection[Value],
    monoids: Mapping[Value, Collection[str]],
    shared: Collection[Value],
    in_place: Collection[Value],
) -> list[Value]:
    """The arrays of an elementwise equation that share a sharding: its result, and operands of the same dimensions.

    An operand that may be unreduced is among them only if it passes together with the others and its elements have the
    same size. One that may send less before it is widened is not among them. If the equation reads several operands,
    those that other equations read too are left out, even if only one operand remains.
    """
    if e.rule is None or e.mark is not None or not (ties := _ties(e.rule)) or e.outputs[0] in alone:
        return []
    result = e.outputs[0]
    result_monoids, passing_operands = monoids.get(result, ()), {}
    same_shape = {
        v for i, _ in ties if isinstance(v := e.inputs[i], Value) and v.shape == result.shape and v not in alone
    }
    for i, passing in ties:
        v = e.inputs[i]
        if v in same_shape and not _may_move_first(v, result, bool(result_monoids), v in in_place):
            if passing.issuperset(result_monoids) and passing.issuperset(monoids.get(v, ())):
                passing_operands[i] = v
    for monoid in result_monoids:
        passing_operands = _passing_together(e.rule, monoid, passing_operands, monoids)
    found = list(dict.fromkeys([result, *passing_operands.values()]))
    if len(same_shape) > 1:
        found = [v for v in found if v not in shared or v is result]
    return found if len(found) > 1 else []


def _may_move_first(operand: Value, result: Value, is_sum: bool, in_place: bool) -> bool:
    """Whether moving the operand of a conversion can send less: a sum is combined first, a narrow array widened later.

    An operand that is not computed elementwise needs no group of its own. gshard moves it from its producer to the
    sharding of the group, and it is narrow then.
    """
    thin, wide = itemsize(operand.dtype), itemsize(result.dtype)
    return (is_sum and thin != wide) or (in_place and thin < wide)


def _passing_together(
    rule: Rule, monoid: str, operand_values: dict[int, Value], monoids: Mapping[Value, Collection[str]]
) -> dict[int, Value]:
    """The operands that can be unreduced at once: of a product only one."""
    linear_operands = [indices for name, indices in rule.linear if name == monoid]
    if any(indices.issuperset(operand_values) for indices in linear_operands):
        return operand_values
    first = next((i for i, v in operand_values.items() if monoid in monoids.get(v, ())), None)
    first_operands = next((indices for indices in linear_operands if first in indices), frozenset[int]())
    return {i: v for i, v in operand_values.items() if i in first_operands}


@tabulated(4096)
def _ties(rule: Rule) -> tuple[tuple[int, frozenset[str]], ...]:
    """The operands of an elementwise rule with the dimensions of its result, each with the monoids that it passes."""
    dims = rule.results[0] if len(rule.results) == 1 else ()
    if not rule.is_free or rule.allowed or not rule.known or not dims or any(len(d) != 1 for d in dims):
        return ()
    if not all(f.kind == PARALLEL for f in rule.factors):
        return ()
    same = [i for i, d in enumerate(rule.operands) if d == dims]
    linear = [pair for pair in rule.linear if pair not in rule.finite]  # each permitted pair is a choice of its own
    return tuple((i, frozenset(monoid for monoid, operands in linear if i in operands)) for i in same)


def _has_no_choice(e: Equation, together: Collection[Value], monoids: Mapping[Value, Collection[str]]) -> bool:
    """Whether all arrays of an equation are in one group, and unreduced values pass all operands together."""
    if not together or not all(isinstance(v, Constant) or v in together for v in e.inputs):
        return False
    every = frozenset(i for i, v in enumerate(e.inputs) if isinstance(v, Value))
    return all((monoid, every) in e.operator_rule.linear for v in together for monoid in monoids.get(v, ()))


def _possible_monoids(
    program: Program, finished: Collection[Value], unreduced: Mapping[Value, str]
) -> dict[Value, dict[str, None]]:
    """For each value, the monoids with which it may be unreduced."""
    monoids: dict[Value, dict[str, None]] = {v: {monoid: None} for v, monoid in unreduced.items()}

    def add(v: Value, monoid: str) -> bool:
        if v in finished or v in unreduced or (monoid in _ADDED and not _is_number(v)):
            return False
        is_new = monoid not in monoids.setdefault(v, {})
        monoids[v][monoid] = None
        return is_new

    loop_edges = [edge for e in program.block.walk() for edge in e.edges if edge.outer not in e.inputs]
    changed = True
    while changed:
        changed = False
        for e in program.block.walk():
            if e.rule is not None:
                for monoid in _result_monoids(e, e.rule, monoids):
                    changed |= any([add(v, monoid) for v in e.outputs])
        for edge in loop_edges:  # values that leave a loop or that an iteration passes on
            for monoid in tuple(monoids.get(edge.inner, ())):
                changed |= add(edge.outer, monoid)
        changed = changed and bool(loop_edges)
    return monoids


def _result_monoids(e: Equation, rule: Rule, monoids: Mapping[Value, Collection[str]]) -> dict[str, None]:
    """The monoids with which the results of an equation may be unreduced."""
    found = {f.monoid or "add": None for f in rule.factors if f.kind == REDUCE and f.size > 1}
    operand_monoids = {i: known for i, v in enumerate(e.inputs) if isinstance(v, Value) and (known := monoids.get(v))}
    for monoid, operands in rule.linear if operand_monoids else ():
        if any(monoid in operand_monoids.get(i, ()) for i in operands):
            found[rule.after(monoid)] = None
    return found


def _is_number(v: Value) -> bool:
    return bool(jnp.issubdtype(v.dtype, jnp.number))
