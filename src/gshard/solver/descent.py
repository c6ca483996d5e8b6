"""Alternates rounds of messages and prices with local search and random restarts from the best states so far."""

from __future__ import annotations

import numpy as np

from gshard.solver.messages import ROUNDING, Flat, Messages, grouped, least
from gshard.solver.problem import Floats, Ints, Problem, accumulated

# Chooses the states of many nodes (a forest) at once, exactly, while the others keep theirs.


class Forest:
    """A random maximal induced forest of a problem."""

    def __init__(self, flat: Flat, generator: np.random.Generator):
        self.flat = flat
        self.inside = _induced_forest(flat, generator)  # bool [nodes], the nodes of the forest
        ends = flat.problem.ends
        edges = np.flatnonzero(self.inside[ends].all(1))
        round_, child, parent = _peeled(ends[edges], flat.size.size)
        groups = grouped(-round_, flat.size[child], flat.size[parent])  # leaves first
        self._groups = [(edges[g], child[g], parent[g]) for g in groups]

    def improve(self, costs: Floats, states: Ints) -> Ints:
        """The best states of the nodes inside, given those of the others. No worse than allowed given states."""
        flat = self.flat
        belief = np.append(flat.given_outside(costs, states, self.inside), 0.0)
        steps = []
        for edges, child, parent in self._groups:
            tables, a, b, _, into = flat.padded(edges, child, parent)
            np.add.at(belief, into.ravel(), least(tables, belief[a]).ravel())
            steps.append((tables, a, child, parent))
        best_states = np.where(self.inside, flat.best(belief[:-1]), states)
        for tables, a, child, parent in reversed(steps):
            best_states[child] = (belief[a] + tables[:, np.arange(child.size), best_states[parent]].T).argmin(1)
        return best_states


def _induced_forest(flat: Flat, generator: np.random.Generator) -> np.ndarray:
    """Adds nodes in random order, each unless two of its neighbours are in one tree already."""
    n = flat.size.size
    tree, inside = list(range(n)), [False] * n
    first, near = flat.neighbours_first.tolist(), flat.neighbours.tolist()
    for i in generator.permutation(n).tolist():
        roots = []
        for j in near[first[i] : first[i + 1]]:
            if inside[j]:
                while tree[j] != j:
                    tree[j] = tree[tree[j]]
                    j = tree[j]
                if j in roots:
                    break
                roots.append(j)
        else:
            inside[i] = True
            for root in roots:
                tree[root] = i
    return np.array(inside, dtype=bool)


def _peeled(ends: Ints, nodes: int) -> tuple[Ints, Ints, Ints]:
    """For each edge of a forest: the round in which it is removed with a leaf, the leaf, and the other node."""
    round_, child, parent = (np.zeros(len(ends), dtype=np.int64) for _ in range(3))
    remaining, round_index = np.arange(len(ends)), 0
    while remaining.size:
        u, v = ends[remaining, 0], ends[remaining, 1]
        leaf = np.bincount(ends[remaining].ravel(), minlength=nodes) == 1
        is_removed = leaf[u] | leaf[v]
        removed = remaining[is_removed]
        child[removed] = np.where(leaf[u], u, v)[is_removed]
        parent[removed] = np.where(leaf[u], v, u)[is_removed]
        round_[removed] = round_index
        remaining, round_index = remaining[~is_removed], round_index + 1
    return round_, child, parent


# Maintains Lagrange multipliers for memory: one price of a byte for each moment.

ABOVE = 10.0  # the cost of a full memory at the first prices, relative to the value without memory
COOLING = 60  # rounds after which price changes are half as large
CHANGE = 0.3  # the largest relative change of a price in a round


