"""Opens a ``shard_map`` with automatic axes to equations of the program, and the sums with which it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal
from jax.sharding import PartitionSpec

from gshard.core.errors import ShardingError
from gshard.core.jax_adapter import as_if_at, as_weak, bind, closed, jaxpr_without_dead_code, shapes_of, user_line
from gshard.core.jax_adapter_context import context_of, in_context
from gshard.core.mark import Mark, axes_of_entry, words_of
from gshard.core.mesh import automatic_mesh
from gshard.language.mark_primitive import bind_mark
from gshard.language.per_device import (
    IGNORED,
    MANUAL_COLLECTIVES,
    Collective,
    RegionBoundary,
    Rewritten,
    check_known,
    enter_manual_p,
    leave_manual_p,
    names_of,
    renamed,
    summed_axes,
)
from gshard.language.traits import traits_of
from gshard.rules.manual import axes_of_mesh, sum_of_devices_p
from gshard.tracing.expand import mark_of_equation, without_shardings

# Finds the sums over devices with which a ``shard_map`` ends, so that they can leave it.


@dataclasses.dataclass(frozen=True)
class Ending:
    """The last equations of a region for one result."""

    total: Any  # the equation of the sum
    after: tuple[Any, ...]  # the elementwise equations behind it
    source: int  # the position of the first result that is computed from the sum

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes over which addends are added."""
        return summed_axes(self.total)


@dataclasses.dataclass(frozen=True)
class WithoutSums:
    """A region without its last sums."""

    body: Any  # the jaxpr of the body. Where a sum has left, it returns the addends.
    endings: tuple[Ending | None, ...]  # for each result what has left; None for a result that the body still returns

    def results(self, arrays: Sequence[Any], add: Callable[[int, Any, Ending], Any]) -> list[Any]:
        """The results of the whole region."""
        sums: dict[int, Any] = {}
        results = []
        for x, end in zip(arrays, self.endings, strict=True):
            if end is not None:
                if end.source not in sums:
                    with _like(end.total):
                        sums[end.source] = add(end.source, arrays[end.source], end)
                x = sums[end.source]
                for eqn in end.after:
                    with _like(eqn):
                        x = _applied(eqn, x)
            results.append(x)
        return results


@contextlib.contextmanager
def _like(eqn: Any) -> Iterator[None]:
    """Equations traced inside get the source line, the scopes and the context of another equation."""
    with as_if_at(eqn.source_info), in_context(context_of(eqn)):
        yield


def _applied(eqn: Any, x: Any) -> Any:
    """The result of an elementwise equation of one array."""
    if eqn.primitive.name in IGNORED:
        return x
    operands = [np.asarray(v.val, jax.typeof(v.val).dtype) if isinstance(v, Literal) else x for v in eqn.invars]
    (x,) = bind(eqn.primitive, without_shardings(eqn.primitive.name, eqn.params), operands)
    return as_weak(x, eqn.outvars[0].aval.weak_type)


def without_sums(params: Mapping[str, Any], manual: Collection[str]) -> WithoutSums | None:
    """A ``shard_map`` without its last sums; None if it ends with none."""
    body, specs = params["jaxpr"], params["out_specs"]
    made = {v: eqn for eqn in body.eqns for v in eqn.outvars}
    readers: dict[Any, list[Any]] = {}
    for eqn in body.eqns:
        for v in _arrays(eqn.invars):
            readers.setdefault(v, []).append(eqn)

    def leaves(eqn: Any) -> bool:
        return all(_is_elementwise(e) and leaves(e) for e in readers.get(eqn.outvars[0], ()))

    results: dict[Any, list[int]] = {}
    after: list[tuple[Any, ...]] = []
    for i, v in enumerate(body.outvars):
        chain: list[Any] = []
        while (made_by := made.get(v) if _arrays([v]) else None) is not None and _is_elementwise(made_by):
            chain.insert(0, made_by)
            (v,) = _arrays(made_by.invars)
        after.append(tuple(chain))
        results.setdefault(v if _arrays([v]) else i, []).append(i)
    endings: list[Ending | None] = [None] * len(specs)
    for v, positions in results.items():
        total = made.get(v)
        axes = () if total is None else summed_axes(total)
        if _may_leave(axes, [specs[i] for i in positions], manual, params["mesh"].shape) and leaves(total):
            for i in positions:
                endings[i] = Ending(total, after[i], positions[0])
    if not any(endings):
        return None
    returned = [v if end is None else end.total.invars[0] for v, end in zip(body.outvars, endings, strict=True)]
    return WithoutSums(jaxpr_without_dead_code(body.replace(outvars=returned)), tuple(endings))


