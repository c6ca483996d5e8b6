"""Propagates marks: a sharding for every value that the marks reach, and the splits that follow from it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gshard.core.errors import ShardingError
from gshard.core.mark import Order
from gshard.core.mesh import Atoms, Mesh
from gshard.core.plan import Plan, Reason, before_any, manual_axes
from gshard.core.planning_tables import tabulated
from gshard.core.program import Constant, Equation, Program, Value, itemsize
from gshard.core.rule import (
    COMMUNICATE,
    PARALLEL,
    REDUCE,
    REPLICATE,
    Dims,
    Factor,
    Rule,
    Split,
    is_valid,
    passable,
    place,
    project,
)
from gshard.core.sharding import Sharding, common_prefix
from gshard.planning.demands import demands

# Finds candidates: the splits of an equation that follow from the shardings of its arrays.

_PADDING = 1.0  # the largest padding of a dimension, relative to its size, if no factor divides evenly


class ShardedArray(NamedTuple):
    """An operand or result: its sharding, its global shape and the bytes of one element."""

    sharding: Sharding
    shape: tuple[int, ...]
    itemsize: int

    @property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.itemsize


# Operands, then results; None for constants.
Arrays = tuple[ShardedArray | None, ...]


def arrays_of(equation: Equation, shardings: Mapping[Value, Sharding]) -> Arrays:
    """The operands and results of an equation with these shardings."""
    return tuple(
        ShardedArray(shardings[v], v.shape, itemsize(v.dtype)) if isinstance(v, Value) else None
        for v in (*equation.inputs, *equation.outputs)
    )


@tabulated(16384)
def candidates(rule: Rule, arrays: Arrays, mesh: Mesh) -> tuple[Split, ...]:
    """Splits worth considering, without duplicates. One of them splits nothing, unless the rule has only one split.

    Splits that the arrays suggest come first, then those in which atoms that could stay move to another dimension.
    """
    if rule.fixed is not None:
        return (rule.fixed(mesh),)
    if rule.manual is not None:
        return (rule.manual.pinned(mesh),)
    claims = _claims(rule, arrays, mesh)
    found: dict[tuple[tuple[int, tuple[str, ...]], ...], Split] = {}

    def note(split: Split) -> None:
        found.setdefault(key_of(split), split)

    for split in _led(rule, claims, mesh):
        note(split)
    for split in list(found.values()) or [{}]:
        for moved in _with_moved_axes(rule, split, arrays, mesh):
            note(moved)
    for split in spread(rule, arrays, mesh):
        for claim in claims:
            split = _extend(split, claim, rule, mesh)
        note(split)
    note({})
    for split in list(found.values()):
        for passed in _passing(rule, split, arrays, mesh):
            note(passed)
    for moved in _with_moved_axes(rule, {}, arrays, mesh):
        for claim in claims:
            moved = _extend(moved, claim, rule, mesh)
        note(moved)
    return tuple(found.values())


def led(rule: Rule, arrays: Arrays, mesh: Mesh) -> list[Split]:
    """The candidates that keep the sharding of some array as far as the equation can be split so."""
    return [] if rule.fixed is not None or rule.manual is not None else _led(rule, _claims(rule, arrays, mesh), mesh)


def key_of(split: Split) -> tuple[tuple[int, Atoms], ...]:
    """A key that is equal for equal splits."""
    return tuple(sorted((f, atoms) for f, atoms in split.items() if atoms))


def _claims(rule: Rule, arrays: Arrays, mesh: Mesh) -> list[Split]:
    """The splits of the factors that each array suggests, the largest array first."""
    tensors = [
        (x.bytes, project(dims, x.sharding.dims, rule.factors, mesh))
        for x, dims in zip(arrays, (*rule.operands, *rule.results), strict=True)
        if x is not None
    ]
    return [claim for _, claim in sorted(tensors, key=lambda t: -t[0]) if claim]


def _led(rule: Rule, claims: Sequence[Split], mesh: Mesh) -> list[Split]:
    leaders = [*claims, *({f: atoms} for claim in claims if len(claim) > 1 for f, atoms in claim.items())]
    found = []
    for leader in leaders:
        split = _extend({}, leader, rule, mesh)
        for claim in claims:
            split = _extend(split, claim, rule, mesh)
        found.append(split)
    return found


def _extend(split: Split, claim: Split, rule: Rule, mesh: Mesh) -> Split:
    """Adds the factors of a claim that do not contradict the split."""
    for f, atoms in claim.items():
        current = split.get(f, ())
        if atoms[: len(current)] != current or len(atoms) == len(current):
            continue
        used = {
            a
            for g, split_atoms in split.items()
            if g != f and rule.component[g] == rule.component[f]
            for a in split_atoms
        }
        extended = {**split, f: atoms}
        if not used & set(atoms) and is_valid(rule, extended, mesh):
            split = extended
    return split


def _passing(rule: Rule, split: Split, arrays: Arrays, mesh: Mesh) -> Iterator[Split]:
    """The split with parts of unreduced operands passing through, where the equation is linear in them."""
    for k, (monoid, operands) in enumerate(rule.linear):
        partial = {
            a: None
            for i in sorted(operands)
            if (x := arrays[i]) is not None
            for a, m in x.sharding.unreduced
            if m == monoid
        }
        atoms = passable(rule, k, tuple(a for a in mesh.atoms if a in partial), mesh)
        if atoms and is_valid(rule, passed := {**split, -1 - k: atoms}, mesh):
            yield passed


def spread(rule: Rule, arrays: Arrays, mesh: Mesh) -> Iterator[Split]:
    """Splits in which atoms of a dimension that becomes the minor one of a product are spread over all of it.

    Parts of a minor dimension are not contiguous where the major one is whole: some of its atoms move there.
    """
    products = [dim for dims in (*rule.operands, *rule.results) for dim in dims if len(dim) > 1]
    for x, dims in zip(arrays, rule.operands if products else (), strict=False):
        for dim, atoms in zip(dims, x.sharding.dims if x is not None else ()):
            for product in products:
                if len(dim) != 1 or len(atoms) < 2 or dim[0] not in product[1:]:
                    continue
                split, left = {}, atoms
                for f in product[: product.index(dim[0])]:
                    k = next((k for k in range(1, len(left)) if mesh.count(left[-k:]) == rule.factors[f].size), None)
                    if k is None:
                        break
                    split[f], left = left[-k:], left[:-k]
                else:
                    if is_valid(rule, split := {**split, dim[0]: left}, mesh):
                        yield split


def _with_moved_axes(rule: Rule, split: Split, arrays: Arrays, mesh: Mesh) -> Iterator[Split]:
    """Splits in which atoms that have to leave a dimension move to a parallel factor: an all-to-all, not a gather."""
    used = {a for atoms in split.values() for a in atoms}
    for x, dims in zip(arrays, rule.operands, strict=False):
        if x is None:
            continue
        for own, atoms in zip(dims, x.sharding.dims, strict=False):
            if not atoms or used & set(atoms):
                continue
            free = [(f, (*split.get(f, ()), *atoms)) for dim in dims for f in dim if rule.factors[f].kind == PARALLEL]
            padded = [_padding(rule.factors[f].size, mesh.count(have)) for f, have in free]
            most = _PADDING if 0 not in padded else 0
            for (f, have), padding in zip(free, padded, strict=True):
                if padding <= most and is_valid(rule, moved := {**split, f: have}, mesh):
                    yield moved
            if most and (shared := _shared(rule, split, own, atoms, dims, mesh)):
                yield shared


def _shared(rule: Rule, split: Split, own: tuple[int, ...], atoms: Atoms, dims: Dims, mesh: Mesh) -> Split | None:
    """The split with the atoms of a dimension dealt out to several factors; None if that is not possible.

    So 8 devices split 4 key heads with 4 query heads each into 4 times 2 parts. Atoms that no other factor takes evenly
    stay: of 256 parts of a sequence, 64 become parts of 64 heads, and 4 remain.
    """
    shared = dict(split)
    for f in (f for dim in dims if dim != own for f in dim if rule.factors[f].kind in (PARALLEL, REDUCE)):
        have, size = shared.get(f, ()), rule.factors[f].size
        most = next((k for k in range(len(atoms), 0, -1) if size % mesh.count((*have, *atoms[-k:])) == 0), 0)
        if most:
            shared[f], atoms = (*have, *atoms[-most:]), atoms[:-most]
    if atoms and len(own) == 1 and len(shared) > len(split) and rule.factors[own[0]].kind != REPLICATE:
        shared[own[0]], atoms = (*shared.get(own[0], ()), *atoms), ()
    return shared if not atoms and is_valid(rule, shared, mesh) else None


def _padding(n: int, parts: int) -> float:
    """How much longer equal parts are together than what they hold, as a part of it."""
    return -(-n // parts) * parts / n - 1 if n else math.inf


# Represents equations and edges of regions for propagation: factors, and arrays with their factors.


class Change(NamedTuple):
    """A refinement: a dimension of a node's array, the atoms that it gets, and the array they come from."""

    tensor: int  # the index of the array in ``Node.tensors``
    dim: int  # the dimension
    atoms: Atoms  # all atoms of the dimension after the change
    source: int | None  # the index of the array that had the atoms; None if no other array has them


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Node:
    """An equation or an edge of a region."""

    alike: int  # a number; nodes with the same number differ in nothing but their values
    factors: tuple[Factor, ...]  # the factors of its rule
    component: tuple[int, ...]  # for each factor, the component of the rule that it belongs to
    tensors: tuple[tuple[Value, Dims], ...]  # the arrays, each with the factors of its dimensions
    priority: int  # 0, 1 or 2; nodes of lower numbers are refined first
    equation: Equation | None  # the equation; None for an edge
    line_of: Equation | None  # the equation that has the user's line
    fixed: Callable[[Mesh], Split] | None = None  # the only split of the equation on a mesh, if the rule has one


