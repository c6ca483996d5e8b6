"""Defines the steps of reshards: the resulting sharding, the bytes that devices send, and the code that runs them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr
from numpy.typing import NDArray

from gshard.comm.route import Chunk, Route, carry, chunks_of, numbered, routed
from gshard.core.jax_adapter_context import in_context
from gshard.core.mesh import Atoms, Mesh
from gshard.core.planning_tables import tabulated
from gshard.core.program import NO_CONTEXT, itemsize
from gshard.core.sharding import Sharding, common_prefix
from gshard.core.xla_workarounds import all_gather, all_to_all, opaque_for_slice, ppermute

# Slices local arrays by the position of the device.


def slice_part(x: Any, dim: int, size: int, atoms: Atoms) -> Any:
    """This device's part of ``size`` elements of dimension ``dim``; parts are numbered along ``atoms``."""
    return lax.dynamic_slice_in_dim(opaque_for_slice(x, dim, size), lax.axis_index(atoms) * size, size, axis=dim)


# Runs one all-to-all that moves atoms from several dimensions to several others.


def moved(before: Sequence[Atoms], after: Sequence[Atoms]) -> Atoms:
    """The atoms that leave a dimension, in the order of the dimensions."""
    pairs = zip(before, after, strict=True)
    return tuple(a for have, wanted in pairs for a in have[len(common_prefix(have, wanted)) :])


def exchanged(x: Any, before: Sequence[Atoms], after: Sequence[Atoms], mesh: Mesh) -> Any:
    """Runs the all-to-all on one device's part of an array, inside ``shard_map``."""
    sizes, moving = mesh.atom_sizes, moved(before, after)
    shape, dim_of_atom, other_dims = _with_atom_dims(x.shape, before, after, mesh)
    x = x.reshape(shape)
    free = [a for a in dim_of_atom if a not in moving]
    for a in free:
        x = lax.dynamic_slice_in_dim(x, lax.axis_index(a), 1, dim_of_atom[a])
    tile = [shape[d] for d in other_dims]
    by_receiver = lax.transpose(x, [*(dim_of_atom[a] for a in (*moving, *free)), *other_dims])
    x = all_to_all(by_receiver.reshape(mesh.count(moving), *tile), moving, 0, 0)
    by_sender = x.reshape(*(sizes[a] for a in moving), *tile)
    result_shape = [n * mesh.count(have[len(wanted) :]) for n, have, wanted in zip(tile, before, after, strict=True)]
    return lax.transpose(by_sender, _order(before, after, moving)).reshape(result_shape)


