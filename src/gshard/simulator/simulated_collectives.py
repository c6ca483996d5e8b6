"""Simulates each collective on lists of NumPy arrays, one array for each device.

A value on D devices is a list of D arrays, in row-major order over the axes of the mesh. A collective works on *groups*
of devices. The devices of a group differ only in the axes of the collective, and are ordered by these axes.

    >>> device_groups((("a", 2), ("b", 3)), ("a",))
    ((0, 3), (1, 4), (2, 5))
    >>> device_groups((("a", 2), ("b", 3)), ("b", "a"))
    ((0, 3, 1, 4, 2, 5),)

Sums are computed in the order of the group. Sums of 16-bit floats are computed in float32 and rounded once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gshard.core.errors import RuleError
from gshard.core.planning_tables import tabulated

AxisSizes = tuple[tuple[str, int], ...]
Groups = tuple[tuple[int, ...], ...]
PerDevice = list[Any]


@tabulated(1024)
def device_groups(axis_sizes: AxisSizes, axes: tuple[str, ...], index_groups: Groups | None = None) -> Groups:
    """The groups of devices of a collective over ``axes``."""
    names = [name for name, _ in axis_sizes]
    sizes = [size for _, size in axis_sizes]
    named = [names.index(axis) for axis in axes]
    others = [i for i in range(len(names)) if i not in named]
    devices = np.arange(math.prod(sizes)).reshape(sizes).transpose(others + named)
    groups = devices.reshape(-1, math.prod(sizes[i] for i in named)).tolist()
    if index_groups is not None:
        groups = [[group[i] for i in part] for group in groups for part in index_groups]
    return tuple(tuple(group) for group in groups)


def run_collective(name: str, params: dict[str, Any], axis_sizes: AxisSizes, operands: list[PerDevice]) -> PerDevice:
    """The results of a collective on all devices. The name is a key of ``COLLECTIVES``."""
    return COLLECTIVES[name](params, axis_sizes, *operands)


def _groups(params: dict[str, Any], axis_sizes: AxisSizes) -> Groups:
    axes = params.get("axis_name", params.get("axes"))
    axes = tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
    parts = params.get("axis_index_groups")
    return device_groups(axis_sizes, axes, None if parts is None else tuple(map(tuple, parts)))


def _on_groups(
    params: dict[str, Any], axis_sizes: AxisSizes, x: PerDevice, f: Callable[..., Sequence[Any]]
) -> PerDevice:
    """Applies ``f``, which maps the arrays of a group to the results of the group, to every group."""
    result: PerDevice = [None] * len(x)
    for group in _groups(params, axis_sizes):
        for device, value in zip(group, f([np.asarray(x[d]) for d in group]), strict=True):
            result[device] = value
    return result


def _sum(parts: list[np.ndarray]) -> np.ndarray:
    dtype = parts[0].dtype
    wide = np.dtype(np.float32) if dtype.kind in "fV" and dtype.itemsize <= 2 else dtype
    return functools.reduce(np.add, [p.astype(wide) for p in parts]).astype(dtype)


def _all_reduce(combine: Callable[[list[np.ndarray]], np.ndarray]) -> Callable[..., PerDevice]:
    def all_reduce(params: dict[str, Any], axis_sizes: AxisSizes, x: PerDevice) -> PerDevice:
        named = tuple(a for a in params["axes"] if not isinstance(a, int))
        positional = tuple(a for a in params["axes"] if isinstance(a, int))
        if positional:  # vmap has replaced a named axis by a dimension of the array
            moved = [np.moveaxis(np.asarray(v), positional, range(len(positional))) for v in x]
            x = [combine(list(v.reshape(-1, *v.shape[len(positional) :]))) for v in moved]
        if not named:
            return x
        return _on_groups({**params, "axes": named}, axis_sizes, x, lambda parts: [combine(parts)] * len(parts))

    return all_reduce


def _all_gather(params: dict[str, Any], axis_sizes: AxisSizes, x: PerDevice) -> PerDevice:
    join = np.concatenate if params["tiled"] else np.stack
    dimension = params["all_gather_dimension"]
    return _on_groups(params, axis_sizes, x, lambda parts: [join(parts, axis=dimension)] * len(parts))


def _reduce_scatter(params: dict[str, Any], axis_sizes: AxisSizes, x: PerDevice) -> PerDevice:
    dimension = params["scatter_dimension"]

    def scatter(parts: list[np.ndarray]) -> list[np.ndarray]:
        chunks = np.split(_sum(parts), len(parts), axis=dimension)
        return chunks if params["tiled"] else [chunk.squeeze(dimension) for chunk in chunks]

    return _on_groups(params, axis_sizes, x, scatter)


def _all_to_all(params: dict[str, Any], axis_sizes: AxisSizes, x: PerDevice) -> PerDevice:
    """The primitive is always tiled: ``lax.all_to_all(tiled=False)`` adds and removes a dimension around it."""

    def exchange(parts: list[np.ndarray]) -> list[np.ndarray]:
        sent = [np.split(part, len(parts), axis=params["split_axis"]) for part in parts]
        return [np.concatenate(received, axis=params["concat_axis"]) for received in zip(*sent, strict=True)]

    return _on_groups(params, axis_sizes, x, exchange)


def _ragged_all_to_all(
    params: dict[str, Any],
    axis_sizes: AxisSizes,
    operand: PerDevice,
    output: PerDevice,
    input_offsets: PerDevice,
    send_sizes: PerDevice,
    output_offsets: PerDevice,
    recv_sizes: PerDevice,
) -> PerDevice:
    """Each sender writes rows from its ``input_offsets`` on to its ``output_offsets`` in the receivers' outputs."""
    result = [np.array(v) for v in output]
    for group in _groups(params, axis_sizes):
        for sender in group:
            starts, sizes, targets = (np.asarray(v[sender]) for v in (input_offsets, send_sizes, output_offsets))
            rows = np.asarray(operand[sender])
            chunks_per_receiver = len(starts) // len(group)
            for i, (start, size, target) in enumerate(zip(starts, sizes, targets, strict=True)):
                receiver = group[i // chunks_per_receiver]
                result[receiver][target : target + size] = rows[start : start + size]
    return result


def _ppermute(params: dict[str, Any], axis_sizes: AxisSizes, x: PerDevice) -> PerDevice:
    """Devices that receive nothing get zeros.

    The axes must be in the order of the mesh. For another order, JAX 0.10 still counts positions in the order of the
    mesh, and JAX 0.12 raises an error.
    """
    pairs = list(params["perm"])
    sources, targets = {s for s, _ in pairs}, {t for _, t in pairs}
    if len(sources) < len(pairs) or len(targets) < len(pairs):
        raise RuleError("a ppermute has a source or a destination twice.", got=f"pairs: {pairs}")
    result: PerDevice = [np.zeros_like(np.asarray(v)) for v in x]
    for group in _groups(params, axis_sizes):
        if list(group) != sorted(group):
            raise RuleError(
                "a ppermute names its axes in another order than the mesh.",
                got=f"axes: {params['axis_name']}; mesh: {axis_sizes}",
                hint="Name the axes in the order of the mesh and number the pairs accordingly.",
            )
        for source, target in pairs:
            result[group[target]] = np.asarray(x[group[source]])
    return result


def _broadcast(params: dict[str, Any], axis_sizes: AxisSizes, x: PerDevice) -> PerDevice:
    return _on_groups(params, axis_sizes, x, lambda parts: [parts[params["source"]]] * len(parts))


def _axis_index(params: dict[str, Any], axis_sizes: AxisSizes) -> PerDevice:
    groups = _groups(params, axis_sizes)
    positions = [np.asarray(i, np.int32) for i in range(len(groups[0]))]  # the same objects for equal devices
    index = {device: positions[i] for group in groups for i, device in enumerate(group)}
    return [index[d] for d in range(len(index))]


def _same(params: dict[str, Any], axis_sizes: AxisSizes, x: PerDevice) -> PerDevice:
    return x


COLLECTIVES: dict[str, Callable[..., PerDevice]] = {
    "psum": _all_reduce(_sum),
    "psum_invariant": _all_reduce(_sum),
    "pmax": _all_reduce(lambda parts: functools.reduce(np.maximum, parts)),
    "pmin": _all_reduce(lambda parts: functools.reduce(np.minimum, parts)),
    "all_gather": _all_gather,
    "all_gather_invariant": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ragged_all_to_all": _ragged_all_to_all,
    "ppermute": _ppermute,
    "pbroadcast": _broadcast,
    "axis_index": _axis_index,
    "pvary": _same,
    "pcast": _same,
}
"""For each primitive that names mesh axes, a function of its parameters, the axes of the mesh and its operands."""