def nodes_of(equation: Equation, alike: dict[object, int]) -> list[Node]:
    """The nodes of an equation. ``alike`` maps a rule and shapes to the number of nodes that have them; it grows."""
    if equation.rule is not None:
        return _nodes(equation, equation.rule, (*equation.inputs, *equation.outputs), alike)
    return [n for edge in equation.edges for n in _nodes(equation, edge.rule, (edge.outer, edge.inner), alike)]


def _nodes(e: Equation, rule: Rule, values: Sequence[Value | Constant], alike: dict[object, int]) -> list[Node]:
    """The node of an equation or of one of its edges, with its rule; none without dimensions."""
    pairs = zip(values, (*rule.operands, *rule.results), strict=True)
    tensors = tuple((v, dims) for v, dims in pairs if isinstance(v, Value) and v.shape)
    number, own = _number(rule, values, alike), e if e.rule is not None else None
    node = Node(number, rule.factors, rule.component, tensors, _priority(rule), own, e, rule.fixed)
    return [node] if tensors else []


def _number(rule: Rule, values: Sequence[Value | Constant], alike: dict[object, int]) -> int:
    """The number of the nodes that have this rule, arrays of these shapes, and the same arrays more than once."""
    first: dict[Value, int] = {}
    key = rule, tuple([(v.shape, first.setdefault(v, i)) if isinstance(v, Value) else () for i, v in enumerate(values)])
    return alike.setdefault(key, len(alike))


