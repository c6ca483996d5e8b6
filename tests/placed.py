"""Where the arguments of a call may lie: one array in every way in which JAX can hold it.

    for way, (x,) in every_way(mesh, x): check(J(x))        # any function that must compute the same
    for got in in_every_way(J, (x, w)): compare(got, want)  # three calls, for laws about something else

A way of placing takes a NumPy array and the mesh of the function that is called, of eight devices.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gshard

Place = Callable[[np.ndarray, jax.sharding.Mesh], Any]


def mesh_of(*, explicit=False, order=range(8), **axes):
    """A mesh of the first devices that ``order`` names, as many as there are, axis types Auto or Explicit."""
    ids = list(order)[: math.prod(axes.values())]
    devices = np.array([jax.devices()[i] for i in ids]).reshape(tuple(axes.values()))
    return jax.sharding.Mesh(
        devices, tuple(axes), axis_types=(AxisType.Explicit if explicit else AxisType.Auto,) * len(axes)
    )


def cut(x, mesh, *dims):
    """The array over a mesh, axis ``i`` of it on dimension ``dims[i]``, as far as sizes divide."""
    entries = [()] * x.ndim
    for (axis, parts), d in zip(mesh.shape.items(), dims, strict=False):
        if d is not None and d < x.ndim and x.shape[d] % (parts * math.prod(mesh.shape[a] for a in entries[d])) == 0:
            entries[d] = (*entries[d], axis)
    return put(x, mesh, *entries)


def put(x, mesh, *spec):
    """The array over a mesh, as a PartitionSpec says."""
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def turned(mesh):
    """The same devices in the same order, the axes of the same names written in the other order."""
    axes = tuple(reversed(mesh.shape.items()))
    devices = mesh.devices.reshape([n for _, n in axes])
    return jax.sharding.Mesh(devices, [a for a, _ in axes], axis_types=(AxisType.Auto,) * len(axes))


def three_calls(run, mesh, *arguments):
    """The results of three calls: with arguments on the host, on all devices, and split along two dimensions."""
    yield run(*arguments)
    yield run(*jax.device_put(arguments, NamedSharding(mesh, P())))
    yield run(*jax.tree.map(lambda x: cut(np.asarray(x), mesh, 0, 1), arguments))


# Compiled once for all calls.
_sum_of_bits = jax.jit(
    lambda v: sum(jnp.where(v & (1 << k), 1 << k, 0) for k in range(31)) + jnp.where(v < 0, -(2**31), 0)
)
_times_one = jax.jit(lambda v: v * 1)


@functools.cache
def _split(dim, mesh):
    """A function that returns its argument split in eight along ``dim``, or along its last dimension."""
    return gshard.jit(lambda v: gshard.split(v * 1, min(dim, v.ndim - 1), 8), mesh=mesh)


def _weak(x):
    """Of a weak type: a sum of numbers of Python, one for each bit."""
    return _sum_of_bits(x) if x.dtype == np.int32 else jnp.asarray(x)


def _result(dim):
    """As another function of gshard's returns it, on the same mesh."""
    return lambda x, mesh: _split(dim, mesh)(x)


# Their order matters to derandomized tests: add at the end.
PLACES = {
    "numpy": lambda x, mesh: x,
    "uncommitted": lambda x, mesh: jnp.asarray(x),
    "weak type": lambda x, mesh: _weak(x),
    "first device": lambda x, mesh: jax.device_put(x, jax.devices()[0]),
    "another device": lambda x, mesh: jax.device_put(x, jax.devices()[5]),
    "whole": lambda x, mesh: cut(x, mesh),
    "rows": lambda x, mesh: cut(x, mesh, 0, 0, 0),
    "columns": lambda x, mesh: cut(x, mesh, 1, 1, 1),
    "both": lambda x, mesh: cut(x, mesh, 0, 1),
    "both, crossed": lambda x, mesh: cut(x, mesh, 1, 0),
    "turned, rows over the first axis": lambda x, mesh: cut(x, turned(mesh), 0),
    "turned, rows over the last axis": lambda x, mesh: cut(x, turned(mesh), None, 0),
    "turned, rows": lambda x, mesh: cut(x, turned(mesh), 0, 0, 0),
    "turned, columns": lambda x, mesh: cut(x, turned(mesh), 1, 1, 1),
    "other names": lambda x, mesh: cut(x, mesh_of(p=4, q=2), 0, 1),
    "an axis of size 1, named": lambda x, mesh: cut(x, mesh_of(one=1, **mesh.shape), 0, 1),
    "an axis of size 1": lambda x, mesh: cut(x, mesh_of(**mesh.shape, one=1), 0, 1, 0),
    "reversed, rows": lambda x, mesh: cut(x, mesh_of(order=range(7, -1, -1), p=8), 0),
    "reversed, whole": lambda x, mesh: cut(x, mesh_of(order=range(7, -1, -1), p=8)),
    "reversed, same axes": lambda x, mesh: cut(
        x, jax.sharding.Mesh(mesh.devices.reshape(-1)[::-1].reshape(mesh.devices.shape), mesh.axis_names), 0, 0, 0
    ),
    "shuffled, both": lambda x, mesh: cut(x, mesh_of(order=(3, 1, 4, 0, 5, 7, 2, 6), p=2, q=4), 0, 1),
    "half, rows": lambda x, mesh: cut(x, mesh_of(order=range(4), p=4), 0),
    "half, whole": lambda x, mesh: cut(x, mesh_of(order=range(4, 8), p=4)),
    "two devices, same axis": lambda x, mesh: cut(x, mesh_of(order=(1, 3), **{mesh.axis_names[0]: 2}), 0),
    "result, rows": _result(0),
    "result, columns": _result(1),
    "result of jax.jit": lambda x, mesh: _times_one(cut(x, mesh, 1, 0)),
    "host memory": lambda x, mesh: jax.device_put(x, NamedSharding(mesh, P(), memory_kind="pinned_host")),
    "explicit, rows": lambda x, mesh: cut(x, mesh_of(explicit=True, p=8), 0),
    "explicit, whole": lambda x, mesh: cut(x, mesh_of(explicit=True, p=2, q=4)),
    "explicit, same axes": lambda x, mesh: cut(x, mesh_of(explicit=True, **mesh.shape), 0),
    "reversed, over the first axis": lambda x, mesh: cut(
        x, jax.sharding.Mesh(mesh.devices.reshape(-1)[::-1].reshape(mesh.devices.shape), mesh.axis_names), 0
    ),
}  # fmt: skip

# Three that plan alike: no way says how the array is cut over the mesh, so that one compiled program will do.
WITHOUT_MARKS = ("numpy", "another device", "half, rows")


def every_way(mesh, *arrays, ways=tuple(PLACES)):
    """The arrays placed in each way, all of them in the same one; what is no NumPy array stays as it is."""
    for way in ways:
        yield way, tuple(PLACES[way](x, mesh) if isinstance(x, np.ndarray) else x for x in arrays)


def in_every_way(call, arguments, mesh, ways=WITHOUT_MARKS):
    """The results of three calls or more with the same numbers, placed in another way each time.

    Leaves of pytrees are placed; scalars and keys come as they are.
    """
    leaves, tree = jax.tree.flatten(tuple(arguments))
    for way in ways:
        placed = [PLACES[way](x, mesh) if isinstance(x, np.ndarray) and x.ndim else x for x in leaves]
        yield call(*jax.tree.unflatten(tree, placed))
