"""Proves that the plain function of a kernel, run on shards, computes the shards of its results.

Two programs of one device are compared, equation by equation:

* the plain function with each equation run on shards, as its rule says;
* the plain function traced on arrays of a shard's size.

gshard's partitioner makes the first of the plain function, so it computes the shards of the results. If the second is
equal, the plain function itself does so on shards, and so does the fast function, which computes the same on arrays of
any size. A causal mask along a split dimension needs the position of the shard, a mean the number of elements in all, a
softmax the maximum over all shards: each makes the programs differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from gshard.comm.shards import Shards
from gshard.core.errors import GShardError
from gshard.core.jax_adapter import bind, closed, jaxpr_without_dead_code, no_mesh_set, scan_counts, shapes_of
from gshard.core.mesh import Atoms, Mesh
from gshard.core.program import Constant, Equation, Value
from gshard.core.rule import Rule
from gshard.core.split import Split, is_valid, result_sharding
from gshard.language.batch import same
from gshard.language.flat_jaxpr import evaluate
from gshard.language.kernel_loops import Step


class _NotProven(Exception):
    """The plain function on shards may compute something else."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """A value on one device.

    Attributes:
        array: the shard.
        unreduced: the atoms over which it is still to be combined, with the monoid.
    """

    array: Any
    unreduced: Mapping[str, str]


def runs_on_shards(
    plain: Any,
    on_shards: Any,
    steps: Sequence[Step],
    rule: Rule,
    atoms_of_loop: Callable[[int], Atoms],
    mesh: Mesh,
    split: Split,
) -> bool:
    """Whether a function computes the shards of its results from shards of its arguments.

    Args:
        plain: its closed jaxpr, on whole arrays, without calls (``flat_jaxpr``).
        on_shards: the same function traced on arrays of a shard's size, without calls.
        steps: the equations of ``plain`` with their rules.
        rule: that of the function as a whole; it gives the shardings of the results.
        atoms_of_loop: over which atoms a loop of these steps is split.
        mesh: the devices.
        split: the split of ``rule``.
    """

    def emitted(*shards: Any) -> list[Any]:
        results = _evaluate(plain, shards, steps, atoms_of_loop, mesh)
        for i, part in enumerate(results):
            if dict(part.unreduced) != dict(result_sharding(rule, i, split).unreduced):
                raise _NotProven
        return [part.array for part in results]

    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in closed(on_shards)[0].invars]
    try:
        with no_mesh_set():
            first = jax.make_jaxpr(emitted, axis_env=list(mesh.atom_sizes.items()))(*shapes)
    except (_NotProven, GShardError):
        return False
    return _same_programs(first, on_shards)


def _evaluate(
    jaxpr: Any, arguments: Sequence[Any], steps: Sequence[Step], atoms_of_loop: Callable[[int], Atoms], mesh: Mesh
) -> list[_Part]:
    """Runs the equations of a closed jaxpr on shards.

    Raises:
        _NotProven: one of them cannot be split so, or communicates.
    """
    body, consts = closed(jaxpr)
    following = iter(steps)

    def run(eqn: Any, operands: Sequence[_Part]) -> list[_Part]:
        step = next(following)
        if not step.is_read:
            return [_Part(None, {}) for _ in eqn.outvars]
        if step.body is not None:
            return _scan_on_shards(eqn, step.body, operands, atoms_of_loop, mesh)
        return _on_shards(eqn, step, operands, atoms_of_loop, mesh)

    return evaluate(body, consts, [_Part(x, {}) for x in arguments], run, lambda x: _Part(x, {}))


def _scan_on_shards(
    eqn: Any, steps: Sequence[Step], operands: Sequence[_Part], atoms_of_loop: Callable[[int], Atoms], mesh: Mesh
) -> list[_Part]:
    """Runs a scan whose body, with these equations, runs on shards.

    Raises:
        _NotProven: its body cannot be split so, or a value that enters or leaves it is unreduced.
    """
    consts, carry = scan_counts(eqn.params)
    first = consts + carry
    if any(part.unreduced for part in operands):
        raise _NotProven
    arrays = [part.array for part in operands]
    avals = [jax.typeof(x) for x in arrays]
    avals[first:] = [aval.update(shape=aval.shape[1:]) for aval in avals[first:]]

    def body(*shards: Any) -> list[Any]:
        results = _evaluate(eqn.params["jaxpr"], shards, steps, atoms_of_loop, mesh)
        if any(part.unreduced for part in results):
            raise _NotProven
        return [part.array for part in results]

    on_shards = jax.make_jaxpr(body)(*shapes_of(avals))
    carried = zip(avals[consts:first], on_shards.out_avals, strict=False)
    if any(before.shape != after.shape for before, after in carried):
        raise _NotProven
    return [_Part(x, {}) for x in bind(eqn.primitive, {**eqn.params, "jaxpr": on_shards}, arrays)]


def _on_shards(
    eqn: Any, step: Step, operands: Sequence[_Part], atoms_of_loop: Callable[[int], Atoms], mesh: Mesh
) -> list[_Part]:
    """Runs an equation on shards as its rule says.

    Raises:
        _NotProven: it cannot be split so, or communicates.
    """
    rule, split = step.rule, Split()
    if rule is not None:
        split = {f: atoms for f, loop in enumerate(step.loops) if (atoms := atoms_of_loop(loop))}
        split.update(_passing(rule, operands))
    if rule is None or not split:  # every device computes all of it
        if any(part.unreduced for part in operands):
            raise _NotProven
        return [_Part(x, {}) for x in bind(eqn.primitive, eqn.params, [part.array for part in operands])]
    if not is_valid(rule, split, mesh):
        raise _NotProven
    equation = _equation(eqn, rule)
    shards = Shards(equation, split, mesh, _refused)
    arrays = [part.array for part in operands]
    if not rule.masks_itself:
        arrays = [shards.masked(x, i) for i, x in enumerate(arrays)]
    results = shards.bind(*arrays) if rule.local is None else list(rule.local(shards, *arrays))
    if any(np.shape(x) != shards.out_shape(i) for i, x in enumerate(results)):
        raise _NotProven
    return [_Part(x, dict(result_sharding(rule, i, split).unreduced)) for i, x in enumerate(results)]


def _passing(rule: Rule, operands: Sequence[_Part]) -> Split:
    """The ways of a rule (``Rule.linear``) in which its unreduced operands pass.

    Raises:
        _NotProven: one of them does not.
    """
    ways: dict[tuple[str, frozenset[int]], list[str]] = {}
    for atom in sorted({a for part in operands for a in part.unreduced}):
        at = {i: part.unreduced[atom] for i, part in enumerate(operands) if atom in part.unreduced}
        monoids = set(at.values())
        if len(monoids) > 1:
            raise _NotProven
        ways.setdefault((*monoids, frozenset(at)), []).append(atom)  # type: ignore[arg-type]
    found: Split = {}
    for way, atoms in ways.items():
        if way not in rule.linear:
            raise _NotProven
        found[-1 - rule.linear.index(way)] = tuple(atoms)
    return found


def _equation(eqn: Any, rule: Rule) -> Equation:
    """An equation of a jaxpr as the ``local`` of its rule reads it."""
    inputs = tuple(
        Constant(v.val) if hasattr(v, "val") else Value(tuple(v.aval.shape), v.aval.dtype, i)
        for i, v in enumerate(eqn.invars)
    )
    outputs = tuple(Value(tuple(v.aval.shape), v.aval.dtype, i) for i, v in enumerate(eqn.outvars))
    return Equation(eqn.primitive, dict(eqn.params), inputs, outputs, rule, eqn.source_info)


def _refused(kind: str, atoms: Atoms, sent: int, x: Any, times: int = 1) -> None:
    raise _NotProven  # it communicates


def _same_programs(first: Any, second: Any) -> bool:
    """Whether two closed jaxprs are the same equations on the same constants."""
    (one, some), (other, others) = map(closed, (first, second))
    return (
        len(some) == len(others)
        and all(map(_same_array, some, others))
        and same(*(_constants_as_inputs(jaxpr_without_dead_code(jaxpr)) for jaxpr in (one, other)))
    )


def _constants_as_inputs(jaxpr: Any) -> Any:
    """A jaxpr whose constants, which are compared by value, are inputs."""
    own: dict[str, Any] = {"consts": []} if getattr(jaxpr, "consts", ()) else {}
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars], **own)


def _same_array(x: Any, y: Any) -> bool:
    if x is y or not hasattr(x, "dtype") or jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        return x is y
    return (x.shape, x.dtype) == (y.shape, y.dtype) and np.asarray(x).tobytes() == np.asarray(y).tobytes()
