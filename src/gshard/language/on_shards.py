"""Runs a jaxpr on shards, with the split of its loops (``language.kernel_loops``) and without communication.

Each equation runs as its rule says. An equation that needs other shards raises ``NotProven``: a mean over a split
dimension, a causal mask along it, a softmax. So a traced jaxpr computes each shard of the results from the same shard
of the arguments. Sums over split loops stay unreduced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from gshard.comm.shards import Shards
from gshard.core.jax_adapter import bind, closed, evaluate, scan_counts, shapes_of
from gshard.core.mesh import Atoms, Mesh
from gshard.core.program import Constant, Equation, Value
from gshard.core.rule import Rule
from gshard.core.split import Split, is_valid, result_sharding
from gshard.language.kernel_loops import Step
from gshard.language.mark_primitive import mark_p


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

    shards = Shards(_as_equation(eqn, rule), split, mesh, refuse)
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


def _as_equation(eqn: Any, rule: Rule) -> Equation:
    """An equation of a jaxpr as the ``local`` of its rule reads it."""
    inputs = tuple(
        Constant(v.val) if hasattr(v, "val") else Value(tuple(v.aval.shape), v.aval.dtype, i)
        for i, v in enumerate(eqn.invars)
    )
    outputs = tuple(Value(tuple(v.aval.shape), v.aval.dtype, i) for i, v in enumerate(eqn.outvars))
    return Equation(eqn.primitive, dict(eqn.params), inputs, outputs, rule, eqn.source_info)