class Prices:
    """Prices that follow the use of memory."""

    def __init__(self, flat: Flat):
        self.flat = flat
        self.values = np.zeros(len(flat.problem.moments))  # float64 [moments]
        # bound: the best bound at any prices so far; best: float64 [moments], the prices of that bound
        self.best, self.bound = self.values, 0.0
        self._rounds = 0

    def costs(self) -> Floats:
        """float64 [all states]: costs at these prices."""
        return self.flat.priced(self.values)

    def start(self, usage: Floats, value: float) -> None:
        """Sets the first prices, from above, by the memory of the best states without prices, and their cost."""
        fullness = usage / max(self.flat.limit, 1.0)
        self.values = np.where(fullness > 1, fullness - 1, 0.02)
        self.values *= ABOVE * value / max(self.flat.limit, 1.0) / self.values.sum()

    def learn(self, bound: float) -> None:
        """Records a bound of the priced problem as a bound of the problem itself."""
        own_bound = bound - paid(self.values, self.flat.limit)
        if own_bound > self.bound:
            self.bound, self.best = own_bound, self.values

    def follow(self, usage: Floats, bound: float) -> None:
        """Raises prices where the memory of the chosen states exceeds the limit, and lowers them where there is room.

        The bound of the priced problem sets the size of a price that rises from 0.
        """
        self._rounds += 1
        step = 1.0 / (1.0 + self._rounds / COOLING)
        limit = max(self.flat.limit, 1.0)
        fullness = usage / limit
        new = step * 0.5 * max(bound, 1e-300) / limit / fullness.size * np.minimum(1.0, 20.0 * (fullness - 1.0))
        fall = CHANGE * np.clip(10 * (1.0 - fullness), 0.1, 1.0)  # slower where little room is left
        self.values = np.where(fullness > 1, self.values * (1 + CHANGE * step) + new, self.values * (1 - fall * step))


def paid(prices: Floats, limit: float) -> float:
    """The cost of a full memory, plus rounding: the difference between bounds of the priced problem and the problem."""
    return float(prices.sum()) * limit * (1.0 + ROUNDING) if prices.any() else 0.0


# Changes states one at a time, and updates the costs of changes and the memory.

SMALL = 1e-9  # of the value: a smaller saving counts as none


class Walk:
    """States of a problem that change one by one."""

    def __init__(self, flat: Flat, states: Ints):
        self.flat, self.states = flat, states.copy()  # int64 [nodes]
        # costs: float64 [all states], the cost of each state with the neighbours' present states; usage: float64
        # [moments], bytes
        self.costs, self.usage = flat.given(states), flat.usage(states)

    @property
    def over(self) -> float:
        """Bytes above the limit at the fullest moment; zero or less if everything fits."""
        return float(self.usage.max() - self.flat.limit) if self.usage.size else -np.inf

    def change(self, node: int, state: int) -> None:
        """Changes the state of a node."""
        flat = self.flat
        first, more = self.bytes_more(node, state)
        self.usage[first : first + more.size] += more
        self.states[node] = state
        for j in flat.neighbours[flat.neighbours_first[node] : flat.neighbours_first[node + 1]].tolist():
            self.costs[flat.first[j] : flat.first[j + 1]] = flat.given_at(j, self.states)

    def bytes_more(self, node: int, state: int) -> tuple[int, Floats]:
        """The first moment at which a change adds memory, and float64 [moments], the bytes from there on."""
        flat = self.flat
        loads = slice(flat.load_first[node], flat.load_first[node + 1])
        rows, amounts = flat.load_rows[loads], flat.bytes_of(node)
        if not len(rows):
            return 0, np.zeros(0)
        change = amounts[:, state] - amounts[:, self.states[node]]
        first = int(rows[:, 0].min())
        return first, accumulated(rows - first, change, int(rows[:, 1].max()) - first)

    def fits(self, node: int, state: int) -> bool:
        """Whether a change stays within the limit at all moments to which it adds."""
        first, more = self.bytes_more(node, state)
        return not ((more > 0) & (self.usage[first : first + more.size] + more > self.flat.limit)).any()

    def current(self) -> Floats:
        """float64 [nodes]: the cost of each node's present state."""
        return self.costs[self.flat.first[:-1] + self.states]

    def descend(self, passes: int) -> None:
        """Changes single nodes as long as that saves cost and fits. No present state may be forbidden."""
        flat = self.flat
        blocked = np.zeros(self.states.size, dtype=bool)  # nodes without memory for a better state; that seldom changes
        for _ in range(passes if self.states.size else 0):
            current = self.current()
            saved = current - np.minimum.reduceat(self.costs, flat.first[:-1])
            small = SMALL * float(current.mean())
            nodes = np.flatnonzero((saved > small) & ~blocked)
            for node in nodes[np.argsort(-saved[nodes], kind="stable")].tolist():
                blocked[node] = not self._improve(node, small)
            if blocked[nodes].all():
                return

    def _improve(self, node: int, small: float) -> bool:
        """Gives a node its best state that fits. False if no better state fits."""
        flat = self.flat
        costs = self.costs[flat.first[node] : flat.first[node + 1]]
        better = np.flatnonzero(costs < costs[self.states[node]] - small)
        for state in better[np.argsort(costs[better], kind="stable")].tolist():
            if self.fits(node, state):
                self.change(node, state)
                return True
        return False

    def repair(self, most: int) -> bool:
        """Changes nodes until everything fits. False if that needs more than ``most`` changes or is impossible."""
        left = np.zeros(self.costs.size, dtype=bool)  # states that were left, to which no node returns
        for _ in range(most):
            if self.over <= 0:
                return True
            state = self._cheapest_bytes(int(self.usage.argmax()), left)
            if state is None:
                return False
            node = int(self.flat.owner[state])
            left[self.flat.first[node] + self.states[node]] = True
            self.change(node, state - int(self.flat.first[node]))
        return self.over <= 0

    def _cheapest_bytes(self, moment: int, left: np.ndarray) -> int | None:
        """The state with the least extra cost for each byte that a change to it frees at a moment."""
        flat = self.flat
        states, amounts, first = flat.bytes_at(moment)
        chosen = self.states[flat.owner[states]]
        freed = amounts[first + chosen] - amounts
        useful = np.flatnonzero(freed > 0)
        useful = useful[np.isfinite(self.costs[states[useful]]) & ~left[states[useful]]]
        if not useful.size:
            return None
        states, freed = states[useful], freed[useful]
        present = flat.first[flat.owner[states]] + chosen[useful]
        extra_costs = np.maximum(self.costs[states] - self.costs[present], 0.0)
        cost_of_byte = extra_costs / np.minimum(freed, self.usage[moment] - flat.limit)
        cheapest = np.flatnonzero(cost_of_byte == cost_of_byte.min())
        return int(states[cheapest[freed[cheapest].argmax()]])