def _priority(rule: Rule) -> int:
    """0 if elements stay or combine in place, 1 if some are summed or sent, 2 if few elements become many."""
    if any(f.kind in (REDUCE, COMMUNICATE) for f in rule.factors):
        return 1
    of_operands = {f for dims in rule.operands for dim in dims for f in dim}
    new_factors = (f for dims in rule.results for dim in dims for f in dim if f not in of_operands)
    return 2 if of_operands and any(rule.factors[f].size > 1 for f in new_factors) else 0


@dataclasses.dataclass(frozen=True, eq=False)
class Propagated:
    """The shardings that follow from the marks of a program."""

    program: Program  # the program
    mesh: Mesh  # the devices
    shardings: Mapping[Value, Sharding]  # for every value; a value that no mark reaches is replicated
    reasons: Mapping[tuple[Value, int], Reason]  # for each split dimension of a value
    # for each marked value that needs another order of the devices than the mesh's, that order
    orders: Mapping[Value, Order]
    # for values, the atoms that open dimensions could get from equations whose arrays disagree
    undecided: Mapping[Value, Mapping[int, frozenset[str]]]
    # for values, the shardings that follow if parts that cannot stay move to the first dimension that can have them, or
    # spread over the dimensions that are joined, and wherever that leads
    moved: Mapping[Value, Sharding]

    def could(self, value: Value) -> Mapping[int, frozenset[str]]:
        """For each open dimension of a value, the atoms that it could get where arrays disagree."""
        return self.undecided.get(value, {})

    def allow(self, value: Value, sharding: Sharding) -> bool:
        """Whether a sharding contains the propagated one, and splits only undecided dimensions further."""
        undecided = self.could(value)
        dims = enumerate(zip(self.shardings[value].dims, sharding.dims, strict=True))
        return all(
            atoms[: len(known_atoms)] == known_atoms
            and undecided.get(d, frozenset()).issuperset(atoms[len(known_atoms) :])
            for d, (known_atoms, atoms) in dims
        )

    @functools.cached_property
    def supposed(self) -> Mapping[Value, Sharding]:
        """The shardings, with those of ``moved`` instead where there are some."""
        return {**self.shardings, **self.moved}

    def __str__(self) -> str:
        return (
            f"shardings from the marks, {Plan(self.program, self.mesh, self.shardings, {}, self.reasons, self.orders)}"
        )

    @functools.cached_property
    def kept(self) -> frozenset[Value]:
        """The results that keep their propagated sharding: marked ones, and those sharded like an input of their type.

        So the state of a training loop keeps its sharding from step to step.
        """
        block = self.program.block
        state = {(v.shape, v.dtype, self.shardings[v]) for v in block.inputs if v not in self.undecided}
        fixed = {v for e in block.equations if e.mark is not None or (e.rule and e.rule.fixed) for v in e.outputs}
        results = {v for v in block.outputs if isinstance(v, Value)}
        return frozenset(v for v in results if v in fixed or (v.shape, v.dtype, self.shardings[v]) in state)


