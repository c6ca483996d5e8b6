"""Prices equations that run on shards in their own way, by tracing each of them alone.

Only the rule of an equation determines what it emits: a halo, a look-up in a part of a table, masks around padding, and
the rest. So gshard partitions the equation alone and prices the result like a program. Equations of a block share the
windows of one array that they fetch (``comm.shards``), so the time of windows is reported apart.
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
    """Whether an equation does more on shards than the same operator on smaller arrays."""
    if not rule.is_free or (rule.local is None and rule.sends is None):
        return False
    return any(f >= 0 and atoms and rule.factors[f].kind != PARALLEL for f, atoms in split.items())


@dataclasses.dataclass(frozen=True, slots=True)
class Emitted:
    """The price of one run of an equation."""

    seconds: float  # of everything that it emits
    windows: tuple[Windows, ...]  # the part that other equations may share


class OwnWays:
    """Prices equations that run on shards in their own way, on one machine, each once.

    Splits that take the same time are traced once (``_class_of``), and so are windows of equal parts of arrays.
    """

    def __init__(self, mesh: Mesh, machine: Machine):
        self._mesh, self._machine = mesh, machine
        self._alike = {a: alike for alike in interchangeable(mesh, machine) for a in alike}
        self._known: dict[object, Emitted] = {}
        self._windows: _FetchSeconds = {}

    def of(self, e: Equation, split: Split, *, traces: bool = True) -> Emitted | None:
        """The price of an equation under a split; None if it runs the same operator on smaller arrays.

        Without ``traces``, also None if it is not traced yet.
        """
        rule = e.rule
        assert rule is not None
        if not has_own_way(rule, split):
            return None
        ordered = sorted((f, atoms) for f, atoms in split.items() if atoms)
        parallel = {f: atoms for f, atoms in ordered if f >= 0 and rule.factors[f].kind == PARALLEL}
        other_factors = {f: atoms for f, atoms in ordered if f not in parallel}
        names = self._renamed(other_factors)
        renamed = {f: tuple(names[a] for a in atoms) for f, atoms in other_factors.items()}
        operands = tuple((v.shape, short_dtype(v.dtype)) for v in e.inputs)
        key = rule, tuple(sorted(renamed.items())), _class_of(rule, parallel, self._mesh), operands
        if key not in self._known:
            if not traces:
                return None
            check_deadline()
            names = self._renamed(other_factors | parallel)
            renamed |= {f: tuple(names[a] for a in atoms) for f, atoms in parallel.items()}
            self._known[key] = emitted_alone(e, renamed, self._mesh, self._machine, self._windows)
        emitted = self._known[key]
        if not emitted.windows or all(a == b for a, b in names.items()):
            return emitted
        original = {b: a for a, b in names.items()}
        windows = (w._replace(which=tuple(_with_atoms(what, original) for what in w.which)) for w in emitted.windows)
        return dataclasses.replace(emitted, windows=tuple(windows))

    def _renamed(self, split: Split) -> dict[str, str]:
        """For each atom of a split, the atom that represents it: the first ones of each class of interchangeable atoms.

        Interchangeable atoms can take each other's places (``network.interchangeable``).
        """
        representatives: dict[str, str] = {}
        used: dict[Atoms, int] = {}
        for atoms in split.values():
            for a in atoms:
                if a not in representatives:
                    same_class = self._alike[a]
                    representatives[a] = same_class[used.get(same_class, 0)]
                    used[same_class] = used.get(same_class, 0) + 1
        return representatives


def _class_of(rule: Rule, split: Split, mesh: Mesh) -> Hashable:
    """A key: splits of parallel factors with equal keys take the same time, with all other factors split equally.

    Nothing is sent over their atoms, so only the sizes of the parts count: the size of each array, and the factors with
    one element left, across which no array is copied into place. Unequal parts are padded, factor by factor.
    """
    sizes = {
        f: -(-factor.size // mesh.count(split.get(f, ())))
        for f, factor in enumerate(rule.factors)
        if factor.kind == PARALLEL
    }
    parts = {f: mesh.count(atoms) for f, atoms in split.items()}
    unequal = tuple(sorted((f, n) for f, n in parts.items() if rule.factors[f].size % n))
    arrays = ([f for dim in dims for f in dim if f in sizes] for dims in (*rule.operands, *rule.results))
    return (
        tuple(math.prod(sizes[f] for f in factor) for factor in arrays),
        tuple(n == 1 for n in sizes.values()),
        unequal,
    )


def _with_atoms(what: Hashable, names: Mapping[str, str]) -> Hashable:
    """The key of a window (``Shards.fetch``) with other atoms in its tuples of atoms."""
    if not isinstance(what, tuple):
        return what
    return tuple(tuple(names.get(a, a) for a in part) if type(part) is tuple else part for part in what)


# Seconds to fetch windows of an array, by its shape, dtype and sharding, and the windows.
_FetchSeconds = dict[Hashable, float]


@no_mesh_set()
def emitted_alone(
    e: Equation, split: Split, mesh: Mesh, machine: Machine, fetch_seconds: _FetchSeconds | None = None
) -> Emitted:
    """Prices one run of an equation whose operands are in the shardings of the split."""
    seconds_of_windows: _FetchSeconds = {} if fetch_seconds is None else fetch_seconds
    fetched: dict[int, list[Hashable]] = {}
    seconds = _seconds(partition(_alone(e, split, mesh, fetched)).jaxpr, mesh, machine)
    windows = []
    for operand, keys in fetched.items():
        v, rule = e.inputs[operand], e.rule
        assert rule is not None
        key = v.shape, short_dtype(v.dtype), operand_sharding(rule, operand, split), tuple(keys)
        if key not in seconds_of_windows:
            seconds_of_windows[key] = _seconds(_fetching_jaxpr(e, split, mesh, operand), mesh, machine)
        windows.append(Windows(operand, tuple(keys), seconds_of_windows[key]))
    return Emitted(seconds, tuple(windows))


@tabulated(16)
def own_ways(mesh: Mesh, machine: Machine) -> OwnWays:
    """The prices that all plans share that are made together."""
    return OwnWays(mesh, machine)


def _seconds(jaxpr: Any, mesh: Mesh, machine: Machine) -> float:
    kernels = kernels_of_mapped(jaxpr).walk()
    return sum(kernel_cost(kernel, times, mesh, machine).total_seconds for kernel, times in kernels)


def _fetching_jaxpr(e: Equation, split: Split, mesh: Mesh, operand: int) -> Any:
    """A jaxpr that fetches the windows of an operand."""
    rule = e.rule
    assert rule is not None
    read_shardings = {i: operand_sharding(rule, i, split) for i, v in enumerate(e.inputs) if v.shape}

    def local(*parts: Any) -> list[Any]:
        part_of = dict(zip(read_shardings, parts, strict=True))
        arrays = [part_of[i] if i in part_of else jnp.zeros((), v.dtype) for i, v in enumerate(e.inputs)]
        fetched: Fetched = {}
        _run(rule, Shards(e, split, mesh, fetched=fetched), arrays)
        return [window for i, _, window in _windows_of(fetched, arrays) if i == operand and window is not None]

    specs = tuple(spec(s) for s in read_shardings.values())
    shapes = (padded_shape(s, mesh, e.inputs[i].shape) for i, s in read_shardings.items())
    operands = [jax.ShapeDtypeStruct(n, e.inputs[i].dtype) for i, n in zip(read_shardings, shapes, strict=True)]
    mapped = jax.shard_map(local, mesh=mesh.jax_mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
    with jax.sharding.use_abstract_mesh(mesh.abstract_jax_mesh):
        return jax.make_jaxpr(mapped)(*operands)


def _run(rule: Rule, shards: Shards, parts: Sequence[Any]) -> Any:
    """Runs the ``local`` of an equation's rule on parts of its operands."""
    assert rule.local is not None
    return rule.local(shards, *(x if rule.masks_itself else shards.masked(x, i) for i, x in enumerate(parts)))


