"""Reduce: makes a problem smaller without changing its best solution.

Each rule keeps at least one best solution, and memory is kept to the byte:

* a state that every state of some neighbour forbids goes (arc consistency), as does one whose bytes do not fit
  beside the least of all other nodes;
* a moment that even the largest bytes do not fill is no moment, and a load without moments is none;
* a node whose state follows from a neighbour's is merged into it, loads and all;
* a node without loads and with at most two neighbours is eliminated (node and edge elimination of Jia, Lin, Qi and
  Aiken, Exploring Hidden Dimensions in Parallelizing Convolutional Neural Networks, ICML 2018);
* an edge whose table is a sum of a row and a column is none;
* a state that another of the same node beats whatever the neighbours choose, with no more bytes, goes (dead-end
  elimination; Goldstein, Biophysical Journal 1994).

Equal layers of a model are equal nodes with equal tables: what one of them comes to is known for all.

    >>> p = Problem.of([[0, 3], [1, 0], [2, 5]], [(0, 1, [[0, 9], [9, 0]]), (1, 2, [[0, np.inf], [np.inf, 0]])])
    >>> small = reduce(p)
    >>> len(small.problem.tables), small.lift([0] * len(small.problem.costs)).tolist()
    (0, [0, 0, 0])
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import numpy as np

from gshard.core.deadline import check_deadline
from gshard.solver.done import Done
from gshard.solver.moments import fullest_moments
from gshard.solver.problem import Floats, Ints, Load, Problem, ProblemError, accumulated
from gshard.solver.reduced import DoesNotFit, Dominated, Reduced, Step

TABLE = 4096  # entries of the table that the elimination of a node with two neighbours may leave
GROWTH = 100_000  # entries by which a merge may make the tables larger
DOMINANCE = 60_000  # entries that comparing all pairs of states over one edge may take
_Beaten = tuple[tuple[tuple[int, int], ...], np.ndarray | None]


def reduce(problem: Problem) -> Reduced:
    """Applies all rules until none applies.

    Raises:
        ProblemError: some node is left without a state by what is forbidden.
        DoesNotFit: likewise, but only because of memory.
    """
    work = _Work(problem)
    work.settle()
    while work.fewer_loads() | work.fewer_states():
        work.settle()
    return work.result()


class _Work:
    """The problem while it shrinks: tables by neighbour, loads by rows of moments; all containers ordered."""

    def __init__(self, problem: Problem):
        n = len(problem.costs)
        self.whole = problem
        done = self.done = Done()
        given = {id(array): array for array in (*problem.costs, *problem.tables)}
        one = {i: done.one(array) for i, array in given.items()}
        self.turned: dict[int, Floats] = {}
        self.beaten: dict[tuple[int, ...], _Beaten] = {}
        self.cost: list[Floats] = [one[id(cost)] for cost in problem.costs]
        self.kept: list[Ints] = [done(_numbered, cost) for cost in self.cost]
        self.near: list[dict[int, Floats]] = [{} for _ in range(n)]
        self.loads: list[dict[tuple[int, int], Floats]] = [{} for _ in range(n)]
        self.alive = [True] * n
        self.constant = 0.0
        self.by_memory = False  # whether a state went for its bytes
        self.fixed = np.zeros(len(problem.moments))
        self.steps: list[Step | Dominated] = []
        for (u, v), table in zip(problem.ends.tolist(), problem.tables):
            self._join(u, v, one[id(table)])
        if problem.limit is not None:
            for load, (first, last) in zip(problem.loads, problem.rows.tolist()):
                self._load(load.node, (first, last), load.bytes)
        self.changed: dict[int, None] = dict.fromkeys(range(n))  # nodes, since states were last compared
        self.edges: dict[tuple[int, int], None] = dict.fromkeys(map(tuple, problem.ends.tolist()))
        self.nodes: dict[int, None] = dict.fromkeys(range(n))
        for i in range(n):
            self._restrict(i, done(_finite, self.cost[i]))

    def settle(self) -> None:
        """Works off the edges and nodes that something changed at."""
        while self.edges or self.nodes:
            check_deadline()
            if self.edges:
                (i, j), _ = self.edges.popitem()
                if self.alive[i] and self.alive[j] and j in self.near[i]:
                    self._edge(i, j)
            else:
                i, _ = self.nodes.popitem()
                if self.alive[i]:
                    self._node(i)

    def fewer_loads(self) -> bool:
        """Drops loads of moments that cannot be too full; removes states that cannot fit. True if something changed."""
        limit = self.whole.limit
        if limit is None:
            return False
        spans = [(i, rows, amount) for i, own in enumerate(self.loads) for rows, amount in own.items()]
        rows = np.array([span for _, span, _ in spans], dtype=np.int64).reshape(-1, 2)
        most = self.fixed + accumulated(rows, [amount.max() for _, _, amount in spans], self.fixed.size)
        room = limit - self.fixed - accumulated(rows, [amount.min() for _, _, amount in spans], self.fixed.size)
        tight = np.concatenate([[0], np.cumsum(most > limit)])
        self.fixed[most <= limit] = 0.0
        changed = False
        for i, (first, last), _ in spans:
            if tight[first] == tight[last]:
                del self.loads[i][first, last]
                self.nodes[i] = None
                changed = True
        if (room < 0).any():  # nothing fits: which states are to blame is not for a reduction to say
            return changed
        for i, (first, last), amount in spans:
            current = self.loads[i].get((first, last))
            if current is not None and current.size == amount.size:
                fits = self.done.one(amount - amount.min() <= room[first:last].min())
                changed |= not fits.all()
                self.by_memory |= not fits.all()
                self._restrict(i, None if fits.all() else fits)
        return changed

    def fewer_states(self) -> bool:
        """Removes dominated states. True if there were any."""
        found = False
        for i in sorted(self.changed):
            del self.changed[i]
            if self.alive[i] and self.cost[i].size > 1:
                worse, ok = self._dominated(i)
                kept = self.kept[i].tolist() if worse else []
                self.steps += [Dominated(i, kept[b], kept[by]) for b, by in worse]
                self._restrict(i, ok)
                found |= bool(worse)
        return found

    def result(self) -> Reduced:
        left = [i for i, alive in enumerate(self.alive) if alive]
        place = {i: k for k, i in enumerate(left)}
        ends = sorted((place[i], place[j]) for i in left for j in self.near[i] if i < j)
        nodes, kept, costs = list(left), [self.kept[i] for i in left], [self.cost[i] for i in left]
        spans = [(place[i], span, amount) for i in left for span, amount in self.loads[i].items()]
        if self.constant or self.fixed.any():
            nodes.append(-1)
            kept.append(np.zeros(1, dtype=np.int64))
            costs.append(np.array([self.constant]))
            steps = np.flatnonzero(np.diff(self.fixed)) + 1
            for a, b in zip([0, *steps.tolist()], [*steps.tolist(), self.fixed.size]):
                if b > a:
                    spans.append((len(left), (a, b), self.fixed[a : a + 1]))
        moments = fullest_moments(spans, self.fixed.size)
        loads: dict[tuple[int, int, int], Floats] = {}
        for node, span, amount in spans:
            first, last = np.searchsorted(moments, span).tolist()
            if last > first and amount.any():
                key = node, first, last
                loads[key] = loads[key] + amount if key in loads else amount
        small = Problem(
            costs=tuple(costs),
            ends=np.array(ends, dtype=np.int64).reshape(-1, 2),
            tables=tuple(self.near[left[a]][left[b]] for a, b in ends),
            loads=tuple(Load(*key, amount) for key, amount in loads.items()),
            limit=self.whole.limit if loads else None,
        )
        return Reduced(self.whole, small, tuple(nodes), tuple(kept), moments, tuple(self.steps))

    def _edge(self, i: int, j: int) -> None:
        rows, columns, is_sum, by_column, by_row = self.done(_allowed, self.near[i][j])
        for node, ok in ((i, rows), (j, columns)):
            if ok is not None:
                self._restrict(node, ok)
                self.edges[i, j] = None
                return
        if is_sum:
            self._part(i, j)
            return
        ways = []
        if by_column is not None:  # each state of j allows one of i
            ways.append((len(self.near[i]), i, j, by_column))
        if by_row is not None:
            ways.append((len(self.near[j]), j, i, by_row))
        for _, node, into, choice in sorted(ways, key=lambda way: way[:3]):
            if self._growth(node, into) <= GROWTH:
                self._merge(node, into, choice)
                return

    def _node(self, i: int) -> None:
        near = self.near[i]
        if self.cost[i].size == 1:
            for j in list(near):
                self._part(i, j)
            for (first, last), amount in self.loads[i].items():
                self.fixed[first:last] += amount[0]
            self._eliminate(i)
        elif not self.loads[i] and len(near) <= 2:
            if len(near) < 2 or math.prod(self.cost[j].size for j in near) <= TABLE:
                self._eliminate(i)

    def _eliminate(self, i: int) -> None:
        """Takes out a node, the best of it given its neighbours, which are at most two."""
        given = tuple(self.near[i])
        best, choice, extra = self.done(_best, self.cost[i], *self.near[i].values())
        kept = tuple(self.kept[j] for j in given)
        self.steps.append(Step(i, self.kept[i], given, kept, choice, extra))
        for j in given:
            del self.near[j][i]
            self.nodes[j] = None
        if not given:
            self.constant += float(best)
        elif len(given) == 1:
            self._add_cost(given[0], best)
        else:
            self._add_table(given[0], given[1], best)
        self._gone(i)

    def _merge(self, i: int, j: int, choice: Ints) -> None:
        """Takes out node i, whose state is ``choice`` of j's."""
        table = self.near[i].pop(j)
        del self.near[j][i]
        self.steps.append(Step(i, self.kept[i], (j,), (self.kept[j],), choice, None))
        self._add_cost(j, self.done(_merged, self.cost[i], table, choice))
        for k, other in self.near[i].items():
            del self.near[k][i]
            self._add_table(j, k, self.done(operator.getitem, other, choice))
        for rows, amount in self.loads[i].items():
            self._load(j, rows, amount[choice])
        self.nodes[j] = None
        self._gone(i)

    def _part(self, i: int, j: int) -> None:
        """Takes out an edge whose table is a sum of a cost of i and one of j."""
        table = self.near[i].pop(j)
        del self.near[j][i]
        of_row, of_column = self.done(_parts, table)
        if self.cost[i].size > 1:
            self.cost[i] = self.done(np.add, self.cost[i], of_row)
        self._add_cost(j, of_column)
        self.nodes[i] = self.nodes[j] = None
        self.changed[i] = self.changed[j] = None

    def _add_cost(self, j: int, more: Floats) -> None:
        self.cost[j] = self.done(np.add, self.cost[j], more)
        self.changed[j] = None
        self._restrict(j, self.done(_finite, self.cost[j]))

    def _add_table(self, j: int, k: int, more: Floats) -> None:
        self._join(j, k, self.done(np.add, self.near[j][k], more) if k in self.near[j] else more)
        self.edges[j, k] = None
        self.nodes[j] = self.nodes[k] = None
        self.changed[j] = self.changed[k] = None

    def _join(self, i: int, j: int, table: Floats) -> None:
        turned = self.turned.get(id(table))
        if turned is None:
            turned = self.turned[id(table)] = self.done.one(np.ascontiguousarray(table.T))
        self.near[i][j], self.near[j][i] = table, turned

    def _load(self, i: int, rows: tuple[int, int], amount: Floats) -> None:
        if rows[1] > rows[0]:
            self.loads[i][rows] = self.loads[i][rows] + amount if rows in self.loads[i] else amount

    def _gone(self, i: int) -> None:
        self.alive[i] = False
        self.near[i], self.loads[i] = {}, {}

    def _restrict(self, i: int, ok: np.ndarray | None) -> None:
        if ok is None or ok.all():
            return
        ok = self.done.one(ok)
        if not ok.any():
            if self.by_memory:
                raise DoesNotFit(f"No state of {self.whole.name(i)} leaves the others enough memory.")
            raise ProblemError(f"No state of {self.whole.name(i)} is allowed by what its neighbours may be.")
        self.cost[i], self.kept[i] = (self.done(operator.getitem, own, ok) for own in (self.cost[i], self.kept[i]))
        self.loads[i] = {rows: amount[ok] for rows, amount in self.loads[i].items()}
        self.nodes[i] = self.changed[i] = None
        for j in self.near[i]:
            self._join(i, j, self.done(operator.getitem, self.near[i][j], ok))
            self.edges[i, j] = self.changed[j] = None

    def _growth(self, i: int, j: int) -> int:
        """Entries that the tables have more of after merging i into j."""
        others = sum(table.shape[1] for k, table in self.near[i].items() if k != j)
        return (self.cost[j].size - self.cost[i].size) * others - self.near[i][j].size

    def _dominated(self, i: int) -> _Beaten:
        """The states of a node that go, the last first, each with one that beats it; and which stay, None for all."""
        cost, tables = self.cost[i], self.near[i].values()
        key = (id(cost), *map(id, tables))
        if self.loads[i] or (known := self.beaten.get(key)) is None:
            if any(cost.size * table.size > DOMINANCE for table in tables):
                return (), None
            found = _beaten(cost, [self.done(_apart, table) for table in tables], [*self.loads[i].values()])
            ok = np.ones(cost.size, dtype=bool)
            ok[[b for b, _ in found]] = False
            known = found, self.done.one(ok) if found else None
            if not self.loads[i]:
                self.beaten[key] = known
        return known