def propagated_from(program: Program, mesh: Mesh) -> Propagated:
    """Propagates the marks of a program to a fixed point."""
    state = _State(program, mesh)
    state.seed()
    state.run()
    shardings, reasons, moving = state.shardings(), dict(state.reasons), state.moving()
    undecided, moved = state.undecided(moving), state.moved(shardings) if moving else {}
    return Propagated(program, mesh, shardings, reasons, state.orders, undecided, moved)


_Moves = Sequence[tuple[int, Atoms]]  # factors, and the atoms that may move there


class _State:
    """The shardings so far, and a queue of nodes for each priority."""

    def __init__(self, program: Program, mesh: Mesh):
        self.program, self.mesh, self.manual = program, mesh, manual_axes(program.block, mesh)
        self.dims: dict[Value, tuple[Atoms, ...]] = {}
        self.open: dict[Value, tuple[bool, ...]] = {}
        self.reasons: dict[tuple[Value, int], Reason] = {}
        self.orders: dict[Value, Order] = {}
        self.nodes: list[Node] = []
        self.users: dict[Value, list[Node]] = {}
        alike: dict[object, int] = {}
        for value in program.block.inputs:
            self._meet(value)
        for equation in program.block.walk():
            for block in equation.blocks:
                for value in block.inputs:
                    self._meet(value)
            for value in equation.outputs:
                self._meet(value)
            for node in nodes_of(equation, alike):
                self.nodes.append(node)
                for value, _ in node.tensors:
                    self.users.setdefault(value, []).append(node)
        self.queues: tuple[deque[Node], ...] = (deque(), deque(), deque())
        self.pending: set[Node] = set()
        self.disputed: dict[
            Node, dict[int, Atoms]
        ] = {}  # of each visited node, factors about which its arrays disagree
        # Memo: nodes with equal rules and equal operand shardings share a result, so equal layers are visited once.
        self.found: dict[object, tuple[dict[int, Atoms], Sequence[Change]]] = {}
        self.movable: dict[object, _Moves] = {}
        self.ones: dict[tuple[Atoms, ...], Sharding] = {}
        self.unreduced: dict[Value, tuple[tuple[str, str], ...]] = {}

    def _meet(self, value: Value) -> None:
        self.dims[value] = ((),) * len(value.shape)
        self.open[value] = (True,) * len(value.shape)

    def seed(self) -> None:
        """Sets the user's marks and the shardings of arguments."""
        for value, demand, reason in demands(self.program, self.mesh):
            self._set(value, demand.dims, demand.open, reason)
            if demand.order != self.mesh.order:
                self.orders[value] = demand.order
            if demand.unreduced:
                self.unreduced[value] = demand.unreduced
        for node in self.nodes:
            if node.fixed is not None or self._pinned(node):
                self._queue(node)

    def _set(self, value: Value, dims: Sequence[Atoms], open_dims: Sequence[bool], reason: Reason) -> None:
        self.dims[value] = tuple(dims)
        self.open[value] = tuple(open_dims)
        for d, atoms in enumerate(dims):
            if atoms:
                self.reasons[value, d] = reason
        self._wake(value)

    def _wake(self, value: Value) -> None:
        for node in self.users.get(value, ()):
            self._queue(node)

    def _queue(self, node: Node) -> None:
        if node not in self.pending:
            self.pending.add(node)
            self.queues[node.priority].append(node)

    def shardings(self) -> dict[Value, Sharding]:
        """The sharding of every value so far."""
        return {v: self._sharding(v) for v in self.dims}

    def _sharding(self, value: Value) -> Sharding:
        dims = self.dims[value]
        if dims not in self.ones:
            self.ones[dims] = Sharding(dims)
        return self.ones[dims].with_unreduced(dict(self.unreduced.get(value, ())))

    def run(self) -> None:
        """Refines the arrays of queued nodes until nothing changes."""
        while (queue := next((queue for queue in self.queues if queue), None)) is not None:
            node = queue.popleft()
            self.pending.discard(node)
            states = ((self.dims[v], self.open[v], self.manual.of(v), self.unreduced.get(v)) for v, _ in node.tensors)
            key = node.alike, *states
            if key not in self.found:
                agreed, disputed = self._agree(node)
                self.found[key] = disputed, self._refined(node, agreed)
            self.disputed[node], changes = self.found[key]
            self._change(node, changes)

    def moved(self, known: Mapping[Value, Sharding]) -> dict[Value, Sharding]:
        """The values with another sharding than ``known`` once parts move. Changes the state: call it last."""
        for node in self.nodes:
            e = node.equation
            if node in self.disputed and e is not None and e.rule is not None and self._to_be_moved(node):
                values = (v for v in (*e.inputs, *e.outputs) if isinstance(v, Value))
                arrays = arrays_of(e, {v: self._sharding(v) for v in values})
                splits = itertools.chain(spread(e.rule, arrays, self.mesh), candidates(e.rule, arrays, self.mesh))
                split = next((candidate for candidate in splits if any(candidate.values())), None)
                if split is not None:
                    self._change(node, self._refined(node, split))
                    self.run()
        return {v: s for v, s in self.shardings().items() if s != known[v]}

    def moving(self) -> dict[Node, _Moves]:
        """The equations that cannot be split like one of their operands, and where its parts may move."""
        found = {node: self._to_be_moved(node) for node in self.disputed}
        return {node: moves for node, moves in found.items() if moves}

    def undecided(self, moving: Mapping[Node, _Moves]) -> dict[Value, dict[int, frozenset[str]]]:
        """The atoms that open dimensions could get where arrays disagree or parts have to move, and what follows."""
        undecided: dict[Value, dict[int, frozenset[str]]] = {}
        changed: deque[tuple[Value, int]] = deque()

        def add(node: Node, f: int, atoms: frozenset[str]) -> None:
            for value, dims in node.tensors:
                allowed = atoms - self.manual.of(value)
                for d, factors in enumerate(dims):
                    if f in factors and self.open[value][d] and allowed:
                        known = undecided.setdefault(value, {}).get(d, frozenset())
                        if not allowed <= known:
                            undecided[value][d] = known | allowed
                            changed.append((value, d))

        for node, disputed in self.disputed.items():
            for f, atoms in (*disputed.items(), *moving.get(node, ())):
                add(node, f, frozenset(atoms))
        while changed:
            value, d = changed.popleft()
            for node in self.users[value]:
                for factors in (dims[d] for v, dims in node.tensors if v is value):
                    for f in factors:
                        if node.factors[f].kind != REPLICATE:
                            add(node, f, undecided[value][d])
        return undecided

    def _to_be_moved(self, node: Node) -> _Moves:
        """If an operand is split as the equation cannot be: the factors to which its parts may move."""
        e = node.equation
        if e is None or e.rule is None or not e.rule.is_free:
            return ()
        operands = tuple([self.dims[x] if isinstance(x, Value) else () for x in e.inputs])
        key = e.rule, operands
        if key not in self.movable:
            self.movable[key] = tuple(_to_be_moved(e.rule, operands, self.mesh))
        return self.movable[key]

    def _agree(self, node: Node) -> tuple[Split, dict[int, Atoms]]:
        """The split of a node that its arrays agree on, and the factors on which they disagree."""
        if node.fixed is not None:
            try:
                return node.fixed(self.mesh), {}
            except ShardingError as reason:  # the split names an axis that the mesh does not have
                line = reason.where or (node.equation and node.equation.line) or None
                raise ShardingError(reason.what, line, reason.got, reason.hint) from None
        claims: Split = self._pinned(node)
        disputed: dict[int, Atoms] = {}
        pinned = frozenset(claims)
        barred = self.manual.at(node.equation) if node.equation is not None else frozenset[str]()
        for value, dims in node.tensors:
            for f, suggested in project(dims, self.dims[value], node.factors, self.mesh).items():
                atoms = before_any(suggested, barred)
                claimed = claims.get(f)
                if f in pinned or not atoms:
                    continue
                if claimed is None or claimed == atoms[: len(claimed)]:
                    claims[f] = atoms
                elif claimed[: len(atoms)] != atoms:
                    claims[f] = common_prefix(claimed, atoms)
                    disputed[f] = (*disputed.get(f, ()), *claimed, *atoms)
        _drop_atoms_of_several(claims, disputed, node.component)
        return claims, disputed

    def _pinned(self, node: Node) -> Split:
        return {} if node.equation is None else dict(self.manual.pinned(node.equation))

    def _refined(self, node: Node, split: Split) -> Sequence[Change]:
        """The changes that refine open dimensions of a node's arrays to a split of its factors."""
        dims_of = {value: list(self.dims[value]) for value, _ in node.tensors}
        changes = []
        for i, (value, dims) in enumerate(node.tensors):
            current_dims, is_open = dims_of[value], self.open[value]
            for d, factors in enumerate(dims):
                if not is_open[d]:
                    continue
                wanted = before_any(_fitting(factors, split, node.factors, self.mesh), self.manual.of(value))
                if (
                    factors
                    and node.factors[factors[0]].kind == COMMUNICATE
                    and value.shape[d] < self.mesh.count(wanted)
                ):
                    continue  # a short slice of a split dimension: most devices would have no part of it
                current_atoms = current_dims[d]
                if len(wanted) <= len(current_atoms) or wanted[: len(current_atoms)] != current_atoms:
                    continue
                new = set(wanted)
                if not new.isdisjoint(dict(self.unreduced.get(value, ()))):
                    continue  # the value is unreduced over these atoms
                if not all(new.isdisjoint(dim) for other, dim in enumerate(current_dims) if other != d):
                    continue
                current_dims[d] = wanted
                others = (k for k, (v, _) in enumerate(node.tensors) if v is not value)
                source = next((k for k in others if any(map(new.intersection, dims_of[node.tensors[k][0]]))), None)
                changes.append(Change(i, d, wanted, source))
        return changes

    def _change(self, node: Node, changes: Sequence[Change]) -> None:
        e = node.line_of
        for i, d, atoms, source in changes:
            value, old_dims = node.tensors[i][0], self.dims[node.tensors[i][0]]
            self.dims[value] = (*old_dims[:d], atoms, *old_dims[d + 1 :])
            from_value = None if source is None else node.tensors[source][0]
            self.reasons[value, d] = Reason("propagated", e.line if e else "", e.name if e else "", from_value)
            self._wake(value)


