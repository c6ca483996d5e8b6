"""Represents a reduced problem, and lifts its solutions to the whole problem.

>>> whole = Problem.of([[0, 3], [1, 0]])
>>> gone = Step(1, np.arange(2), (), (), None, (np.array([1.0, 0.0]),))
>>> small = Reduced(whole, Problem.of([[0, 3]]), (0,), (np.arange(2),), np.zeros(0, int), (gone,))
>>> small.lift([0]).tolist(), [x.tolist() for x in small.lift_alternatives([np.array([0.0, 3.0])], 0.0)]
([0, 1], [[0.0, 3.0], [1.0, 0.0]])
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from gshard.solver.problem import Floats, Ints, Problem, ProblemError
from gshard.solver.table_functions import best_state, extra_costs


class DoesNotFit(ProblemError):
    """No choice of states is within the limit of memory."""


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """An eliminated node, and how its state follows from those of others."""

    node: int  # the node
    kept: Ints  # its remaining states at that time, increasing
    given: tuple[int, ...]  # the nodes from which its state follows; none, one or two
    given_kept: tuple[Ints, ...]  # their remaining states at that time
    # int [states of the given node], the index in ``kept`` of the only state that it allows; None if it may have
    # several
    choice: Ints | None
    # the cost of its states, and its tables with the given nodes, if it may have several states
    costs: tuple[Floats, ...] = ()

    def best(self, given: Sequence[int]) -> int:
        """The index in ``kept`` of the best state, for the indices of the states of the given nodes."""
        if self.choice is not None:
            return self.choice.item(*given)
        cost, *tables = self.costs
        return best_state(cost, *(table[:, k] for table, k in zip(tables, given)))


@dataclasses.dataclass(frozen=True, eq=False)
class Dominated:
    """State ``state`` of ``node`` is never better than ``by``."""

    node: int
    state: int
    by: int


@dataclasses.dataclass(frozen=True, eq=False)
class Reduced:
    """A reduced problem, with the steps that made it."""

    whole: Problem  # the original problem
    # the reduced problem. Its last node may have a single state, with the cost and bytes of everything that is decided.
    problem: Problem
    nodes: tuple[int, ...]  # for each node of ``problem``, the node of ``whole``; -1 for the node of what is decided
    kept: tuple[Ints, ...]  # for each node of ``problem``, the remaining states of that node
    moments: Ints  # for each moment of ``problem``, the index of the moment of ``whole``
    steps: tuple[Step | Dominated, ...]  # the steps of the reduction, in order

    def lift(self, states: Sequence[int] | Ints) -> Ints:
        """The states of all nodes of ``whole``, with the same value."""
        states_of_nodes = [0] * len(self.whole.costs)
        for node, kept, state in zip(self.nodes, self.kept, states):
            if node >= 0:
                states_of_nodes[node] = int(kept[state])
        places: dict[int, dict[int, int]] = {}  # by identity of ``kept``: the index of each state in it
        for step in reversed(self.steps):
            if isinstance(step, Step):
                for kept in step.given_kept:
                    if id(kept) not in places:
                        places[id(kept)] = {state: k for k, state in enumerate(kept.tolist())}
                indices = [places[id(kept)][states_of_nodes[j]] for j, kept in zip(step.given, step.given_kept)]
                states_of_nodes[step.node] = step.kept.item(step.best(indices))
        return np.array(states_of_nodes, dtype=np.int64)

    def lower(self, states: Sequence[int] | Ints) -> Ints:
        """The states of ``problem`` for a solution of ``whole``; the first state of a node whose own was removed."""
        indices = []
        for node, kept in zip(self.nodes, self.kept):
            index = int(np.searchsorted(kept, states[node])) if node >= 0 else 0
            indices.append(index if index < kept.size and (node < 0 or kept[index] == states[node]) else 0)
        return np.array(indices, dtype=np.int64)

    def lift_alternatives(self, values: Sequence[Floats], least: float) -> list[Floats]:
        """Lower bounds of the value with each state of each node of ``whole``, from those of ``problem``.

        Args:
            values: for each node of ``problem``, float64 [states].
            least: a lower bound of all values.
        """
        bounds = [np.full(cost.size, np.inf) for cost in self.whole.costs]
        for node, kept, value in zip(self.nodes, self.kept, values):
            if node >= 0:
                bounds[node][kept] = value
        for step in reversed(self.steps):
            if isinstance(step, Dominated):
                bounds[step.node][step.state] = bounds[step.node][step.by]
                continue
            context = np.full([kept.size for kept in step.given_kept], least)
            for axis, (j, kept) in enumerate(zip(step.given, step.given_kept)):
                shape = [-1 if a == axis else 1 for a in range(context.ndim)]
                context = np.maximum(context, bounds[j][kept].reshape(shape))
            if step.choice is not None:
                np.minimum.at(bounds[step.node], step.kept[step.choice], context)
            else:
                axes = tuple(range(1, 1 + context.ndim))
                bounds[step.node][step.kept] = np.min(extra_costs(*step.costs) + context, axis=axes)
        return bounds
