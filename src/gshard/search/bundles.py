"""Bundles: values that have one sharding between them, because elementwise equations tie them together.

    y = jnp.exp(x + 1) * m        x, x + 1, exp(x + 1), m and y are one bundle

To move one of them and not the others would cost a collective and spare nothing that moving all of them does not. A
value that the user marked, an argument and a value at the border of a loop are bundles of their own: there a sharding
may change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from gshard.core.program import Constant, Equation, Program, Value
from gshard.core.rule import PARALLEL, REDUCE


@dataclasses.dataclass(frozen=True, eq=False)
class Bundles:
    """The bundles of a program.

    Attributes:
        members: the values of each bundle, in program order.
        of: the number of each value's bundle.
        tied: the equations all of whose arrays are in one bundle: they have no choice of their own.
        unreduced: the bundles whose members may all be parts of sums.
    """

    members: tuple[tuple[Value, ...], ...]
    of: dict[Value, int]
    tied: frozenset[Equation]
    unreduced: frozenset[int]


def bundles_of(program: Program, alone: Collection[Value]) -> Bundles:
    """Finds the bundles of a program.

    Args:
        program: its equations.
        alone: values that are not tied to others.
    """
    parent: dict[Value, Value] = {}

    def root(v: Value) -> Value:
        while parent.setdefault(v, v) is not v:
            parent[v] = v = parent[parent[v]]
        return v

    tied: dict[Equation, list[Value]] = {}
    for v in program.block.values():
        root(v)
    for e in program.block.walk():
        together = _together(e, alone)
        for v in together[1:]:
            parent[root(v)] = root(together[0])
        if together and all(isinstance(v, Constant) or v in together for v in e.inputs):
            tied[e] = together
    members: dict[Value, list[Value]] = {}
    for v in program.block.values():
        members.setdefault(root(v), []).append(v)
    of = {v: k for k, group in enumerate(members.values()) for v in group}
    return Bundles(tuple(map(tuple, members.values())), of, frozenset(tied), _unreduced(program, of, tied, alone))


def _together(e: Equation, alone: Collection[Value]) -> list[Value]:
    """The arrays of an elementwise equation that are cut alike: its result and operands of the same dimensions."""
    if e.rule is None or e.mark is not None or e.rule.fixed is not None or len(e.outputs) != 1:
        return []
    (result,), (dims,) = e.outputs, e.rule.results
    if not result.shape or result in alone or any(len(d) != 1 for d in dims):
        return []
    if not e.rule.known or not all(f.kind == PARALLEL for f in e.rule.factors):
        return []
    pairs = zip(e.inputs, e.rule.operands, strict=True)
    same = [v for v, d in pairs if isinstance(v, Value) and d == dims and v.shape == result.shape and v not in alone]
    return [result, *dict.fromkeys(same)] if same else []


def _unreduced(
    program: Program, of: dict[Value, int], tied: dict[Equation, list[Value]], alone: Collection[Value]
) -> frozenset[int]:
    """The bundles in which parts of sums may go from end to end, and at one end are made."""
    made = {
        of[v]
        for e in program.block.walk()
        if e.rule is not None and e.rule.fixed is None
        for v in e.outputs
        if any(f.kind == REDUCE and f.monoid in (None, "add") for f in e.rule.factors)
        or (e not in tied and any(monoid == "add" for monoid, _ in e.rule.linear))
    }
    barred = {of[v] for v in alone}
    for e, together in tied.items():
        assert e.rule is not None
        whole = frozenset(i for i, v in enumerate(e.inputs) if isinstance(v, Value))
        if ("add", whole) not in e.rule.linear:
            barred.add(of[together[0]])
    return frozenset(made - barred)