def _may_leave(axes: Sequence[str], specs: Sequence[Any], manual: Collection[str], sizes: Mapping[str, int]) -> bool:
    """Whether a sum over some axes may leave a region, if the results that are computed from it have these specs."""
    if not set(axes) <= set(manual) or math.prod(sizes[a] for a in axes) == 1 or set(specs) != {specs[0]}:
        return False
    entries, others = words_of(specs[0])
    return not others and set(axes).isdisjoint(a for entry in entries for a in axes_of_entry(entry))


def _arrays(operands: Sequence[Any]) -> list[Any]:
    return [v for v in operands if not isinstance(v, Literal)]


def _is_elementwise(eqn: Any) -> bool:
    """Whether an equation changes each element of one array by itself. Its other operands are numbers."""
    name, shapes = eqn.primitive.name, [np.shape(v.val) for v in eqn.invars if isinstance(v, Literal)]
    is_of_one = len(_arrays(eqn.invars)) == len(eqn.outvars) == 1 and not any(shapes)
    return is_of_one and (name in IGNORED or traits_of(name).elementwise)


def opened_region(name: str, params: dict[str, Any], in_avals: Sequence[Any]) -> tuple[Any, tuple[Any, ...]] | None:
    """The jaxpr that replaces a ``shard_map``, and its constants; None for an equation that stays.

    A ``shard_map`` without automatic axes stays, unless it ends with sums. Axes of size 1 do not count as automatic.
    """
    if name != "shard_map":
        return None
    axes, devices = axes_of_mesh(params["mesh"])
    manual = _manual_axes(params)
    if has_automatic_axes(params):
        region = _Region(axes, devices, ())
        return closed(jax.make_jaxpr(lambda *arrays: region.run(params, arrays, user_line()))(*shapes_of(in_avals)))
    rest = without_sums(params, manual)
    if rest is None:
        return None
    mesh, ends = automatic_mesh(dict(axes), devices or None), rest.endings
    body = renamed(rest.body, {axis: (axis,) for axis, _ in axes})
    specs = [
        s if end is None else PartitionSpec(end.axes, *s) for s, end in zip(params["out_specs"], ends, strict=True)
    ]
    mapped = jax.shard_map(
        lambda *parts: [x if end is None else x[None] for x, end in zip(body(*parts), ends, strict=True)],
        mesh=mesh,
        in_specs=params["in_specs"],
        out_specs=specs,
        axis_names=set(manual),
        check_vma=False,
    )

    def add(i: int, addends: Any, end: Ending) -> Any:
        return sum_of_devices_p.bind(addends, mesh=mesh, spec=specs[i])

    return closed(jax.make_jaxpr(lambda *arrays: rest.results(mapped(*arrays), add))(*shapes_of(in_avals)))


def has_automatic_axes(params: Mapping[str, Any]) -> bool:
    """Whether a ``shard_map`` with these parameters has automatic axes of more than one device."""
    axes, _ = axes_of_mesh(params["mesh"])
    manual = _manual_axes(params)
    return any(name not in manual and size > 1 for name, size in axes)


def _manual_axes(params: Mapping[str, Any]) -> tuple[str, ...]:
    names = params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"]
    return tuple(sorted(map(str, names)))