SWEEPS = 4  # pairs of sweeps in a round, each with its own prices
FREE_ROUNDS = 3  # rounds before memory has a price
REPAIRS = 300  # changes in one repair
PASSES = 3  # passes of a descent


class Descent:
    """The search for the best states of a reduced problem."""

    def __init__(self, problem: Problem):
        self.flat = Flat(problem)  # the problem
        self.generator = np.random.default_rng(0)
        self.messages = Messages(self.flat, self.generator.permutation(self.flat.size.size))
        self.prices = Prices(self.flat)  # the prices of memory, with the best bound
        self.states: Ints | None = None  # int64 [nodes], the best states that fit; None before there are any
        self.value = np.inf  # their cost; ``inf`` before there are any
        self.rounds = 0

    def offer(self, states: Ints) -> bool:
        """Repairs states and descends from them. True if the best solution improves."""
        if not np.isfinite(self.flat.problem.value(states)):
            return False
        walk = Walk(self.flat, states)
        if walk.over > 0 and not walk.repair(REPAIRS):
            return False
        walk.descend(PASSES)
        value, before = self.flat.problem.value(walk.states), self.value
        if value <= before:
            self.states, self.value = walk.states, value
        return value < before

    def round(self) -> bool:
        """Runs messages and prices, then a forest. True if the best solution improves."""
        self.rounds += 1
        for pairs_left in range(SWEEPS - 1, -1, -1):
            costs = self.prices.costs()
            self.messages.sweep(costs, forward=True)
            # Prices follow the memory of the chosen states. Without a limit, only the last states matter.
            chooses = not pairs_left or bool(np.isfinite(self.flat.limit))
            bound, states = self.messages.sweep(costs, forward=False, choose=chooses)
            self.prices.learn(bound)
            if not chooses:
                continue
            usage = self.flat.usage(states)
            if self.prices.values.any():
                self.prices.follow(usage, bound)
            elif self.rounds >= FREE_ROUNDS and usage.max(initial=0.0) > self.flat.limit:
                value = self.flat.problem.value(states)
                self.prices.start(usage, value if 0 < value < np.inf else max(bound, 1.0))
        return self.offer(Forest(self.flat, self.generator).improve(costs, states))

    def leap(self) -> bool:
        """Chooses forests at perturbed costs, from the best states so far. True if the best solution improves."""
        if self.states is None:
            return False
        costs, states = self._noisy_costs(), self.states
        for _ in range(self.generator.integers(1, 3)):
            states = Forest(self.flat, self.generator).improve(costs, states)
        return self.offer(states)

    def _noisy_costs(self) -> Floats:
        """Costs at the best prices, plus random costs of states."""
        costs, random = self.flat.priced(self.prices.best), self.generator
        costs += random.exponential(self.value / self.flat.size.size * 10 ** random.uniform(-2, 1), costs.size)
        return costs
