"""Opens a ``shard_map`` with automatic axes to equations of the program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from gshard.core.errors import ShardingError
from gshard.core.jax_adapter import closed, shapes_of, user_line
from gshard.language.mark_primitive import bind_mark
from gshard.language.per_device import (
    MANUAL_COLLECTIVES,
    Collective,
    RegionBoundary,
    Rewritten,
    check_known,
    enter_manual_p,
    leave_manual_p,
    names_of,
)
from gshard.rules.manual import axes_of_mesh
from gshard.tracing.expand import mark_of_equation


def opened_region(name: str, params: dict[str, Any], in_avals: Sequence[Any]) -> tuple[Any, tuple[Any, ...]] | None:
    """The jaxpr that replaces a ``shard_map``, and its constants; None for an equation that stays.

    A ``shard_map`` without automatic axes stays. Axes of size 1 do not count as automatic.
    """
    if name != "shard_map" or not has_automatic_axes(params):
        return None
    region = _Region(*axes_of_mesh(params["mesh"]), ())
    return closed(jax.make_jaxpr(lambda *arrays: region.run(params, arrays, user_line()))(*shapes_of(in_avals)))


def has_automatic_axes(params: Mapping[str, Any]) -> bool:
    """Whether a ``shard_map`` with these parameters has automatic axes of more than one device."""
    axes, _ = axes_of_mesh(params["mesh"])
    manual = manual_axes_of(params)
    return any(name not in manual and size > 1 for name, size in axes)


def manual_axes_of(params: Mapping[str, Any]) -> tuple[str, ...]:
    """The axes that a ``shard_map`` with these parameters makes manual."""
    names = params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"]
    return tuple(sorted(map(str, names)))


class _Region(Rewritten):
    """Traces the body of a region with its collectives as equations of the program."""

    def __init__(self, axes: tuple[tuple[str, int], ...], devices: tuple[Any, ...], manual: tuple[str, ...]):
        self._axes, self._devices, self._manual = axes, devices, manual

    def run(self, params: dict[str, Any], arrays: Sequence[Any], line: str) -> list[Any]:
        """Traces a ``shard_map`` over the mesh of this region."""
        new_manual = manual_axes_of(params)
        inside = _Region(self._axes, self._devices, (*self._manual, *new_manual))

        def boundary(spec: Any, ndim: int) -> RegionBoundary:
            for kind in ("unreduced", "reduced"):
                if getattr(spec, kind, None):
                    raise ShardingError(f"a spec of a shard_map asks for {kind} values.", line, str(spec))
            entries = [() if entry is None else names_of(entry) for entry in spec]
            axes_of_dims = tuple(tuple(map(str, entry)) for entry in (*entries, *((),) * (ndim - len(entries))))
            return RegionBoundary(self._axes, new_manual, axes_of_dims, self._devices)

        parts = [
            enter_manual_p.bind(x, boundary=boundary(spec, jax.numpy.ndim(x)))
            for x, spec in zip(arrays, params["in_specs"], strict=True)
        ]
        results = map(jax.numpy.asarray, inside.function(params["jaxpr"])(*parts))
        pairs = zip(results, params["out_specs"], strict=True)
        return [leave_manual_p.bind(x, boundary=boundary(spec, x.ndim)) for x, spec in pairs]

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
        manual = {name for entry in mark.spec for name in names_of(entry) if name in self._manual}
        if manual:
            raise ShardingError(
                f"axis {min(manual)!r} is manual in this shard_map, so that an array in it cannot be split over it.",
                line,
                str(mark),
                "Name automatic axes only; the specs of the shard_map say what is split over manual ones.",
            )
        return [bind_mark(x, mark)]


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else value