def _windows_of(fetched: Fetched, parts: Sequence[Any]) -> Iterator[tuple[int, Hashable, Any]]:
    """The windows of each operand: the operand's index, the key of the window, and the window.

    The window is None if other windows are made of it, so that it is no result: windows of a window, filled windows.
    """
    operand_of = {id(x): i for i, x in enumerate(parts) if x.shape}
    for (x, key), (_, window) in fetched.items():
        if x in operand_of:
            is_inner = any(
                other == id(window) or (other == x and other_key[:3] == key != other_key)
                for other, other_key in fetched
            )
            yield operand_of[x], key, None if is_inner else window
            operand_of[id(window)] = operand_of[x]


def as_kernel(e: Equation) -> Kernel:
    """An equation as a kernel that reads and writes only its own operands and results."""
    reads = tuple(dict.fromkeys(v for v in e.inputs if isinstance(v, Value)))
    return Kernel(e, kind_of(e), (), reads, e.outputs)


def _alone(e: Equation, split: Split, mesh: Mesh, windows: dict[int, list[Hashable]]) -> Plan:
    """The plan of a program with only this equation. Partitioning it adds the fetched windows to ``windows``."""
    rule = e.rule
    assert rule is not None

    def local(shards: Shards, *parts: Any) -> Any:
        result_shardings = _run(rule, shards, parts)
        windows.clear()
        for operand, what, _ in _windows_of(shards.fetched or {}, parts):
            windows.setdefault(operand, []).append(what)
        return result_shardings

    inputs = [dataclasses.replace(v) if isinstance(v, Value) else v for v in e.inputs]
    outputs = [dataclasses.replace(v) for v in e.outputs]
    watched = rule if rule.local is None else dataclasses.replace(rule, local=local, masks_itself=True)
    alone = dataclasses.replace(e, rule=watched, inputs=tuple(inputs), outputs=tuple(outputs))
    shardings = {v: operand_sharding(rule, i, split) for i, v in enumerate(inputs) if isinstance(v, Value)}
    values = tuple(shardings)
    result_shardings = {v: result_sharding(rule, i, split) for i, v in enumerate(outputs)}
    block = Block(values, (alone,), tuple(outputs))
    program = Program(block, (), (None,) * len(values), tuple(f"operand {i}" for i in range(len(values))), None)
    entry, leave = tuple(shardings.values()), tuple(result_shardings.values())
    return Plan(program, mesh, shardings | result_shardings, {alone: split}, {}, entry=entry, leave=leave)
