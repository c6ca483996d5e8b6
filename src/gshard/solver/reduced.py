"""Reduced: a smaller problem with the way back to solutions of the larger one.

>>> whole = Problem.of([[0, 3], [1, 0]])
>>> gone = Step(1, np.arange(2), (), (), np.array(1), np.array([1.0, 0.0]))
>>> small = Reduced(whole, Problem.of([[0, 3]]), (0,), (np.arange(2),), np.zeros(0, int), (gone,))
>>> small.lift([0]).tolist(), [x.tolist() for x in small.lift_alternatives([np.array([0.0, 3.0])], 0.0)]
([0, 1], [[0.0, 3.0], [1.0, 0.0]])
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from gshard.solver.problem import Floats, Ints, Problem, ProblemError


class DoesNotFit(ProblemError):
    """Memory suffices for no choice at all."""


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """How the state of a node that is gone follows from those of others.

    Attributes:
        node: which.
        kept: its states that were left, increasing.
        given: the nodes that it follows from; none, one or two.
        given_kept: their states that were left then.
        choice: int [states of the given], the best of ``kept`` by its index.
        extra: float64 [states, states of the given], what each costs above the best; None where all others are
            forbidden.
    """

    node: int
    kept: Ints
    given: tuple[int, ...]
    given_kept: tuple[Ints, ...]
    choice: Ints
    extra: Floats | None


@dataclasses.dataclass(frozen=True, eq=False)
class Dominated:
    """State ``state`` of ``node`` is never better than ``by``."""

    node: int
    state: int
    by: int


@dataclasses.dataclass(frozen=True, eq=False)
class Reduced:
    """A smaller problem and the way back.

    Attributes:
        whole: the problem it came from.
        problem: the smaller one. Its last node may be one of a single state, which holds what is decided: a cost and
            bytes.
        nodes: of each node of ``problem``, the node of ``whole``; -1 for what is decided.
        kept: of each node of ``problem``, the states of that node that are left.
        moments: of each moment of ``problem``, the number of the moment of ``whole``.
        steps: what was removed, in order.
    """

    whole: Problem
    problem: Problem
    nodes: tuple[int, ...]
    kept: tuple[Ints, ...]
    moments: Ints
    steps: tuple[Step | Dominated, ...]

    def lift(self, states: Sequence[int] | Ints) -> Ints:
        """The states of all nodes of ``whole``, of the same value."""
        found = [0] * len(self.whole.costs)
        for node, kept, state in zip(self.nodes, self.kept, states):
            if node >= 0:
                found[node] = int(kept[state])
        places: dict[int, dict[int, int]] = {}  # of states among some that were left
        for step in reversed(self.steps):
            if isinstance(step, Step):
                for kept in step.given_kept:
                    if id(kept) not in places:
                        places[id(kept)] = {state: k for k, state in enumerate(kept.tolist())}
                at = [places[id(kept)][found[j]] for j, kept in zip(step.given, step.given_kept)]
                found[step.node] = step.kept.item(step.choice.item(*at))
        return np.array(found, dtype=np.int64)

    def lower(self, states: Sequence[int] | Ints) -> Ints:
        """The states of ``problem`` that a solution of ``whole`` has there; the first one where its own is gone."""
        found = []
        for node, kept in zip(self.nodes, self.kept):
            at = int(np.searchsorted(kept, states[node])) if node >= 0 else 0
            found.append(at if at < kept.size and (node < 0 or kept[at] == states[node]) else 0)
        return np.array(found, dtype=np.int64)

    def lift_alternatives(self, values: Sequence[Floats], least: float) -> list[Floats]:
        """Lower bounds of the value with each state of each node of ``whole``, from those of ``problem``.

        Args:
            values: for each node of ``problem`` and each of its states.
            least: a bound that holds for all.
        """
        found = [np.full(cost.size, np.inf) for cost in self.whole.costs]
        for node, kept, value in zip(self.nodes, self.kept, values):
            if node >= 0:
                found[node][kept] = value
        for step in reversed(self.steps):
            if isinstance(step, Dominated):
                found[step.node][step.state] = found[step.node][step.by]
                continue
            context = np.full(step.choice.shape, least)
            for axis, (j, kept) in enumerate(zip(step.given, step.given_kept)):
                shape = [-1 if a == axis else 1 for a in range(context.ndim)]
                context = np.maximum(context, found[j][kept].reshape(shape))
            if step.extra is None:
                np.minimum.at(found[step.node], step.kept[step.choice], context)
            else:
                axes = tuple(range(1, step.extra.ndim))
                found[step.node][step.kept] = np.min(step.extra + context, axis=axes)
        return found
