"""Searches for the layout (the table of names and axes) with the shortest call.

A layout says less than a plan: it splits a dimension alike wherever that has its name. It can express data, tensor and
expert parallelism and, with rows for one argument (``params:embed``), a state that is split and gathered. It cannot
express a dimension that is split in one place and whole in another. Names are those that the user gave and, for other
dimensions, the labels of the classes of dimensions (``naming.dimension_classes``).

The search solves the problem of ``planning.graph`` once more with one state for all dimensions of a name. It starts
from the resulting rows, and from none. Then it removes, changes and adds rows one after the other as long as that makes
a call shorter. It traces, plans and prices the function with every table as ``jit`` would, so it measures what a layout
loses against the plan.
known.
"""

from __future__ import annotations

import dataclasses
import itertools
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gshard.core.deadline import OutOfTime
from gshard.core.errors import ArgumentError, GShardError
from gshard.core.layout import Layout, Names, Row
from gshard.core.mesh import Mesh
from gshard.core.number_text import format_ms, significant
from gshard.core.partition_spec import axes_of_entry
from gshard.core.paths import is_below, matches
from gshard.core.plan import Plan
from gshard.core.program import Program, Value, format_bytes
from gshard.core.sharding import Sharding
from gshard.device.cost import Cost
from gshard.naming.dimension_classes import Dimensions, dimensions_of, of_equal_layers
from gshard.planning.added_marks import spec_of_cut
from gshard.search.best import Best
from gshard.search.how_near import ended
from gshard.search.meshes import axes_text
from gshard.search.priced import PricedPlan, Pricing
from gshard.search.stopping import Stop
from gshard.search.time_budget import EFFORT, EQUATIONS, TimeBudget
from gshard.solver.problem import Problem, ProblemError
from gshard.solver.solve import solve

_SOLVING = 0.25  # the largest share of the time that is left for a solution
_KEYS = 12  # possible rows, those of most bytes
_LEAST, _MOST = 24, 80  # the fewest and the most programs that are planned, if no time is given

_Key = tuple[str, str]  # the argument ("": any), and the name
_Axes = tuple[str, ...]
_Rows = Mapping[_Key, _Axes | None]


@dataclasses.dataclass(frozen=True, eq=False)
class Namable:
    """A function whose dimensions can be named.

    Attributes:
        program: the program, for one mesh.
        paths: the paths of its arguments.
        told: traces the program under a layout, with names for the dimensions of its arguments (None: no names).
        defined: the file and first line of its definition; None if it is not in a file.
        jaxpr: makes the closed jaxpr of the function as the user wrote it, before gshard rewrites anything.
    """

    program: Program
    paths: tuple[str, ...]
    told: Callable[[Layout, Sequence[Names | None]], Program]
    defined: tuple[str, int] | None = None
    jaxpr: Callable[[], Any] | None = None