def _with_atom_dims(
    shape: Sequence[int], before: Sequence[Atoms], after: Sequence[Atoms], mesh: Mesh
) -> tuple[list[int], dict[str, int], list[int]]:
    """The shape of a part with a dimension for each gained atom, in front of the dimension that the atom splits."""
    new_shape: list[int] = []
    dim_of_atom: dict[str, int] = {}
    other_dims: list[int] = []
    for n, have, wanted in zip(shape, before, after, strict=True):
        gained = wanted[len(have) :]
        dim_of_atom.update({a: len(new_shape) + i for i, a in enumerate(gained)})
        new_shape += (mesh.atom_sizes[a] for a in gained)
        other_dims.append(len(new_shape))
        new_shape.append(n // mesh.count(gained))
    return new_shape, dim_of_atom, other_dims


def _order(before: Sequence[Atoms], after: Sequence[Atoms], moving: Atoms) -> list[int]:
    """The permutation of the received dimensions (moved atoms, then the array's) to their places in the result."""
    lost = [have[len(wanted) :] for have, wanted in zip(before, after, strict=True)]
    return [i for d, atoms in enumerate(lost) for i in (*map(moving.index, atoms), len(moving) + d)]


ALL_SLICE, ALL_GATHER, ALL_TO_ALL = "all_slice", "all_gather", "all_to_all"
PERMUTE, REDUCE_SCATTER, ALL_REDUCE = "collective_permute", "reduce_scatter", "all_reduce"
TO_PARTIAL = "to_partial"
LOCAL = (ALL_SLICE, TO_PARTIAL)  # steps in which nothing is sent


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One move of an array."""

    kind: str  # the kind of the step
    atoms: Atoms  # the atoms over which it runs
    before: Sharding  # before, after: the shardings before and after the step
    after: Sharding
    dim: int = -1  # the dimension that is sliced, gathered or scattered, or that atoms leave
    to: int = -1  # the dimension to which the atoms of an all_to_all move; -1 for an all_to_all of tiles
    monoid: str = "add"  # the monoid that combines unreduced parts


def is_of_tiles(step: Step) -> bool:
    """Whether a step is an all-to-all of tiles, in which atoms of several dimensions move at once."""
    return step.kind == ALL_TO_ALL and step.to < 0


def aligned(n: int, parts: int, more: int) -> bool:
    """Whether splitting each of ``parts`` parts of ``n`` elements into ``more`` results in ``parts * more`` parts."""
    return parts == 1 or -(-n // parts) == more * -(-n // (parts * more))


def bytes_sent(step: Step, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> int:
    """Bytes that each device sends in this step, for an array of this global shape."""
    if step.kind in LOCAL or (g := mesh.count(step.atoms)) == 1:
        return 0
    part = step.before.local_shape(mesh, shape)
    before = math.prod(part) * itemsize
    if is_of_tiles(step):
        return math.prod(step.after.local_shape(mesh, shape)) * itemsize * (g - 1) // g
    if step.kind == ALL_GATHER:
        n, local = shape[step.dim], part[step.dim]
        way, room = _lined_up(step, n, mesh)
        return (before // local if local else 0) * (room * (g - 1) + sum(way.messages if way else ()))
    if step.kind == PERMUTE:
        return before
    if step.kind in (ALL_TO_ALL, REDUCE_SCATTER):
        cut = step.to if step.kind == ALL_TO_ALL else step.dim
        n, local = shape[cut], part[cut]
        padded = g * -(-n // (mesh.count(step.before.dims[cut]) * g))
        return (before // local if local else 0) * padded * (g - 1) // g
    return 2 * before * (g - 1) // g if step.monoid in (*_REDUCERS, *_LOGICAL) else before * (g - 1)


def step_collectives(
    step: Step, shape: tuple[int, ...], dtype: Any, itemsize: int, mesh: Mesh
) -> Iterator[tuple[str, int]]:
    """The collectives of a step for a dtype, each with the bytes that each device sends."""
    sent, local = bytes_sent(step, shape, itemsize, mesh), step.before.local_shape(mesh, shape)
    if step.kind == ALL_REDUCE and _folds(step.monoid, dtype):
        yield ALL_GATHER, math.prod(local) * itemsize * (mesh.count(step.atoms) - 1)
        return
    if step.kind == ALL_GATHER and local[step.dim]:
        way, _ = _lined_up(step, shape[step.dim], mesh)
        for length in way.messages if way else ():
            permuted = math.prod(local) // local[step.dim] * length * itemsize
            sent -= permuted
            yield PERMUTE, permuted
    yield step.kind, sent


@in_context(NO_CONTEXT)
def run(step: Step, x: Any, shape: tuple[int, ...], mesh: Mesh) -> Any:
    """Runs a step on one device's part ``x`` of an array of global ``shape``, inside ``shard_map``."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) and step.kind != ALL_SLICE:
        return _run_on_key_data(step, x, shape, mesh)
    g, local = mesh.count(step.atoms), step.after.local_shape(mesh, shape)
    if x.size == 0:
        return jnp.zeros(local, x.dtype)
    match step.kind:
        case "all_slice":
            return slice_part(_pad(x, step.dim, g * local[step.dim]), step.dim, local[step.dim], step.atoms)
        case "all_gather":
            way, room = _lined_up(step, shape[step.dim], mesh)
            if way is not None:
                x = carry(x, step.dim, step.before.dims[step.dim], mesh, way, room)
            whole = _as_first(x, step.dim, lambda y, d: all_gather(y, step.atoms, d))
            return _trim(whole, step.dim, local[step.dim])
        case "all_to_all" if is_of_tiles(step):
            return exchanged(x, step.before.dims, step.after.dims, mesh)
        case "all_to_all":
            padded = _pad(x, step.to, g * local[step.to])
            return _trim(_dealt(padded, step.to, step.dim, g, step.atoms), step.dim, local[step.dim])
        case "collective_permute":
            return ppermute(x, mesh.atoms, permutation(step.before, step.after, mesh))
        case "reduce_scatter":
            padded = _pad(x, step.dim, g * local[step.dim])
            bits, back = _as_bits(padded, step.dim) if step.monoid == "pick" else (padded, lambda summed: summed)
            scatter = functools.partial(lax.psum_scatter, axis_name=step.atoms, tiled=True)
            return back(_as_first(bits, step.dim, lambda y, d: scatter(y, scatter_dimension=d)))
        case "to_partial":
            return jnp.where(lax.axis_index(step.atoms) == 0, x, jnp.asarray(identity(step.monoid, x.dtype), x.dtype))
        case _:
            return all_reduce(x, step.atoms, step.monoid)


def _as_first(x: Any, dim: int, run: Callable[[Any, int], Any]) -> Any:
    """Runs a collective along a dimension; along dimension 0 if the leading sizes are one, which saves XLA a copy."""
    if not dim or any(n != 1 for n in x.shape[:dim]):
        return run(x, dim)
    result = run(x.reshape(x.shape[dim:]), 0)
    return result.reshape(*x.shape[:dim], *result.shape)


def _dealt(x: Any, split: int, joined: int, g: int, atoms: Atoms) -> Any:
    """An all-to-all: splits one dimension over ``g`` devices, and joins the received parts along another.

    If a part has one element along one of the two dimensions (one expert on each device), no interleaving is needed:
    gshard exchanges the parts as a leading dimension and transposes the result, as compilers do. Otherwise the TPU
    compiler would pad a dimension of one and sum it again, which takes a fifth of the time of an expert's product.
    """
    if x.shape[joined] != 1 and x.shape[split] != g:
        return all_to_all(x, atoms, split, joined)
    shape = list(x.shape)
    parts = jnp.moveaxis(x.reshape(*shape[:split], g, shape[split] // g, *shape[split + 1 :]), split, 0)
    received = all_to_all(parts, atoms, 0, 0)
    shape[split], shape[joined] = shape[split] // g, shape[joined] * g
    return jnp.moveaxis(received, 0, joined).reshape(shape)


def _lined_up(step: Step, n: int, mesh: Mesh) -> tuple[Route | None, int]:
    """The route that aligns parts before a gather (None if they are aligned), and the size of a part after it."""
    parts, group = mesh.count(step.before.dims[step.dim]), mesh.count(step.atoms)
    return (None, -(-n // parts)) if aligned(n, parts // group, group) else _aligning(n, parts, group)


@tabulated(4096)
def _aligning(n: int, parts: int, group: int) -> tuple[Route, int]:
    """The result of ``_lined_up`` for parts of ``n`` elements, which are gathered in groups and are not aligned."""
    have, joined = -(-n // parts), -(-n * group // parts)
    room = -(-joined // group)
    chunks: list[Chunk] = []
    for receiver in range(parts):
        first = receiver // group * joined + receiver % group * room
        chunks += chunks_of(first, min(first + room, (receiver // group + 1) * joined, n), have, receiver, first)
    return routed(tuple(chunks)), room


def _run_on_key_data(step: Step, x: Any, shape: tuple[int, ...], mesh: Mesh) -> Any:
    """Runs a step on PRNG keys as arrays of words, which have one more dimension that is not split."""
    data = jax.random.key_data(x)
    before, after = (Sharding((*s.dims, ()), s.unreduced) for s in (step.before, step.after))
    step = dataclasses.replace(step, before=before, after=after)
    moved = run(step, data, (*shape, data.shape[-1]), mesh)
    return jax.random.wrap_key_data(moved, impl=jax.random.key_impl(x))


def identity(monoid: str, dtype: Any) -> Any:
    """The identity of a monoid: 0 for add, -inf for max, ...

    >>> identity("max", jnp.int8)
    -128
    """
    dtype = jnp.dtype(dtype)
    if monoid == "add" and jnp.issubdtype(dtype, jnp.inexact):
        # -0.0, because 0.0 + -0.0 is 0.0 and would lose the sign of a zero.
        return complex(-0.0, -0.0) if jnp.issubdtype(dtype, jnp.complexfloating) else -0.0
    if monoid in ("add", "or", "xor", "pick"):
        return False if dtype == jnp.bool_ else 0
    if monoid == "mul":
        return 1
    if monoid == "and":
        return True if dtype == jnp.bool_ else -1 if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.iinfo(dtype).max
    if dtype == jnp.bool_:
        return monoid == "min"
    if jnp.issubdtype(dtype, jnp.inexact):
        if not has_infinities(dtype):
            return float(jnp.finfo(dtype).min if monoid == "max" else jnp.finfo(dtype).max)
        least = float("-inf") if monoid == "max" else float("inf")
        # Complex numbers are ordered by their real parts, then by their imaginary parts.
        return complex(least, least) if jnp.issubdtype(dtype, jnp.complexfloating) else least
    info = jnp.iinfo(dtype)
    return int(info.min) if monoid == "max" else int(info.max)


def has_infinities(dtype: Any) -> bool:
    """Whether an inexact dtype has infinities; some floats of eight bits and fewer have none."""
    return bool(np.isinf(np.asarray(np.inf).astype(jnp.dtype(dtype))))


_REDUCERS = {"add": lax.psum, "max": lax.pmax, "min": lax.pmin, "pick": lax.psum}
_LOGICAL = {"or": lax.pmax, "and": lax.pmin}


def all_reduce(x: Any, atoms: Atoms, monoid: str) -> Any:
    """Combines the parts of all devices. ``mul``, ``xor`` and bitwise monoids gather the parts and fold them."""
    if monoid == "add" and x.dtype == jnp.bool_:
        raise TypeError("booleans are combined by 'or', 'and' or 'xor'")
    if monoid == "pick":
        bits, back = _as_bits(x)
        return back(lax.psum(bits, atoms))
    if not _folds(monoid, x.dtype):
        reducer = (_REDUCERS | _LOGICAL)[monoid]
        if monoid in ("max", "min") and jnp.issubdtype(x.dtype, jnp.floating):
            return _extreme(x, reducer, atoms, monoid)
        return reducer(x.astype(jnp.uint8), atoms).astype(jnp.bool_) if x.dtype == jnp.bool_ else reducer(x, atoms)
    parts = lax.all_gather(x, atoms, axis=0, tiled=False)
    return FOLDS[monoid](parts)


def _as_bits(x: Any, dim: int | None = None) -> tuple[Any, Callable[[Any], Any]]:
    """An array as integers of the same bytes, and the function that converts back; dimension ``dim`` stays unchanged.

    Sums of floats lose the sign of a zero, subnormal numbers and the payload of NaN, even if all other terms are zero.
    """
    dtype = x.dtype
    if dtype == jnp.bool_:
        return x.astype(jnp.uint8), lambda bits: bits.astype(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        bits, back = _as_bits(jnp.stack([x.real, x.imag], -1), dim)
        return bits, lambda bits: lax.complex(back(bits)[..., 0], back(bits)[..., 1])
    width = (jnp.finfo if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo)(dtype).bits
    if width == 16 and x.ndim and dim != x.ndim - 1 and x.shape[-1] % 2 == 0:
        # Combine two elements: not every network adds integers of 16 bits.
        pairs = lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), jnp.uint32)
        return pairs, lambda bits: lax.bitcast_convert_type(bits, dtype).reshape(*bits.shape[:-1], -1)
    if jnp.issubdtype(dtype, jnp.integer) and width >= 8:
        return x, lambda bits: bits
    unsigned = lax.bitcast_convert_type(x, jnp.dtype(f"uint{width}"))

    def to_dtype(bits: Any) -> Any:
        return lax.bitcast_convert_type(bits.astype(unsigned.dtype), dtype)

    return unsigned.astype(jnp.dtype(f"uint{max(width, 8)}")), to_dtype


def _extreme(x: Any, reducer: Any, atoms: Atoms, monoid: str) -> Any:
    """The largest or smallest of floats, computed on integers in the same order.

    Collectives on floats do not define the treatment of NaN and of the sign of a zero. A NaN is the extreme, as in JAX.
    """
    integer = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    info = jnp.iinfo(integer)
    first = jnp.asarray(info.max if monoid == "max" else info.min, integer)

    def ordered(bits: Any) -> Any:
        return jnp.where(bits < 0, bits ^ jnp.asarray(info.max, integer), bits)

    keys = jnp.where(jnp.isnan(x), first, ordered(lax.bitcast_convert_type(x, integer)))
    extreme = reducer(keys, atoms)
    return jnp.where(
        extreme == first, jnp.asarray(jnp.nan, x.dtype), lax.bitcast_convert_type(ordered(extreme), x.dtype)
    )


def _folds(monoid: str, dtype: Any) -> bool:
    """Whether no reducing collective supports the monoid, so that parts are gathered and folded on each device."""
    if monoid in ("max", "min"):
        return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.dtype(dtype).itemsize == 1
    return monoid not in _REDUCERS and not (monoid in _LOGICAL and dtype == jnp.bool_)


FOLDS = {
    "max": lambda parts: jnp.max(parts, axis=0),
    "min": lambda parts: jnp.min(parts, axis=0),
    "mul": lambda parts: jnp.prod(parts, axis=0, dtype=parts.dtype),
    "or": lambda parts: jnp.bitwise_or.reduce(parts, axis=0),
    "and": lambda parts: jnp.bitwise_and.reduce(parts, axis=0),
    "xor": lambda parts: jnp.bitwise_xor.reduce(parts, axis=0),
}


def _pad(x: Any, dim: int, size: int) -> Any:
    missing = size - x.shape[dim]
    if not missing:
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(x)
        return jax.random.wrap_key_data(_pad(data, dim, size), impl=jax.random.key_impl(x))
    return jnp.pad(x, [(0, missing if d == dim else 0) for d in range(x.ndim)])


def _trim(x: Any, dim: int, size: int) -> Any:
    return x if x.shape[dim] == size else lax.slice_in_dim(x, 0, size, axis=dim)


def permutation(before: Sharding, after: Sharding, mesh: Mesh) -> list[tuple[int, int]]:
    """The pairs for ``lax.ppermute`` that move the parts of a split to other devices (``targets``)."""
    return list(enumerate(targets(before, after, mesh).tolist()))


def targets(before: Sharding, after: Sharding, mesh: Mesh) -> NDArray[np.intp]:
    """The device to which each device sends its part, to move the parts of a split to other devices.

    Both shardings split each dimension into the same number of parts. Devices that already hold the part that they need
    keep it. The other holders of each part before and after are paired in order.
    """
    part_before, part_after = (
        numbered(mesh, (*itertools.chain(*s.dims), *(a for a, _ in s.unreduced)))[0] for s in (before, after)
    )
    moved = np.flatnonzero(part_before != part_after)
    senders, receivers = (moved[np.argsort(parts[moved], kind="stable")] for parts in (part_before, part_after))
    assert np.array_equal(part_before[senders], part_after[receivers]), f"{before} and {after} cut in other parts"
    target_of = np.arange(mesh.size)
    target_of[senders] = receivers
    return target_of


# Determines whether the parts of an array are contiguous in memory, or must be copied into place.


def is_strided(shape: tuple[int, ...], dim: int) -> bool:
    """Whether a part of an array along a dimension consists of several runs of elements."""
    return any(n > 1 for n in shape[:dim])


def is_turned(shape: tuple[int, ...], cut: int, joined: int) -> bool:
    """Whether received parts, which are consecutive, must be interleaved."""
    return any(n > 1 for n in shape[min(cut, joined) : max(cut, joined)])


def laid_out(step: Step, shape: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
    """The elements of a device's part before and after a gather or reduce-scatter of strided parts; () otherwise."""
    if step.kind not in (ALL_GATHER, REDUCE_SCATTER):
        return ()
    before, after = (s.local_shape(mesh, shape) for s in (step.before, step.after))
    return (math.prod(before), math.prod(after)) if is_strided(tuple(map(min, before, after)), step.dim) else ()


KINDS = {
    "psum": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "psum_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "all_to_all",
    "ppermute": "collective_permute",
}


def collectives_of(jaxpr: Any, sizes: Mapping[str, int], times: int = 1) -> Iterator[tuple[str, Atoms, int, Any]]:
    """Every collective of a per-device jaxpr: kind, axes, bytes that a device sends in all runs, operand type."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name, params = eqn.primitive.name, eqn.params
        if name in KINDS:
            axes = params.get("axes", params.get("axis_name"))
            axes = tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
            group = math.prod(sizes[a] for a in axes)
            held = [math.prod(var.aval.shape) * itemsize(var.aval.dtype) for var in eqn.invars]
            for size, var in zip(sent_sizes(name, held), eqn.invars, strict=False):
                yield KINDS[name], axes, times * sent_bytes(KINDS[name], size, group), var.aval
        times_of_bodies = times * params["length"] if name == "scan" else times
        for value in params.values():
            for body in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(body, (Jaxpr, ClosedJaxpr)):
                    yield from collectives_of(body, sizes, times_of_bodies)


def sent_sizes(name: str, sizes: Sequence[int]) -> Sequence[int]:
    """The sizes of the arrays that a collective sends.

    The bytes of a ragged all-to-all are known at run time only. It counts as an all-to-all of its operand, or of its
    output if that is smaller: on average, devices send no more than they hold, and receive no more than they have room
    for. They do not send offsets and sizes.
    """
    return [min(sizes[:2])] if name == "ragged_all_to_all" else sizes


def sent_bytes(kind: str, operand: int, group: int) -> int:
    """Bytes that each device of a group sends with the best known algorithms."""
    if kind == "all_reduce":
        return 2 * operand * (group - 1) // group
    if kind == "all_gather":
        return operand * (group - 1)
    return operand if kind == "collective_permute" else operand * (group - 1) // group
