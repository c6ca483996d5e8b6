"""Emitted: prices equations that run on shards in a special way by tracing them alone.

A halo that is fetched, a look-up in a part of a table, masks around what is padded: how much of that there is only the
rule knows, and the rest of what is emitted for it. So the equation is partitioned alone and priced, as a program is.
Windows that are fetched are shared by all equations of a block that want the same ones of an array (``comm.shards``),
so their times differ.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gshard.comm.shards import Fetched, Shards
from gshard.core.deadline import check_deadline
from gshard.core.jax_adapter import no_mesh_set
from gshard.core.mesh import Atoms, Mesh
from gshard.core.plan import Plan
from gshard.core.planning_tables import tabulated
from gshard.core.program import Block, Equation, Program, Value, short_dtype
from gshard.core.rule import PARALLEL, Rule
from gshard.core.split import Split, operand_sharding, result_sharding
from gshard.core.uneven import padded_shape
from gshard.device.cost import kernel_cost
from gshard.device.fusion_model import Kernel, kernels_of_mapped, kind_of
from gshard.device.machine import Machine
from gshard.device.network import interchangeable
from gshard.emit.partition import partition, spec
from gshard.planning.objective import Windows


def has_own_way(rule: Rule, split: Split) -> bool:
    """Whether an equation does something else on shards than the same on smaller arrays."""
    if not rule.is_free or (rule.local is None and rule.sends is None):
        return False
    return any(f >= 0 and atoms and rule.factors[f].kind != PARALLEL for f, atoms in split.items())


@dataclasses.dataclass(frozen=True, slots=True)
class Emitted:
    """What is emitted for one run of an equation.

    Attributes:
        seconds: of all of it.
        windows: what of it other equations may share.
    """

    seconds: float
    windows: tuple[Windows, ...]


class OwnWays:
    """What is emitted for equations that run on shards in ways of their own, on a machine; what was priced is known.

    Splits that take the same time are traced once (``_class_of``), and so are windows of equal parts of arrays.
    """

    def __init__(self, mesh: Mesh, machine: Machine):
        self._mesh, self._machine = mesh, machine
        self._alike = {a: alike for alike in interchangeable(mesh, machine) for a in alike}
        self._known: dict[object, Emitted] = {}
        self._windows: _FetchSeconds = {}

    def of(self, e: Equation, split: Split, *, traces: bool = True) -> Emitted | None:
        """What is emitted for an equation that is split so; None if it does the same on smaller arrays.

        Without ``traces`` also None if it has not been traced yet.
        """
        rule = e.rule
        assert rule is not None
        if not has_own_way(rule, split):
            return None
        ordered = sorted((f, atoms) for f, atoms in split.items() if atoms)
        parallel = {f: atoms for f, atoms in ordered if f >= 0 and rule.factors[f].kind == PARALLEL}
        others = {f: atoms for f, atoms in ordered if f not in parallel}
        names = self._renamed(others)
        renamed = {f: tuple(names[a] for a in atoms) for f, atoms in others.items()}
        arrays = tuple((v.shape, short_dtype(v.dtype)) for v in e.inputs)
        key = rule, tuple(sorted(renamed.items())), _class_of(rule, parallel, self._mesh), arrays
        if key not in self._known:
            if not traces:
                return None
            check_deadline()
            names = self._renamed(others | parallel)
            renamed |= {f: tuple(names[a] for a in atoms) for f, atoms in parallel.items()}
            self._known[key] = emitted_alone(e, renamed, self._mesh, self._machine, self._windows)
        found = self._known[key]
        if not found.windows or all(a == b for a, b in names.items()):
            return found
        back = {b: a for a, b in names.items()}
        windows = (w._replace(which=tuple(_with_atoms(what, back) for what in w.which)) for w in found.windows)
        return dataclasses.replace(found, windows=tuple(windows))

    def _renamed(self, split: Split) -> dict[str, str]:
        """For the atoms of a split those that stand for them: of atoms that are alike the first ones.

        Atoms are alike if they can take each other's places (``network.interchangeable``).
        """
        names: dict[str, str] = {}
        taken: dict[Atoms, int] = {}
        for atoms in split.values():
            for a in atoms:
                if a not in names:
                    alike = self._alike[a]
                    names[a] = alike[taken.get(alike, 0)]
                    taken[alike] = taken.get(alike, 0) + 1
        return names


def _class_of(rule: Rule, split: Split, mesh: Mesh) -> Hashable:
    """Splits of parallel factors with an equal class take the same time, the split of all other factors being the same.

    Nothing is sent over their atoms, so that only the sizes of the parts count: that of each array, and which factors
    have one element left, since no array is copied into place across those. Unequal parts are padded, factor by factor.
    """
    sizes = {
        f: -(-own.size // mesh.count(split.get(f, ()))) for f, own in enumerate(rule.factors) if own.kind == PARALLEL
    }
    parts = {f: mesh.count(atoms) for f, atoms in split.items()}
    unequal = tuple(sorted((f, n) for f, n in parts.items() if rule.factors[f].size % n))
    arrays = ([f for dim in dims for f in dim if f in sizes] for dims in (*rule.operands, *rule.results))
    return tuple(math.prod(sizes[f] for f in own) for own in arrays), tuple(n == 1 for n in sizes.values()), unequal


def _with_atoms(what: Hashable, names: Mapping[str, str]) -> Hashable:
    """What names a window (``Shards.fetch``), with other atoms in its tuples of atoms."""
    if not isinstance(what, tuple):
        return what
    return tuple(tuple(names.get(a, a) for a in part) if type(part) is tuple else part for part in what)


# What it takes to fetch windows of an array: by its shape, dtype and sharding, and the windows.
_FetchSeconds = dict[Hashable, float]


@no_mesh_set()
def emitted_alone(
    e: Equation, split: Split, mesh: Mesh, machine: Machine, fetch_seconds: _FetchSeconds | None = None
) -> Emitted:
    """All that is emitted for one run of an equation, its operands being where the split wants them.

    Args:
        e: the equation.
        split: how it is split.
        mesh, machine: the devices.
        fetch_seconds: what is known of windows; what is found is added.
    """
    known: _FetchSeconds = {} if fetch_seconds is None else fetch_seconds
    fetched: dict[int, list[Hashable]] = {}
    seconds = _seconds(partition(_alone(e, split, mesh, fetched)).jaxpr, mesh, machine)
    windows = []
    for operand, which in fetched.items():
        v, rule = e.inputs[operand], e.rule
        assert rule is not None
        key = v.shape, short_dtype(v.dtype), operand_sharding(rule, operand, split), tuple(which)
        if key not in known:
            known[key] = _seconds(_fetching_jaxpr(e, split, mesh, operand), mesh, machine)
        windows.append(Windows(operand, tuple(which), known[key]))
    return Emitted(seconds, tuple(windows))


@tabulated(16)
def own_ways(mesh: Mesh, machine: Machine) -> OwnWays:
    """One for all plans that are made together."""
    return OwnWays(mesh, machine)


def _seconds(jaxpr: Any, mesh: Mesh, machine: Machine) -> float:
    kernels = kernels_of_mapped(jaxpr).walk()
    return sum(kernel_cost(kernel, times, mesh, machine).total_seconds for kernel, times in kernels)


def _fetching_jaxpr(e: Equation, split: Split, mesh: Mesh, operand: int) -> Any:
    """A jaxpr that fetches the windows of an operand."""
    rule = e.rule
    assert rule is not None
    taken = {i: operand_sharding(rule, i, split) for i, v in enumerate(e.inputs) if v.shape}

    def local(*parts: Any) -> list[Any]:
        read = dict(zip(taken, parts, strict=True))
        arrays = [read[i] if i in read else jnp.zeros((), v.dtype) for i, v in enumerate(e.inputs)]
        fetched: Fetched = {}
        _run(rule, Shards(e, split, mesh, fetched=fetched), arrays)
        return [got for i, _, got in _windows_of(fetched, arrays) if i == operand and got is not None]

    specs = tuple(spec(s) for s in taken.values())
    shapes = (padded_shape(s, mesh, e.inputs[i].shape) for i, s in taken.items())
    takes = [jax.ShapeDtypeStruct(n, e.inputs[i].dtype) for i, n in zip(taken, shapes, strict=True)]
    mapped = jax.shard_map(local, mesh=mesh.jax_mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
    with jax.sharding.use_abstract_mesh(mesh.abstract_jax_mesh):
        return jax.make_jaxpr(mapped)(*takes)


def _run(rule: Rule, shards: Shards, parts: Sequence[Any]) -> Any:
    """Runs an equation in the way of its rule on parts of its operands."""
    assert rule.local is not None
    return rule.local(shards, *(x if rule.masks_itself else shards.masked(x, i) for i, x in enumerate(parts)))


def _windows_of(fetched: Fetched, parts: Sequence[Any]) -> Iterator[tuple[int, Hashable, Any]]:
    """The windows that are fetched of each operand: which operand, what names the window, and the window.

    None for what other windows are made of: it is no result. Such are those of a window, those that are filled outside.
    """
    of = {id(x): i for i, x in enumerate(parts) if x.shape}
    for (x, what), (_, got) in fetched.items():
        if x in of:
            inner = any(y == id(got) or (y == x and more[:3] == what != more) for y, more in fetched)
            yield of[x], what, None if inner else got
            of[id(got)] = of[x]


def as_kernel(e: Equation) -> Kernel:
    """An equation as a kernel that reads and writes nothing but its own operands and results."""
    reads = tuple(dict.fromkeys(v for v in e.inputs if isinstance(v, Value)))
    return Kernel(e, kind_of(e), (), reads, e.outputs)


def _alone(e: Equation, split: Split, mesh: Mesh, windows: dict[int, list[Hashable]]) -> Plan:
    """The plan of a program of nothing else; when it is partitioned, ``windows`` gets what is fetched of operands."""
    rule = e.rule
    assert rule is not None

    def local(shards: Shards, *parts: Any) -> Any:
        made = _run(rule, shards, parts)
        windows.clear()
        for operand, what, _ in _windows_of(shards.fetched or {}, parts):
            windows.setdefault(operand, []).append(what)
        return made

    inputs = [dataclasses.replace(v) if isinstance(v, Value) else v for v in e.inputs]
    outputs = [dataclasses.replace(v) for v in e.outputs]
    watched = rule if rule.local is None else dataclasses.replace(rule, local=local, masks_itself=True)
    alone = dataclasses.replace(e, rule=watched, inputs=tuple(inputs), outputs=tuple(outputs))
    shardings = {v: operand_sharding(rule, i, split) for i, v in enumerate(inputs) if isinstance(v, Value)}
    values = tuple(shardings)
    made = {v: result_sharding(rule, i, split) for i, v in enumerate(outputs)}
    block = Block(values, (alone,), tuple(outputs))
    program = Program(block, (), (None,) * len(values), tuple(f"operand {i}" for i in range(len(values))), None)
    entry, leave = tuple(shardings.values()), tuple(made.values())
    return Plan(program, mesh, shardings | made, {alone: split}, {}, entry=entry, leave=leave)