@dataclasses.dataclass(frozen=True, repr=False)
class LayoutResult:
    """A layout for a function, with its plan and price.

    Attributes:
        layout: the table, for ``gshard.jit(..., layout=...)``. It contains the rows of a layout that was given.
        names: names of the dimensions of arguments, by path, for ``gshard.jit(..., names=...)``.
        mesh: the devices, with the names of the axes.
        priced: the plan under this layout, and its cost.
        goal: the searched plan on this mesh.
        limit: bytes that a device may hold.
        dimensions: the classes of dimensions.
        tables: how many tables were tried.
        seconds: the time that the search took.
        left_out: steps that were cut or not begun because the time was over.
        stopped: the signal that ended the search; None if none did.
    """

    layout: Layout
    names: Mapping[str, str]
    mesh: Mesh
    priced: PricedPlan
    goal: PricedPlan
    limit: float
    dimensions: Dimensions
    tables: int
    seconds: float = 0.0
    left_out: tuple[str, ...] = ()
    stopped: int | None = None

    @property
    def cost(self) -> Cost:
        """The cost of a call on each device with this table."""
        return self.priced.cost

    @property
    def plan(self) -> Plan:
        """The plan under this table."""
        return self.priced.plan

    def __str__(self) -> str:
        cost, shape = self.cost, axes_text(self.mesh)
        over = 100 * (cost.seconds / self.goal.cost.seconds - 1) if self.goal.cost.seconds else 0.0
        near = "as" if abs(over) < 0.05 else f"{significant(abs(over), 2)} % {'above' if over > 0 else 'below'}"
        memory = f"peak {format_bytes(cost.peak)} of {format_bytes(int(self.limit))}"
        lines = [str(self.layout), *(f"  {row!s:<24} {self._members(row)}".rstrip() for row in self.layout.rows)]
        lines += [f"  named {path}: {words}" for path, words in self.names.items()]
        lines.append(
            f"{format_ms(cost.seconds)} a call on {cost.machine.name}, mesh ({shape}); {memory}; "
            f"{near} the plan ({format_ms(self.goal.cost.seconds)}); {self.tables} tables tried"
        )
        if cost.peak > self.limit:
            lines.append("this DOES NOT FIT: no table was found that does")
        elif self.priced.recomputed:
            lines.append(f"give jit memory_limit={int(self.limit)} too, so that some values are recomputed")
        return "\n".join([*lines, *ended(self.seconds, self.left_out, self.stopped)])

    __repr__ = __str__

    def _members(self, row: Row) -> str:
        """The dimensions of a row, as text."""
        found = [c for c in self.dimensions.classes if c.label == row.name]
        every = [(path, d) for c in found for path, d in c.arguments if not row.at or is_below(row.at, path)]
        shown = ", ".join(f"{path}.{d}" for path, d in every[:3]) + (", ..." if len(every) > 3 else "")
        return f"{found[0].size} of {shown}" if every else ""


def layout_of(
    best: Best, function: Namable, donated: Sequence[int], budget: TimeBudget, stop: Stop | None = None
) -> LayoutResult:
    """Searches for the layout of a function.

    Args:
        best: the result of the search for its plan.
        function: the function, for the mesh of that search.
        donated: arguments whose memory results may take.
        budget: the time that is left; the program without a table is planned in any case.
        stop: the signal that has ended the search before, or that ends it now.

    Raises:
        ArgumentError: the function has an ordered layout (``Layout.of``), to which rows cannot be added.
    """
    return _Search(best, function, donated, budget, stop or Stop()).found()


