"""search: finds a fast plan of a function for a machine, with or without marks, on one or several meshes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from gshard.api.compiled_programs import is_from_framework, lowered_instead_of_jit, mesh_of_arguments
from gshard.api.jit import Jitted, jit
from gshard.api.lowered import Lowered
from gshard.core.errors import MeshError, ShardingError
from gshard.core.jax_adapter_tracebacks import without_our_frames
from gshard.core.mesh import Mesh, MeshLike
from gshard.core.paths import path_of
from gshard.core.time_budget import EFFORT, TimeBudget, in_a_line, until_stopped
from gshard.device.machine import Machine, machine_of
from gshard.explanation.search_result import SearchResult
from gshard.remat.rematerialise import bytes_of
from gshard.search.find import MeshSearch, axes_text, meshes
from gshard.search.pricing import PricedPlan

# Search run: the search for a plan of one function on one or several meshes, in steps that a caller may combine.

FINISHED = 3  # of the meshes that are tried, the most promising ones, whose plans are priced


@dataclasses.dataclass(frozen=True, eq=False)
class Searched:
    """A function with its arguments."""

    mesh: Callable[[], MeshLike]  # the mesh that it was jitted for, or that its arguments are on
    lower: Callable[[Mesh], Lowered]  # traces it for a mesh
    # the paths of its arguments; None for one of ``flax.nnx.jit`` or the like, which takes its arguments apart
    paths: Callable[[Lowered], tuple[str, ...]] | None


def searched_of(f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Searched:
    """Prepares a function and its arguments for the search."""
    if is_from_framework(f):
        return Searched(
            lambda: mesh_of_arguments(args, kwargs), lambda mesh: lowered_instead_of_jit(f, args, kwargs, mesh), None
        )
    made: Jitted = f if isinstance(f, Jitted) else jit(f)
    lower = lambda mesh: made.on(mesh).lower_for_search(args, kwargs)  # noqa: E731
    return Searched(lambda: made.options.mesh, lower, paths_of_arguments)


def paths_of_arguments(lowered: Lowered) -> tuple[str, ...]:
    """The path of each argument of a program, as patterns of ``shard_by_path`` match it."""
    program, tree = lowered.program, lowered.in_tree
    paths, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(tree, range(tree.num_leaves)))
    names = program.names[len(program.captured) :]  # params['l1']['w'], which becomes params/l1/w
    below = [tuple(keys[2:]) for keys, _ in paths]
    return tuple(path_of(n.removesuffix(jax.tree_util.keystr(k)), k) for n, k in zip(names, below, strict=True))


@dataclasses.dataclass(eq=False)
class SearchRun:
    """The search on all meshes; what it has found is kept, whenever time or a signal ends it."""

    searched: Searched  # a function with its arguments
    meshes: Sequence[Mesh]  # the meshes of one machine
    machine: str | Machine | None  # the machine; None for the devices of the mesh
    limit: int | None  # bytes that a device may hold; the machine's memory if None
    budget: TimeBudget  # the time of the search
    # budget_seconds, progress: as of ``gshard.search``
    budget_seconds: float | None = None
    progress: bool | Callable[[str], object] | None = False
    # the searches that have begun, each with the function as it was traced for its mesh
    begun: dict[MeshSearch, Lowered] = dataclasses.field(default_factory=dict)
    # those whose plans are priced, the most promising ones first
    finished: list[MeshSearch] = dataclasses.field(default_factory=list)
    known: list[PricedPlan] = dataclasses.field(default_factory=list)  # all plans that were priced

    def machine_on(self, mesh: Mesh) -> Machine:
        """The machine whose devices the mesh has."""
        return Machine.read(machine_of(mesh) if self.machine is None else self.machine, mesh.size)

    def result(self, stopped: int | None) -> SearchResult | None:
        """The best of what was found so far; None if nothing was. If a signal ended it, solutions are priced first."""
        promising = sorted(self.begun, key=lambda one: one.rank)[:1] if stopped is not None else []
        with contextlib.suppress(KeyboardInterrupt):
            while promising and promising[0].price_solution() is not None:
                pass
        ordered = dict.fromkeys((*self.finished, *self.begun))
        bests = [(one, one.best(stopped)) for one in ordered if one.has_found]
        if not bests:
            return None
        one, best = min(bests, key=lambda pair: pair[1].chosen.rank(pair[1].limit))
        lowered, paths = self.begun[one], self.searched.paths
        donated = tuple(sorted(lowered.donated))
        return SearchResult(
            best, tuple(best for _, best in bests), donated, lowered.in_tree, paths and paths(lowered),
            self.budget_seconds, self.progress,
        )  # fmt: skip

    def search(self, *, with_presets: bool = True) -> None:
        """Searches on all meshes, and prices the plans of the most promising ones, then presets and pipelines."""
        problems = self.budget.part() if len(self.meshes) > 1 else self.budget
        self._solve(problems)
        ranked = sorted(self.begun, key=lambda one: one.rank)
        for one in ranked[:FINISHED]:
            one.price_solutions()
            self.finished.append(one)
        if with_presets:
            self._price_presets(ranked)
        for one in self.finished:
            one.price_pipelines()

    def _solve(self, budget: TimeBudget) -> None:
        """Solves the problem of every mesh, in turn; on the first it prices presets, so that there is a plan."""
        refused: Exception | None = None
        effort = 1.0 if len(self.meshes) <= FINISHED else EFFORT
        for i, mesh in enumerate(self.meshes):
            if self.begun and budget.is_over:
                budget.left_out.append(f"mesh ({axes_text(mesh)})")
                continue
            try:
                # A problem that is cut is lost: better some of them whole than a part of each.
                part = budget.part() if i + 1 < len(self.meshes) else budget
                one = self._begin(mesh, part)
                if not any(other.has_found for other in self.begun):
                    one.price_marked()
                    one.price_presets(None)
            except Exception as error:  # of any kind, where other meshes have results
                self.begun = {one: lowered for one, lowered in self.begun.items() if one.mesh is not mesh}
                if not self.begun and not isinstance(error, ShardingError):  # marks may fit other meshes
                    raise
                self.budget.failed[f"mesh ({axes_text(mesh)})"] = in_a_line(error)
                refused = refused or error
                continue
            one.solve(effort)
            one.budget = self.budget
        if refused is not None and not self.begun:
            raise refused

    def _price_presets(self, ranked: Sequence[MeshSearch]) -> None:
        """Prices presets.

        A preset over all devices is the same on every mesh, so it is priced on one with the fewest axes; one over the
        last axis is priced on the most promising mesh of several axes.
        """
        first = next(iter(self.begun))
        given = sorted(self.begun, key=_axes)
        several = next((one for one in ranked if _axes(one) > 1), given[0])
        for one in dict.fromkeys((given[0], several)):
            if one is not first and not first.is_unsplit:
                one.price_marked()
            known = () if one is given[0] else [preset.name for preset in given[0].presets]
            one.price_presets(one.machine, known)

    def _begin(self, mesh: Mesh, budget: TimeBudget) -> MeshSearch:
        """Traces the function for a mesh, and begins the search there."""
        self.machine_on(mesh)  # refuses a machine of another size first
        budget.progress.step("tracing the function")
        lowered = self.searched.lower(mesh)
        one = MeshSearch(
            lowered.program, mesh, self.machine_on(mesh), donated=lowered.donated, memory_limit=self.limit,
            budget=budget, known=self.known,
        )  # fmt: skip
        self.begun[one] = lowered
        return one


def _axes(one: MeshSearch) -> int:
    return sum(size > 1 for _, size in one.mesh.axes)


def meshes_to_try(mesh: Any) -> Iterable[Mesh]:
    """The meshes to try."""
    if isinstance(mesh, int | np.integer) and not isinstance(mesh, bool):
        return meshes(int(mesh))
    if isinstance(mesh, list | tuple) and mesh and all(isinstance(one, Mesh) for one in mesh):
        if len({one.size for one in mesh}) > 1:
            raise MeshError("meshes to choose from have one size.", got=", ".join(map(str, mesh)))
        return mesh
    return [Mesh.of(mesh)]


@without_our_frames
def search(
    f: Callable[..., Any],
    *args: Any,
    mesh: Any = None,
    machine: str | Machine | None = None,
    memory_limit: int | str | None = None,
    budget_seconds: float | None = None,
    progress: bool | Callable[[str], object] | None = None,
    **kwargs: Any,
) -> SearchResult:
    """Searches for the plan of a function that takes least time on a machine, and tells how near the best it may be.

    What is proven is proven in a simplified model (``found.bound``, ``found.gap``); ``found.cost`` is the full price.

    Marks in the function and shardings of its arguments are kept. gshard also tries pipelines over stacked layers that
    have no mark (``gshard.pipeline``). With enough time, the plan is never worse than what the marks alone, data
    parallelism or a split state give. What there was no time for, the result lists.

    Ctrl-C and SIGTERM (in the main thread) end the search, which then returns the best plan so far; ``found.stopped``
    has the signal. Where nothing was found yet they act as they do without a search.

    Args:
        f: a function, or one that ``gshard.jit`` returned: then its options count, and its mesh, machine and limit
            where others are not given. If ``jax.jit``, ``flax.nnx.jit`` or ``equinox.filter_jit`` returned it, the
            options that it was jitted with count. Donate a training state: ``jax.jit(step, donate_argnums=0)``.
        args, kwargs: its arguments: arrays or ``jax.ShapeDtypeStruct``, and values for static ones. An argument that
            has the name of an option here is bound before: ``functools.partial(f, mesh=...)``.
        mesh: as for ``jit``, or an abstract mesh of any size, or a list of ``Mesh`` of one size to choose from; a
            number of devices tries all shapes with up to two axes.
        machine: what the devices are, such as ``"h100:4x8"``; by default what the mesh's devices are.
        memory_limit: bytes that a device may hold, or text such as ``"14GiB"``; by default the machine's memory.
        budget_seconds: how long the whole search may take, tracing, all meshes, presets and prices included. It takes
            longer by no more than one planning of the program and, if no mark splits it, of data parallelism and of a
            split state (FSDP), so that what is found is never worse than these. With None the size of the program says
            how many steps there are, and every computer finds the same unless they take more than 300 seconds, where
            the search ends. ``float("inf")`` is the same without an end.
        progress: None prints lines on stderr once the search has taken two seconds; True prints all, False none; or a
            function that is called with each line. ``found.marks`` does the same.

    Returns:
        what was found; print it. ``gshard.jit(f, mesh=found.mesh, plan=found.plan)`` runs the plan. A function that a
        framework jits runs it in a block of ``gshard.instead_of_jit(mesh=found.mesh, plan=found.plan)``.

    Raises:
        MachineError: there is no such machine, or it has another number of devices; or none is given, and there is no
            model of the mesh's devices.
        ArgumentError: ``budget_seconds`` is no time.
        ShardingError, TraceError: as ``jit``.

    >>> import jax
    >>> from gshard.core.mesh import Mesh
    >>> w, x = jax.ShapeDtypeStruct((8192, 8192), "float32"), jax.ShapeDtypeStruct((8, 8192), "float32")
    >>> found = search(lambda w, x: x @ w, w, x, mesh=Mesh.abstract(devices=8), machine="h100:1x8")
    >>> found.plan.format(found.plan.program.block.inputs[0]), found.gap
    ('f32[8192,8192@devices]', 0.0)
    """
    budget = TimeBudget.of(budget_seconds, progress)
    searched = searched_of(f, args, kwargs)
    if isinstance(f, Jitted):
        machine = f.options.machine if machine is None else machine
        memory_limit = f.options.memory_limit if memory_limit is None else memory_limit
    mesh = searched.mesh() if mesh is None else mesh
    limit = None if memory_limit is None else bytes_of(memory_limit)
    run = SearchRun(searched, list(meshes_to_try(mesh)), machine, limit, budget, budget_seconds, progress)
    return until_stopped(run.search, run.result)
