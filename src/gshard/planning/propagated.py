"""Propagates marks: a sharding for every value that the marks reach, and why.

This is an iterative data-flow analysis over factors, forward and backward at once. It projects the sharding of one
array of an equation on the equation's factors, and from there on the other arrays. It only refines dimensions: an axis,
once given, stays. Shardings cross the boundaries of loops and branches along their edges.

The analysis runs each priority until nothing changes; any change returns to the first:

    1. equations that only move or combine elements where they are, and edges of regions
    2. equations that reduce or communicate with neighbours (contractions, sums, scatters, slices)
    3. equations that make many elements of few: a mask says less of the scores than the operands of their product

It sets the user's marks, and the shardings of arguments, first, and never changes them. It never changes the program
either: ``planning.settled`` alternates it with the rewrites that depend on shardings (``planning.decompose``).

Where the arrays of an equation disagree, or it cannot be split as one of them is, nothing follows.
``Propagated.undecided`` lists which dimensions could still be split so, there and wherever that leads; planning chooses
among them by cost.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from gshard.core.device_order import Order
from gshard.core.errors import ShardingError
from gshard.core.manual_axes import before_any, manual_axes
from gshard.core.mesh import Atoms, Mesh, common_prefix
from gshard.core.plan import Plan, Reason
from gshard.core.program import Program, Value
from gshard.core.rule import COMMUNICATE, PARALLEL, REPLICATE, Factor, Rule
from gshard.core.sharding import Sharding
from gshard.core.split import Split, is_valid, place, project
from gshard.planning.candidates import arrays_of, candidates, spread
from gshard.planning.demands import demands
from gshard.planning.nodes import Change, Node, nodes_of


@dataclasses.dataclass(frozen=True, eq=False)
class Propagated:
    """What follows from the marks of a program.

    Attributes:
        program: the program.
        mesh: the devices.
        shardings: of every value; a value that no mark reaches is replicated.
        reasons: for each value and dimension that is split, why.
        orders: the order of the devices in which a marked value is to be, where that is not the mesh's.
        undecided: of values, the atoms that open dimensions could get from equations whose arrays disagree.
        moved: of values, how they would be split if parts that cannot stay moved to the first dimension that can have
            them, or were spread over the dimensions that are joined, and wherever that leads.
    """

    program: Program
    mesh: Mesh
    shardings: Mapping[Value, Sharding]
    reasons: Mapping[tuple[Value, int], Reason]
    orders: Mapping[Value, Order]
    undecided: Mapping[Value, Mapping[int, frozenset[str]]]
    moved: Mapping[Value, Sharding]

    def could(self, value: Value) -> Mapping[int, frozenset[str]]:
        """What open dimensions of a value could get where arrays disagree."""
        return self.undecided.get(value, {})

    def allow(self, value: Value, sharding: Sharding) -> bool:
        """Whether a sharding is as propagation says, and beyond that splits only what is undecided."""
        more = self.could(value)
        known = enumerate(zip(self.shardings[value].dims, sharding.dims, strict=True))
        return all(own[: len(k)] == k and more.get(d, frozenset()).issuperset(own[len(k) :]) for d, (k, own) in known)

    @functools.cached_property
    def supposed(self) -> Mapping[Value, Sharding]:
        """The shardings, with those of ``moved`` in their place."""
        return {**self.shardings, **self.moved}

    def __str__(self) -> str:
        return (
            f"shardings from the marks, {Plan(self.program, self.mesh, self.shardings, {}, self.reasons, self.orders)}"
        )

    @functools.cached_property
    def kept(self) -> frozenset[Value]:
        """The results that leave as propagation says: marked ones, and those sharded as an argument of their kind is.

        So the state of a training loop keeps its sharding from step to step.
        """
        block = self.program.block
        state = {(v.shape, v.dtype, self.shardings[v]) for v in block.inputs if v not in self.undecided}
        fixed = {v for e in block.equations if e.mark is not None or (e.rule and e.rule.fixed) for v in e.outputs}
        results = {v for v in block.outputs if isinstance(v, Value)}
        return frozenset(v for v in results if v in fixed or (v.shape, v.dtype, self.shardings[v]) in state)


def propagated_from(program: Program, mesh: Mesh) -> Propagated:
    """Propagates the marks of a program to a fixed point.

    Args:
        program: with the rules of the mesh (``planning.on_mesh``).
        mesh: the devices.

    Raises:
        ShardingError: a mark does not fit its value or the mesh.
    """
    state = _State(program, mesh)
    state.seed()
    state.run()
    shardings, reasons, moving = state.shardings(), dict(state.reasons), state.moving()
    undecided, moved = state.undecided(moving), state.moved(shardings) if moving else {}
    return Propagated(program, mesh, shardings, reasons, state.orders, undecided, moved)


_Moves = Sequence[tuple[int, Atoms]]  # factors, and what may move there


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
        self.ways: dict[object, _Moves] = {}
        self.ones: dict[tuple[Atoms, ...], Sharding] = {}
        self.unreduced: dict[Value, tuple[tuple[str, str], ...]] = {}

    def _meet(self, value: Value) -> None:
        self.dims[value] = ((),) * len(value.shape)
        self.open[value] = (True,) * len(value.shape)

    def seed(self) -> None:
        """Sets what the user said: marks, and shardings of arguments."""
        for value, demand, reason in demands(self.program, self.mesh):
            self._set(value, demand.dims, demand.open, reason)
            if demand.order != self.mesh.order:
                self.orders[value] = demand.order
            if demand.unreduced:
                self.unreduced[value] = demand.unreduced
        for node in self.nodes:
            if (node.fixed is not None or self._pinned(node)) and node not in self.pending:
                self.pending.add(node)
                self.queues[node.priority].append(node)

    def _set(self, value: Value, dims: Sequence[Atoms], open_dims: Sequence[bool], reason: Reason) -> None:
        self.dims[value] = tuple(dims)
        self.open[value] = tuple(open_dims)
        for d, atoms in enumerate(dims):
            if atoms:
                self.reasons[value, d] = reason
        self._wake(value)

    def _wake(self, value: Value) -> None:
        for node in self.users.get(value, ()):
            if node not in self.pending:
                self.pending.add(node)
                self.queues[node.priority].append(node)

    def shardings(self) -> dict[Value, Sharding]:
        """The sharding of every value, as far as it is known."""
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
            values = [v for v, _ in node.tensors]
            key: tuple[object, ...] = (
                node.alike, *map(self.dims.__getitem__, values), *map(self.open.__getitem__, values)
            )  # fmt: skip
            if self.manual.inside:
                key = (*key, *map(self.manual.of, values))
            if self.unreduced:
                key = (*key, *map(self.unreduced.get, values))
            if key not in self.found:
                agreed, disputed = self._agree(node)
                self.found[key] = disputed, self._refined(node, agreed)
            self.disputed[node], changes = self.found[key]
            self._change(node, changes)

    def moved(self, known: Mapping[Value, Sharding]) -> dict[Value, Sharding]:
        """Values that would be split otherwise than ``known``. Changes the state: call it last."""
        for node in self.nodes:
            e = node.equation
            if node in self.disputed and e is not None and e.rule is not None and self._to_be_moved(node):
                values = (v for v in (*e.inputs, *e.outputs) if isinstance(v, Value))
                arrays = arrays_of(e, {v: self._sharding(v) for v in values})
                ways = itertools.chain(spread(e.rule, arrays, self.mesh), candidates(e.rule, arrays, self.mesh))
                split = next((own for own in ways if any(own.values())), None)
                if split is not None:
                    self._change(node, self._refined(node, split))
                    self.run()
        return {v: s for v, s in self.shardings().items() if s != known[v]}

    def moving(self) -> dict[Node, _Moves]:
        """The equations that cannot be split as an operand of theirs is, and where its parts may move."""
        found = {node: self._to_be_moved(node) for node in self.disputed}
        return {node: ways for node, ways in found.items() if ways}

    def undecided(self, moving: Mapping[Node, _Moves]) -> dict[Value, dict[int, frozenset[str]]]:
        """What open dimensions could get where arrays disagree or have to move, and wherever that leads."""
        found: dict[Value, dict[int, frozenset[str]]] = {}
        changed: deque[tuple[Value, int]] = deque()

        def note(node: Node, f: int, atoms: frozenset[str]) -> None:
            for value, dims in node.tensors:
                allowed = atoms - self.manual.of(value)
                for d, own in enumerate(dims):
                    if f in own and self.open[value][d] and allowed:
                        have = found.setdefault(value, {}).get(d, frozenset())
                        if not allowed <= have:
                            found[value][d] = have | allowed
                            changed.append((value, d))

        for node, disputed in self.disputed.items():
            for f, atoms in (*disputed.items(), *moving.get(node, ())):
                note(node, f, frozenset(atoms))
        while changed:
            value, d = changed.popleft()
            for node in self.users[value]:
                for own in (dims[d] for v, dims in node.tensors if v is value):
                    for f in own:
                        if node.factors[f].kind != REPLICATE:
                            note(node, f, found[value][d])
        return found

    def _to_be_moved(self, node: Node) -> _Moves:
        """Where an operand is split as the equation cannot be: the dimensions to which its parts may move."""
        e = node.equation
        if e is None or e.rule is None or not e.rule.is_free:
            return ()
        operands = tuple([self.dims[x] if isinstance(x, Value) else () for x in e.inputs])
        key = e.rule, operands
        if key not in self.ways:
            self.ways[key] = tuple(_to_be_moved(e.rule, operands, self.mesh))
        return self.ways[key]

    def _agree(self, node: Node) -> tuple[Split, dict[int, Atoms]]:
        """What the arrays of a node say about its factors, and the factors with contradictions."""
        if node.fixed is not None:
            try:
                return node.fixed(self.mesh), {}
            except ShardingError as reason:  # it names what the mesh does not have
                line = reason.where or (node.equation and node.equation.line) or None
                raise ShardingError(reason.what, line, reason.got, reason.hint) from None
        claims: Split = self._pinned(node)
        disputed: dict[int, Atoms] = {}
        pinned = frozenset(claims)
        barred = self.manual.at(node.equation) if node.equation is not None else frozenset[str]()
        for value, dims in node.tensors:
            for f, atoms in project(dims, self.dims[value], node.factors, self.mesh).items():
                atoms, known = before_any(atoms, barred), claims.get(f)
                if f in pinned or not atoms:
                    continue
                if known is None or known == atoms[: len(known)]:
                    claims[f] = atoms
                elif known[: len(atoms)] != atoms:
                    claims[f] = common_prefix(known, atoms)
                    disputed[f] = (*disputed.get(f, ()), *known, *atoms)
        owners: dict[tuple[int, str], int] = {}
        twice: set[tuple[int, str]] = set()
        for f, atoms in claims.items():
            for a in atoms:
                if owners.setdefault((node.component[f], a), f) != f:
                    twice.add((node.component[f], a))
        for f, atoms in claims.items() if twice else ():
            cut = next((i for i, a in enumerate(atoms) if (node.component[f], a) in twice), len(atoms))
            if cut < len(atoms):
                claims[f], disputed[f] = atoms[:cut], (*disputed.get(f, ()), *atoms[cut:])
        return claims, disputed

    def _pinned(self, node: Node) -> Split:
        return {} if node.equation is None else dict(self.manual.pinned(node.equation))

    def _refined(self, node: Node, split: Split) -> Sequence[Change]:
        """How the open dimensions of a node's arrays are refined to a split of its factors."""
        own = {value: list(self.dims[value]) for value, _ in node.tensors}
        found = []
        for i, (value, dims) in enumerate(node.tensors):
            current, is_open = own[value], self.open[value]
            for d, factors in enumerate(dims):
                if not is_open[d]:
                    continue
                wanted = before_any(_fitting(factors, split, node.factors, self.mesh), self.manual.of(value))
                if (
                    factors
                    and node.factors[factors[0]].kind == COMMUNICATE
                    and value.shape[d] < self.mesh.count(wanted)
                ):
                    continue  # a short part of a split dimension: most devices would have none of it
                have = current[d]
                if len(wanted) <= len(have) or wanted[: len(have)] != have:
                    continue
                new = set(wanted)
                if not new.isdisjoint(dict(self.unreduced.get(value, ()))):
                    continue  # it is in parts of a sum over these
                if not all(new.isdisjoint(dim) for other, dim in enumerate(current) if other != d):
                    continue
                current[d] = wanted
                others = (k for k, (v, _) in enumerate(node.tensors) if v is not value)
                source = next((k for k in others if any(map(new.intersection, own[node.tensors[k][0]]))), None)
                found.append(Change(i, d, wanted, source))
        return found

    def _change(self, node: Node, changes: Sequence[Change]) -> None:
        e = node.line_of
        for i, d, atoms, source in changes:
            value, dims = node.tensors[i][0], self.dims[node.tensors[i][0]]
            self.dims[value] = (*dims[:d], atoms, *dims[d + 1 :])
            came = None if source is None else node.tensors[source][0]
            self.reasons[value, d] = Reason("propagated", e.line if e else "", e.name if e else "", came)
            self._wake(value)


def _to_be_moved(rule: Rule, operands: Sequence[Sequence[Atoms]], mesh: Mesh) -> Iterator[tuple[int, Atoms]]:
    for dims, have in zip(rule.operands, operands, strict=True):
        split = project(dims, have, rule.factors, mesh) if any(have) else {}
        if any(have) and (place(dims, split) != have or not is_valid(rule, split, mesh)):
            atoms = tuple(a for own in have for a in own)
            yield from ((f, atoms) for own in dims for f in own if rule.factors[f].kind == PARALLEL)


def _fitting(factors: tuple[int, ...], split: Split, table: Sequence[Factor], mesh: Mesh) -> Atoms:
    """The atoms that a split puts on a dimension, as far as they leave its parts contiguous and equal."""
    if len(factors) == 1:
        return split.get(factors[0], ())
    atoms: list[str] = []
    for f in factors:
        own = split.get(f, ())
        while own and table[f].size % mesh.count(own):
            own = own[:-1]
        atoms += own
        if mesh.count(own) != table[f].size:
            break
    return tuple(atoms)