def _drop_atoms_of_several(claims: Split, disputed: dict[int, Atoms], component: Sequence[int]) -> None:
    """Cuts claims before the first atom that two factors of one component claim, and adds the rest to ``disputed``."""
    owners: dict[tuple[int, str], int] = {}
    claimed_twice: set[tuple[int, str]] = set()
    for f, atoms in claims.items():
        for a in atoms:
            if owners.setdefault((component[f], a), f) != f:
                claimed_twice.add((component[f], a))
    if not claimed_twice:
        return
    for f, atoms in claims.items():
        cut = next((i for i, a in enumerate(atoms) if (component[f], a) in claimed_twice), len(atoms))
        if cut < len(atoms):
            claims[f] = atoms[:cut]
            disputed[f] = (*disputed.get(f, ()), *atoms[cut:])


def _to_be_moved(rule: Rule, operands: Sequence[Sequence[Atoms]], mesh: Mesh) -> Iterator[tuple[int, Atoms]]:
    """The parallel factors of operands that are split as the equation cannot be, each with all atoms of its operand."""
    for dims, dims_of_operand in zip(rule.operands, operands, strict=True):
        split = project(dims, dims_of_operand, rule.factors, mesh) if any(dims_of_operand) else {}
        if any(dims_of_operand) and (place(dims, split) != dims_of_operand or not is_valid(rule, split, mesh)):
            atoms = tuple(a for group in dims_of_operand for a in group)
            yield from ((f, atoms) for group in dims for f in group if rule.factors[f].kind == PARALLEL)


def _fitting(factors: tuple[int, ...], split: Split, factor_table: Sequence[Factor], mesh: Mesh) -> Atoms:
    """The atoms that a split gives a dimension, as far as they leave its parts contiguous and equal."""
    if len(factors) == 1:
        return split.get(factors[0], ())
    atoms: list[str] = []
    for f in factors:
        factor_atoms = split.get(f, ())
        while factor_atoms and factor_table[f].size % mesh.count(factor_atoms):
            factor_atoms = factor_atoms[:-1]
        atoms += factor_atoms
        if mesh.count(factor_atoms) != factor_table[f].size:
            break
    return tuple(atoms)