def _numbered(cost: Floats) -> Ints:
    return np.arange(cost.size)


def _finite(cost: Floats) -> np.ndarray | None:
    """Which states are allowed; None for all."""
    finite = np.isfinite(cost)
    return None if finite.all() else finite


def _allowed(table: Floats) -> tuple[np.ndarray | None, np.ndarray | None, bool, Ints | None, Ints | None]:
    """What a table allows.

    Returns:
        the rows and columns with an allowed entry, None where that is all of them; whether it is a sum of
        a cost of the row and one of the column; the row that each column allows, and the column that each row allows,
        None where that is not one.
    """
    allowed = np.isfinite(table)
    count = np.count_nonzero(allowed)
    if count == table.size:
        return None, None, _is_sum(table), None, None
    rows, columns = np.asarray(allowed.any(1)), np.asarray(allowed.any(0))
    by_column = allowed.argmax(0) if count == table.shape[1] else None
    by_row = allowed.argmax(1) if count == table.shape[0] else None
    return None if rows.all() else rows, None if columns.all() else columns, False, by_column, by_row


def _is_sum(table: Floats) -> bool:
    if 1 in table.shape or table[0, 0] + table[-1, -1] != table[0, -1] + table[-1, 0]:
        return 1 in table.shape
    return bool((table + table[0, 0] == table[:1] + table[:, :1]).all())