class _Search:
    """The search: the tables that were tried, and the best rows so far."""

    def __init__(self, best: Best, function: Namable, donated: Sequence[int], budget: TimeBudget, stop: Stop):
        program = function.program
        given = program.layout or Layout()
        if given.ordered:
            raise ArgumentError(
                f"{program.name} has a layout of ordered rules, and a table that is found has no order.",
                got=str(given),
                hint="Search without it: gshard.search(f, ..., over='layout') for the function without layout=.",
            )
        self.best, self.function, self.given = best, function, given
        self.dimensions = of_equal_layers(dimensions_of(program, function.paths))
        self.argument_names = _argument_names(program, function.paths, self.dimensions)
        self.pricing = Pricing(best.chosen.cost.machine, list(donated), best.limit)
        self.known: dict[frozenset[tuple[_Key, _Axes | None]], PricedPlan | None] = {}
        equations = 1 + sum(1 for _ in program.block.walk())
        self.most = 1 << 30 if budget.uses_all else min(max(_LEAST, EQUATIONS // equations), _MOST)
        self.budget, self.stop = budget, stop
        self.rows: _Rows = {}
        self.now: PricedPlan | None = None

    def found(self) -> LayoutResult:
        """The best table."""
        budget = self.budget
        with budget.step("the program without a table", always=True):
            rows, now = self.rows, self._tried({})  # no table may be worse than this
        assert now is not None, "the program was planned without a table"
        try:
            with budget.step("tables of names and axes"):
                keys = self._keys() if self.stop.number is None else []
                for start in self._starts(keys):
                    self.rows, self.now = {}, None
                    self._take(start)
                    while self.now is not None and self._climb(keys):
                        pass
                    # Only now, because climbing removes rows without effect.
                    rows, now = self._better(rows, now)
        except KeyboardInterrupt:
            self.stop.number = self.stop.number or signal.SIGINT
        rows, now = self._better(rows, now)
        names = _by_pattern(
            {n.at: str(n) for n in self.argument_names if n is not None and any(n.dims)}, self.function.paths
        )
        return LayoutResult(
            self._layout(rows), names, self.best.mesh, now, self.best.chosen, self.best.limit, self.dimensions,
            len(self.known), budget.spent, tuple(budget.left_out), self.stop.number,
        )  # fmt: skip

    def _starts(self, keys: Sequence[_Key]) -> Iterator[_Rows]:
        """The rows with which the search starts."""
        if keys:
            yield self._solved([key for key in keys if not key[0]])
            yield self._solved(keys)
            yield {}

    def _better(self, rows: _Rows, now: PricedPlan) -> tuple[_Rows, PricedPlan]:
        """These rows with their plan, or the present ones if they are better."""
        if self.now is not None and self.now.rank(self.best.limit) < now.rank(self.best.limit):
            self.budget.progress.better(f"{self._layout(self.rows)}: {self.now.cost}")
            return self.rows, self.now
        return rows, now

    def _climb(self, keys: Sequence[_Key]) -> bool:
        """Removes, changes and adds one row after the other. True if that improved the plan."""
        before = self.now
        axis_sets = [
            axes_of_set for k in range(1, 1 + len(self._axes)) for axes_of_set in itertools.combinations(self._axes, k)
        ]
        for key in list(self.rows):
            self._take({k: axes for k, axes in self.rows.items() if k != key}, or_equal=True)
        for key in dict.fromkeys([*self.rows, *keys]):
            for axes in (*axis_sets, None):
                self._take({**self.rows, key: axes})
        return self.now is not before

    @property
    def _axes(self) -> _Axes:
        return tuple(name for name, size in self.best.mesh.axes if size > 1)

    def _take(self, rows: _Rows, *, or_equal: bool = False) -> None:
        is_known = frozenset(rows.items()) in self.known
        if not is_known and (len(self.known) >= self.most or self.budget.is_over):
            return
        after, limit = self._tried(rows), self.best.limit
        if after is None or after is self.now:
            return
        is_better = self.now is None or after.rank(limit) < self.now.rank(limit)
        if is_better or (or_equal and self.now is not None and after.rank(limit) == self.now.rank(limit)):
            self.rows, self.now = dict(rows), after

    def _tried(self, rows: _Rows) -> PricedPlan | None:
        """The plan with these rows; None if two dimensions of a value have one axis, or a mark contradicts a row."""
        key = frozenset(rows.items())
        if key not in self.known:
            self.known[key] = None
            try:
                program = self.function.told(self._layout(rows), self.argument_names)
                self.known[key] = self.pricing.marked("layout", program, self.best.chosen.plan.mesh)
            except OutOfTime:
                del self.known[key]  # the attempt was cut
                raise
            except GShardError:
                if not rows:
                    raise
        return self.known[key]

    def _layout(self, rows: _Rows) -> Layout:
        new_rows = {f"{at}:{name}" if at else name: axes for (at, name), axes in rows.items()}
        return Layout({**{row.key: row.entry for row in self.given.rows}, **new_rows})

    def _keys(self) -> list[_Key]:
        """The possible rows, those of most bytes: names anywhere, and names of several arguments at each of these."""
        bytes_of: dict[_Key, int] = {}
        arguments_of: dict[str, set[str]] = {}
        for v, path, names in zip(
            self._arguments(self.function.program), self.function.paths, self.argument_names, strict=True
        ):
            argument = path.split("/")[0]
            for word in filter(None, names.dims if names else ()):
                arguments_of.setdefault(word, set()).add(argument)
                for key in (("", word), (argument, word)):
                    bytes_of[key] = bytes_of.get(key, 0) + v.bytes
        inside = {word for named in self.function.program.named if named.line for word in named.names.dims}
        given = [(row.at.split("/")[0], row.name) for row in self.given.rows]  # these rows are kept
        new_keys = (key for key in bytes_of if key not in given and ("", key[1]) not in given)
        useful_keys = (key for key in new_keys if not key[0] or key[1] in inside or len(arguments_of[key[1]]) > 1)
        return sorted(useful_keys, key=lambda key: (-bytes_of[key], key))[:_KEYS]

    def _solved(self, keys: Sequence[_Key]) -> _Rows:
        """The best rows of these keys in the searched model, with the best choices for everything else."""
        if self.best.graph is None or self.best.solution is None:
            return {}
        graph, problem = self.best.graph, self.best.solution.problem
        axis_sets = [
            axes_of_state for k in range(1 + len(self._axes)) for axes_of_state in itertools.combinations(self._axes, k)
        ]
        first = len(problem.costs)
        node_of = {key: first + i for i, key in enumerate(keys)}
        edges = [(int(u), int(v), table) for (u, v), table in zip(problem.ends, problem.tables, strict=True)]
        for v, path, names in zip(
            self._arguments(graph.program), self.function.paths, self.argument_names, strict=True
        ):
            k = graph.groups.of[v]
            cuts = [spec_of_cut(Sharding(s.dims), graph.mesh) for s in graph.states[k]]
            for d, word in enumerate(names.dims if names else ()):
                key = (path.split("/")[0], word or "")
                node = node_of.get(key, node_of.get(("", key[1])))
                if node is not None:
                    axes_of_state = [None if cut is None else axes_of_entry(cut[d]) for cut in cuts]
                    edges.append(
                        (node, k, np.where([[axes == cut for cut in axes_of_state] for axes in axis_sets], 0.0, np.inf))
                    )
        costs = [*problem.costs, *(np.zeros(len(axis_sets)) for _ in keys)]
        loads = [(load.node, load.start, load.end, load.bytes) for load in problem.loads]
        try:
            solution = solve(Problem.of(costs, edges, loads, problem.limit), effort=EFFORT,
                          most_seconds=self.budget.part(_SOLVING).left)  # fmt: skip
        except ProblemError:  # the user's marks allow no sharding that all dimensions of a name share
            return {}
        chosen = {key: axis_sets[solution.states[node]] or None for key, node in node_of.items()}
        return chosen if np.isfinite(solution.value) else {}

    def _arguments(self, program: Program) -> tuple[Value, ...]:
        return program.block.inputs[len(program.captured) :]


def _argument_names(program: Program, paths: Sequence[str], dimensions: Dimensions) -> list[Names | None]:
    """The names of the dimensions of each argument: the user's, or else those of their classes; None if marked."""
    given = {named.value: named.names for named in program.named if not named.line}
    names_of_arguments: list[Names | None] = []
    arguments = program.block.inputs[len(program.captured) :]
    for v, mark, path in zip(arguments, program.argument_marks, paths, strict=True):
        if mark is not None and v not in given:
            names_of_arguments.append(None)
            continue
        words: list[str | None] = list(given[v].dims) if v in given else [None] * len(v.shape)
        for d, label in enumerate(dimensions.labels[v]):
            if words[d] is None and label != "_" and label not in words:
                words[d] = label
        names_of_arguments.append(Names(tuple(words), path))
    return names_of_arguments


def _by_pattern(names: Mapping[str, str], paths: Sequence[str]) -> dict[str, str]:
    """The names by path, with one pattern (``layers/*/w1``) for equal layers, if it matches no other path."""
    pattern_words: dict[str, str] = {}
    for path, words in names.items():
        if any(matches(pattern, path) for pattern in pattern_words):
            continue
        parts = path.split("/")
        numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
        subsets = (starred for k in range(len(numbers), 0, -1) for starred in itertools.combinations(numbers, k))
        patterns = ("/".join("*" if i in starred else part for i, part in enumerate(parts)) for starred in subsets)
        fitting = (p for p in patterns if all(names.get(other) == words for other in paths if matches(p, other)))
        pattern_words[next(fitting, path)] = words
    return pattern_words
