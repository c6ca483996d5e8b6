"""Facts: what follows from the marks: a sharding for every value that they reach, and why.

An iterative data-flow analysis over factors, forward and backward at once: whatever sharding one array of an
equation has is projected on the equation's factors and from there on its other arrays, whose dimensions are only
ever refined (an atom, once given, stays). Shardings cross the borders of loops and branches along their edges.

Priorities, each run until nothing changes before the next begins; any news returns to the first:

    1. equations that only move or combine elements where they are, and edges of regions
    2. equations that reduce or communicate with neighbours (contractions, sums, scatters, slices)
    3. equations whose arrays disagree: the cheapest split wins, counting the bytes that each device must send
    4. equations that make many elements of few: a mask says less of the scores than what they are made of

Where a loop runs over a dimension that is split, each device runs the rounds that it has, if these need nothing of each
other and nothing is split inside (``passes.decompose``). The results of an equation that cannot be split as an operand
is are split along another dimension, if that sends less. The user's marks, and shardings that arguments came with, are
set before all this and never changed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from gshard.core.device_order import Order
from gshard.core.mark import Demand, resolve
from gshard.core.mesh import Atoms, Mesh, common_prefix
from gshard.core.plan import Reason
from gshard.core.program import Edge, Equation, Program, Value
from gshard.core.rule import COMMUNICATE, REDUCE, Dims, Factor, Rule
from gshard.core.sharding import Sharding
from gshard.core.split import Split, is_valid, place, project
from gshard.passes.candidates import arrays_of, candidates
from gshard.passes.decompose import Decompositions
from gshard.passes.price import price


@dataclasses.dataclass(frozen=True, eq=False)
class Facts:
    """What follows from the marks of a program.

    Attributes:
        program: in which some equations are others, as they are split (``passes.decompose``).
        mesh: the devices.
        shardings: of every value; what nothing is known of is replicated.
        reasons: for each value and dimension that is split, why.
        orders: the order of the devices in which a marked value is to be, where that is not the mesh's.
    """

    program: Program
    mesh: Mesh
    shardings: Mapping[Value, Sharding]
    reasons: Mapping[tuple[Value, int], Reason]
    orders: Mapping[Value, Order]

    @functools.cached_property
    def arguments(self) -> frozenset[Value]:
        """The inputs of the program: they come as the facts say."""
        return frozenset(self.program.block.inputs)

    @functools.cached_property
    def kept(self) -> frozenset[Value]:
        """The results that leave as the facts say: marked ones, and those sharded as an argument of their kind is.

        So the state of a training loop keeps its sharding from step to step.
        """
        block = self.program.block
        state = {(v.shape, v.dtype, self.shardings[v]) for v in block.inputs}
        fixed = {v for e in block.equations if e.mark is not None or (e.rule and e.rule.fixed) for v in e.outputs}
        results = {v for v in block.outputs if isinstance(v, Value)}
        return frozenset(v for v in results if v in fixed or (v.shape, v.dtype, self.shardings[v]) in state)


def facts_of(program: Program, mesh: Mesh) -> Facts:
    """Follows the marks of a program to a fixed point.

    Raises:
        ShardingError: a mark does not fit its value or the mesh.
    """
    state = _State(program, mesh)
    state.seed()
    state.run()
    if state.other is not None:
        return facts_of(state.other, mesh)
    shardings = {v: Sharding(tuple(dims)) for v, dims in state.dims.items()}
    return Facts(program, mesh, shardings, state.reasons, state.orders)


def demands(program: Program, mesh: Mesh) -> Iterator[tuple[Value, Demand, Reason]]:
    """What the user said of values: marks, and shardings of arguments.

    Raises:
        ShardingError: a mark does not fit its value or the mesh.
    """
    captured = len(program.captured)
    for value, mark, name in zip(
        program.block.inputs[captured:], program.argument_marks, program.names[captured:], strict=True
    ):
        if mark is not None:
            came = f"{name}, {mark.said}" if mark.said else name
            yield value, resolve(mark, mesh, value.shape, f"argument {name}"), Reason("argument", "", came)
    for e in program.block.walk():
        if e.mark is not None:
            (value,) = e.outputs
            yield value, resolve(e.mark, mesh, value.shape, e.line), Reason("mark", e.line, str(e.mark))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """An equation or an edge, as the analysis sees it."""

    factors: tuple[Factor, ...]
    component: tuple[int, ...]
    tensors: tuple[tuple[Value, Dims], ...]
    priority: int
    equation: Equation | None
    line_of: Equation | None
    fixed: Callable[[Mesh], Split] | None = None


class _State:
    """Shardings as far as they are known, and who is to be asked next."""

    def __init__(self, program: Program, mesh: Mesh):
        self.program, self.mesh = program, mesh
        self.dims: dict[Value, list[Atoms]] = {}
        self.open: dict[Value, list[bool]] = {}
        self.reasons: dict[tuple[Value, int], Reason] = {}
        self.orders: dict[Value, Order] = {}
        self.nodes: list[_Node] = []
        self.users: dict[Value, list[_Node]] = {}
        for value in program.block.inputs:
            self._meet(value)
        for equation in program.block.walk():
            for block in equation.blocks:
                for value in block.inputs:
                    self._meet(value)
            for value in equation.outputs:
                self._meet(value)
            for node in _nodes(equation):
                self.nodes.append(node)
                for value, _ in node.tensors:
                    self.users.setdefault(value, []).append(node)
        self.position = {node: i for i, node in enumerate(self.nodes)}
        self.decompositions = Decompositions(program)
        self.other: Program | None = None  # the program that this one is, as its values are split
        self.queues: tuple[deque[_Node], ...] = (deque(), deque(), deque())
        self.pending: set[_Node] = set()
        self.conflicts: dict[_Node, None] = {}
        self.settled: set[_Node] = set()  # nodes that had nothing to resolve, and whose arrays are as they were then

    def _meet(self, value: Value) -> None:
        self.dims[value] = [()] * len(value.shape)
        self.open[value] = [True] * len(value.shape)

    def seed(self) -> None:
        """Sets what the user said: marks, and shardings of arguments."""
        for value, demand, reason in demands(self.program, self.mesh):
            self._set(value, demand.dims, demand.open, reason)
            if demand.order != self.mesh.order and any(demand.dims):
                self.orders[value] = demand.order
        for node in self.nodes:
            if node.fixed is not None and node not in self.pending:
                self.pending.add(node)
                self.queues[node.priority].append(node)

    def _set(self, value: Value, dims: Sequence[Atoms], open_dims: Sequence[bool], reason: Reason) -> None:
        self.dims[value] = list(dims)
        self.open[value] = list(open_dims)
        for d, atoms in enumerate(dims):
            if atoms:
                self.reasons[value, d] = reason
        self._wake(value)

    def _wake(self, value: Value) -> None:
        for node in self.users.get(value, ()):
            self.settled.discard(node)
            if node not in self.pending:
                self.pending.add(node)
                self.queues[node.priority].append(node)

    def run(self) -> None:
        """Asks equations until nothing changes, the conflicting ones last and cheapest first come."""
        while True:
            while queue := self.queues[0] or self.queues[1]:
                self._ask(queue.popleft())
            if any(self._resolve(node) for node in self._in_order(self.conflicts.keys() - self.settled)):
                continue
            if self.queues[2]:
                self._ask(self.queues[2].popleft())
                continue
            self.other = self.decompositions.taken(self.dims, self.mesh)
            if self.other is not None:
                return
            left = (node for node in self.nodes if node not in self.settled and self._is_in_the_way(node))
            if not any(self._resolve(node) for node in left):
                return

    def _ask(self, node: _Node) -> None:
        self.pending.discard(node)
        agreed, conflict = self._agree(node)
        self.conflicts.update({node: None} if conflict else {})
        self._apply(node, agreed, "propagated")

    def _is_in_the_way(self, node: _Node) -> bool:
        """Whether an operand is split where the equation cannot be: its parts may move to another dimension."""
        e = node.equation
        if e is None or e.rule is None:
            return False
        for x, dims in zip(e.inputs, e.rule.operands, strict=True):
            if isinstance(x, Value) and any(have := tuple(self.dims[x])):
                split = project(dims, have, e.rule.factors, self.mesh)
                if place(dims, split) != have or not is_valid(e.rule, split, self.mesh):
                    return True
        return False

    def _in_order(self, nodes: Iterable[_Node]) -> list[_Node]:
        return sorted(nodes, key=self.position.__getitem__)

    def _agree(self, node: _Node) -> tuple[Split, bool]:
        """What the arrays of a node say about its factors where they do not contradict each other."""
        if node.fixed is not None:
            return node.fixed(self.mesh), False
        claims: Split = {}
        conflict = False
        for value, dims in node.tensors:
            for f, atoms in project(dims, self.dims[value], node.factors, self.mesh).items():
                known = claims.get(f)
                if known is None or known == atoms[: len(known)]:
                    claims[f] = atoms
                elif known[: len(atoms)] != atoms:
                    claims[f] = common_prefix(known, atoms)
                    conflict = True
        owners: dict[tuple[int, str], int] = {}
        disputed: set[tuple[int, str]] = set()
        for f, atoms in claims.items():
            for a in atoms:
                if owners.setdefault((node.component[f], a), f) != f:
                    disputed.add((node.component[f], a))
        if disputed:
            conflict = True
            for f, atoms in claims.items():
                cut = next((i for i, a in enumerate(atoms) if (node.component[f], a) in disputed), len(atoms))
                claims[f] = atoms[:cut]
        return claims, conflict

    def _apply(self, node: _Node, split: Split, kind: str) -> bool:
        """Refines the open dimensions of a node's arrays to a split of its factors."""
        changed = False
        for value, dims in node.tensors:
            current, is_open = self.dims[value], self.open[value]
            if not any(is_open):
                continue
            for d, factors in enumerate(dims):
                if not is_open[d]:
                    continue
                wanted = _fitting(factors, split, node.factors, self.mesh)
                if (
                    factors
                    and node.factors[factors[0]].kind == COMMUNICATE
                    and value.shape[d] < self.mesh.count(wanted)
                ):
                    continue  # a short part of a split dimension: most devices would have none of it
                have = current[d]
                if len(wanted) <= len(have) or wanted[: len(have)] != have:
                    continue
                used = {a for i, dim in enumerate(current) if i != d for a in dim}
                if used & set(wanted):
                    continue
                current[d] = wanted
                self.reasons[value, d] = self._reason(node, value, wanted, kind)
                changed = True
                self._wake(value)
        return changed

    def _reason(self, node: _Node, value: Value, wanted: Atoms, kind: str) -> Reason:
        source = next(
            (v for v, _ in node.tensors if v is not value and any(set(wanted) & set(dim) for dim in self.dims[v])), None
        )
        e = node.line_of
        return Reason(kind, e.line if e else "", e.name if e else "", source)

    def _resolve(self, node: _Node) -> bool:
        """Settles a disagreement: the cheapest split refines what is still open."""
        equation = node.equation
        refinable = any(self._could_refine(value) for value, _ in node.tensors)
        if equation is None or equation.rule is None or not refinable:
            self.settled.add(node)
            return False
        rule = equation.rule
        arrays = [v for v in (*equation.inputs, *equation.outputs) if isinstance(v, Value)]
        shardings = {v: Sharding(tuple(self.dims[v])) for v in arrays}

        def cost(split: Split) -> float:
            following = self._following(node, split, shardings)
            return price(rule, split, arrays_of(equation, following), self.mesh)

        best = min(candidates(rule, arrays_of(equation, shardings), self.mesh), key=cost)
        changed = self._apply(node, best, "cost")
        if not changed:
            self.settled.add(node)
        return changed

    def _could_refine(self, value: Value) -> bool:
        return any(is_open and not atoms for is_open, atoms in zip(self.open[value], self.dims[value], strict=True))

    def _following(self, node: _Node, split: Split, shardings: Mapping[Value, Sharding]) -> dict[Value, Sharding]:
        """The shardings as they would be if open dimensions followed the split."""
        following = dict(shardings)
        for value, dims in node.tensors:
            wanted = place(dims, split)
            have = following[value].dims
            new = list(have)
            for d, atoms in enumerate(wanted):
                used = {a for i, dim in enumerate(new) if i != d for a in dim}
                if self.open[value][d] and atoms[: len(have[d])] == have[d] and not used & set(atoms):
                    new[d] = atoms
            following[value] = Sharding(tuple(new))
        return following


def _nodes(equation: Equation) -> list[_Node]:
    if equation.rule is None:
        return [_edge_node(edge, equation) for edge in equation.edges]
    rule = equation.rule
    tensors = [
        (value, dims)
        for value, dims in zip((*equation.inputs, *equation.outputs), (*rule.operands, *rule.results), strict=True)
        if isinstance(value, Value) and value.shape
    ]
    node = _Node(rule.factors, rule.component, tuple(tensors), _priority(rule), equation, equation, rule.fixed)
    return [node] if tensors else []


def _priority(rule: Rule) -> int:
    """0 where elements stay or are combined in place, 1 where some are summed or sent, 2 where few become many."""
    if any(f.kind in (REDUCE, COMMUNICATE) for f in rule.factors):
        return 1
    held = {f for dims in rule.operands for dim in dims for f in dim}
    new = (f for dims in rule.results for dim in dims for f in dim if f not in held)
    return 2 if held and any(rule.factors[f].size > 1 for f in new) else 0


def _edge_node(edge: Edge, equation: Equation) -> _Node:
    rule = edge.rule
    tensors = ((edge.outer, rule.operands[0]), (edge.inner, rule.results[0]))
    return _Node(rule.factors, rule.component, tensors, 0, None, equation)


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