def _parts(table: Floats) -> tuple[Floats, Floats]:
    """The costs of rows and of columns that add up to a table."""
    least = int(table[:, 0].argmin())  # the least row in every column, so that nothing becomes negative
    return table[:, 0] - table[least, 0], table[least]


def _merged(cost: Floats, table: Floats, choice: Ints) -> Floats:
    """What the states cost that are chosen, and their entries in a table."""
    merged: Floats = cost[choice] + table[choice, np.arange(choice.size)]
    return merged


def _apart(table: Floats) -> Floats:
    """float64 [b, a]: how much an entry of row b is above that of row a, at least."""
    with np.errstate(invalid="ignore"):
        apart = table[:, None, :] - table[None, :, :]
    apart[np.isnan(apart)] = np.inf  # forbidden for both
    least: Floats = apart.min(2)
    return least


def _beaten(cost: Floats, apart: Sequence[Floats], amounts: Sequence[Floats]) -> tuple[tuple[int, int], ...]:
    """States that go, the last first, each with one that costs and takes no more whatever the neighbours choose."""
    with np.errstate(invalid="ignore"):  # inf - inf: each is allowed where the other is not
        worse = sum(apart, start=cost[:, None] - cost[None, :]) >= 0
    for amount in amounts:
        worse &= amount[:, None] >= amount[None, :]
    np.fill_diagonal(worse, False)
    ok, found = np.ones(cost.size, dtype=bool), []
    for b in np.flatnonzero(worse.any(1))[::-1].tolist():
        by = np.flatnonzero(worse[b] & ok)
        if by.size:
            ok[b] = False
            found.append((b, int(by[0])))
    return tuple(found)


def _best(cost: Floats, *tables: Floats) -> tuple[Floats, Ints, Floats]:
    """The least cost of a node given its neighbours' states, its state then, and what others cost more."""
    total = cost.reshape(-1, *[1] * len(tables))
    for axis, table in enumerate(tables):
        total = total + table.reshape(-1, *[table.shape[1] if a == axis else 1 for a in range(len(tables))])
    best = np.asarray(total.min(0))
    with np.errstate(invalid="ignore"):  # inf - inf: nothing is allowed there
        extra = np.where(np.isfinite(best), total - best, np.inf)
    return best, np.asarray(total.argmin(0)), extra