class _Region(Rewritten):
    """Traces the body of a region with its collectives as equations of the program."""

    def __init__(self, axes: tuple[tuple[str, int], ...], devices: tuple[Any, ...], manual: tuple[str, ...]):
        self._axes, self._devices, self._manual = axes, devices, manual

    def run(self, params: dict[str, Any], arrays: Sequence[Any], line: str) -> list[Any]:
        """Traces a ``shard_map`` over the mesh of this region."""
        new_manual = _manual_axes(params)
        inside = _Region(self._axes, self._devices, (*self._manual, *new_manual))

        def boundary(spec: Any, ndim: int, end: Ending | None = None) -> RegionBoundary:
            for kind in ("unreduced", "reduced"):
                if getattr(spec, kind, None):
                    raise ShardingError(f"a spec of a shard_map asks for {kind} values.", line, str(spec))
            entries = [() if entry is None else names_of(entry) for entry in spec]
            axes_of_dims = tuple(tuple(map(str, entry)) for entry in (*entries, *((),) * (ndim - len(entries))))
            summed = () if end is None else end.axes
            return RegionBoundary(self._axes, new_manual, axes_of_dims, self._devices, summed)

        parts = [
            enter_manual_p.bind(x, boundary=boundary(spec, jax.numpy.ndim(x)))
            for x, spec in zip(arrays, params["in_specs"], strict=True)
        ]

        def leave(i: int, x: Any, end: Ending | None = None) -> Any:
            return leave_manual_p.bind(x, boundary=boundary(params["out_specs"][i], x.ndim, end))

        rest = without_sums(params, new_manual)
        results = inside.function(params["jaxpr"] if rest is None else rest.body)(*parts)
        results = list(map(jax.numpy.asarray, results))
        if rest is None:
            return [leave(i, x) for i, x in enumerate(results)]
        whole = [x if end else leave(i, x) for i, (x, end) in enumerate(zip(results, rest.endings, strict=True))]
        return rest.results(whole, leave)

    def shard_map(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        """Opens a ``shard_map`` in the body. Its axes become manual in addition."""
        axes, _ = axes_of_mesh(eqn.params["mesh"])
        line = user_line(eqn.source_info)
        if axes != self._axes:
            raise ShardingError(
                "a shard_map inside of another one is over another mesh.",
                line,
                f"its mesh: {dict(axes)}; around it: {dict(self._axes)}",
                "Make both over the same mesh, each manual over other axes of it.",
            )
        return self.run(eqn.params, operands, line)

    def collective(self, eqn: Any, name: str, axes: tuple[Any, ...], operands: list[Any]) -> Sequence[Any]:
        """Binds a collective as an equation of the program."""
        check_known(eqn, name, axes)
        params = tuple((key, _hashable(value)) for key, value in sorted(eqn.params.items()))
        results = tuple((tuple(v.aval.shape), v.aval.dtype) for v in eqn.outvars)
        collective = Collective(eqn.primitive, params, axes, self._axes, self._manual, results)
        return MANUAL_COLLECTIVES[name].bind(*operands, collective=collective)

    def constraint(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        """Binds a sharding constraint as a mark over automatic axes."""
        (x,) = operands
        line = user_line(eqn.source_info)
        mark = mark_of_equation(eqn.primitive.name, eqn.params, jax.numpy.shape(x))
        if mark is None:
            return operands
        manual = {name for name in _axes_of_mark(mark) if name in self._manual}
        if manual:
            raise ShardingError(
                f"axis {min(manual)!r} is manual in this shard_map, so that an array in it cannot be split over it.",
                line,
                str(mark),
                "Name automatic axes only; the specs of the shard_map say what is split over manual ones.",
            )
        return [bind_mark(x, mark)]


def _axes_of_mark(mark: Mark) -> list[str]:
    """The names of the axes in a mark."""
    entries = [mark.partitions] if mark.kind == "split" else list(mark.spec)
    return [name for entry in entries for name in names_of(entry) if isinstance(name, str)]


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else value
