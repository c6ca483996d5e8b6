"""Workarounds for bugs of XLA, each with its issue; all last seen in jaxlib 0.10.2.

``tests/core/test_xla_workarounds.py`` shows each bug; a test there that fails says which of these can go.

    opaque_identity   CPU: equal computations on both sides of a barrier are merged       no issue
    opaque_for_slice  CPU: an integer slice of a product of a slice loses the factor      no issue
    with_initial      the initial value of a reduction over one element is dropped        no issue
    taken             one index out of range reads what lies beside a slice               openxla/xla#49121
    update_window     one index out of range writes what lies beside a slice              openxla/xla#49121
    AS_WRITTEN        the same; and CPU reads what it has overwritten in place            openxla/xla#49176
    row_major         CPU: a transform beside a gather is given an order that it refuses  no issue
    all_to_all        CPU: one that sends on what another has sent may not compile        no issue
    all_gather,       CPU: what only moves elements converts bfloat16 to float32          no issue
    ppermute
    runnable          a shard_map that reads empty arrays only may not compile            no issue
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, mlir

from gshard.core.jax_adapter import all_gather_p, all_to_all_p, ppermute_p
from gshard.core.jax_adapter_manual import with_mapping

# Whether XLA for CPU leaves barriers in their place, as it does for other devices.
_LEAVES_BARRIERS = jax.__version_info__[:2] >= (0, 12)

# Options of a compiler that runs a program unchanged: without XLA's algebraic simplifier.
AS_WRITTEN = {"xla_disable_hlo_passes": "algsimp"}


def opaque_identity(arrays: Sequence[Any], late: Any) -> list[Any]:
    """The same arrays, bit by bit; for XLA they are others, and not there before ``late`` is.

    XLA for GPU and TPU leaves ``optimization_barrier`` in its place. XLA for CPU removes it and then merges what it
    kept apart, up to jaxlib 0.11. So each array is changed by a number that XLA does not know and that is always zero;
    later versions, which leave the barrier, find out about the number.

    >>> opaque_identity([jnp.float32(-0.0), jnp.arange(2), jnp.bool_(True)], jnp.float32(7))
    [Array(-0., dtype=float32), Array([0, 1], dtype=int32), Array(True, dtype=bool)]
    """
    if _LEAVES_BARRIERS:
        return list(lax.optimization_barrier((*arrays, late))[:-1])
    first = late[(0,) * late.ndim] if late.size and _bits(late.dtype) else None
    seed = jnp.uint32(1) if first is None else _as_bits(first).astype(jnp.uint32)
    zero = seed & lax.rng_uniform(jnp.uint32(0), jnp.uint32(1), ())
    return [_changed(x, zero) for x in arrays]


def opaque_for_slice(x: Any, dim: int, size: int) -> Any:
    """Hides an array from XLA before ``size`` elements along ``dim`` are taken, where XLA would err.

    XLA on CPU loses the factor of ``dynamic_slice(dynamic_slice(x) * 3)`` if the result is one integer.
    """
    count = x.size // x.shape[dim] * size if x.size else 0
    return opaque_for_one(x, count) if jnp.issubdtype(x.dtype, jnp.integer) else x


def opaque_for_one(x: Any, count: int) -> Any:
    """The same for ``count`` elements of an array of any type that are read and written."""
    return lax.optimization_barrier(x) if count == 1 else x


def with_initial(folded: Any, initial: Any, combine: Callable[[Any, Any], Any], counts: Any) -> Any:
    """What was folded from an identity, with an initial value where it ``counts``.

    Folded in, XLA drops an initial value where a part has one element, as if it were an identity.
    """
    return jnp.where(counts, combine(folded, jnp.broadcast_to(initial, folded.shape)), folded)


def taken(x: Any, index: Any, axis: int) -> Any:
    """The elements at some positions along a dimension, those outside moved to its ends.

    Of a single one XLA on CPU makes a slice, and one of what is a slice itself it does not move back.

    >>> taken(jnp.arange(4), jnp.array([-3, 2, 9]), 0)
    Array([0, 2, 3], dtype=int32)
    """
    if index.size == 1:
        index = jnp.clip(index, 0, max(0, x.shape[axis] - 1))
    return jnp.take(x, index, axis=axis, mode="clip")


def update_window(
    x: Any, start: Sequence[Any], sizes: Sequence[int], change: Callable[[Any], Any], applies: Any
) -> Any:
    """Changes a window that lies inside of an array, if that ``applies``; else writes what is there already.

    XLA reads another element than it should where a scatter's single index is out of range and meets a slice.
    """
    if any(size > n for size, n in zip(sizes, x.shape, strict=True)):
        return x  # no window lies inside
    there = lax.dynamic_slice(x, start, sizes)
    return lax.dynamic_update_slice(x, jnp.where(applies, change(there), there), start)


def row_major(transform: Callable[[Any], Any], x: Any) -> Any:
    """A transform between arrays that are in memory row by row.

    XLA on CPU asks for such arrays when it runs, but lets a neighbour that likes another order (a gather along the last
    dimension) choose when it compiles: "RET_CHECK failure (fft_thunk.cc) LayoutUtil::IsMonotonicWithDim0Major".
    """
    y = transform(with_layout_constraint(x, Layout(tuple(range(x.ndim)))))
    return with_layout_constraint(y, Layout(tuple(range(y.ndim))))


def all_to_all(x: Any, atoms: Sequence[str], split: int, joined: int) -> Any:
    """``lax.all_to_all`` in tiles: parts of one dimension go to the devices, theirs are joined along another.

    XLA on CPU takes an all-to-all apart, one operand for each device, in the order in memory that the array has. Then
    it finds that such an operand is what another all-to-all has received, takes that instead, in whatever order it is,
    and refuses operands of two orders: "HLO all-to-all has operands with different shapes". Only a transpose makes an
    order of its own there. On CPU a dimension of one in front is a reshape between, and every array lies row by row. It
    is put there when the program is lowered, so that programs are the same for all devices until then.
    """
    params = {"axis_name": tuple(atoms), "split_axis": split, "concat_axis": joined}
    return _all_to_all_p.bind(x, **params, axis_index_groups=None, tiled=True)


def all_gather(x: Any, atoms: Sequence[str], dim: int) -> Any:
    """``lax.all_gather`` in tiles along a dimension.

    XLA for CPU converts bfloat16 to float32, and floats of 8 bits to float16, before each collective, and back after
    it: twice the bytes, and two more kernels. So collectives that only move elements move integers of the same width
    there. This is part of the lowering for CPU, so that programs are the same for all devices until then.
    """
    atoms = tuple(atoms)
    params = {"all_gather_dimension": dim, "axis_name": atoms, "axis_index_groups": None, "tiled": True}
    return _all_gather_p.bind(x, **params, axis_size=lax.axis_size(atoms))


def ppermute(x: Any, atoms: Sequence[str], pairs: Sequence[tuple[int, int]]) -> Any:
    """``lax.ppermute``, on CPU as integers of the same width (``all_gather``)."""
    return _ppermute_p.bind(x, axis_name=tuple(atoms), perm=tuple(map(tuple, pairs)))


def _with_one_in_front(x: Any, *, split_axis: int, concat_axis: int, **params: Any) -> Any:
    longer = lax.reshape(x, (1, *x.shape))
    found = all_to_all_p.bind(longer, split_axis=split_axis + 1, concat_axis=concat_axis + 1, **params)
    return lax.reshape(found, found.shape[1:])


def _moved_as_integers(move: Callable[..., Any]) -> Callable[..., Any]:
    """A collective that only moves elements; it moves floats that XLA for CPU would widen as integers."""

    def moved(x: Any, **params: Any) -> Any:
        if not _is_widened(x.dtype):
            return move(x, **params)
        return lax.bitcast_convert_type(move(lax.bitcast_convert_type(x, _bits(x.dtype)), **params), x.dtype)

    return moved


def _is_widened(dtype: Any) -> bool:
    """Whether XLA for CPU converts a dtype to a wider one for collectives; floats of 4 bits have no such integers."""
    return bool(jnp.issubdtype(dtype, jnp.floating) and dtype != jnp.float16 and jnp.finfo(dtype).bits in (8, 16))


def _like(of_jax: Any, on_cpu: Callable[..., Any]) -> Primitive:
    """A primitive with the name, type and lowering of one of JAX's, and with another lowering for CPU."""
    made = Primitive(of_jax.name)
    made.def_effectful_abstract_eval(of_jax.abstract_eval)
    mlir.register_lowering(made, mlir.lower_fun(of_jax.bind, multiple_results=False))
    mlir.register_lowering(made, mlir.lower_fun(_moved_as_integers(on_cpu), multiple_results=False), platform="cpu")
    return made


_all_to_all_p = _like(all_to_all_p, _with_one_in_front)
_all_gather_p = _like(all_gather_p, all_gather_p.bind)
_ppermute_p = _like(ppermute_p, ppermute_p.bind)


def _permuted_back(cotangent: Any, _: Any, *, axis_name: Sequence[str], perm: Sequence[tuple[int, int]]) -> list[Any]:
    return [ppermute(cotangent, axis_name, [(receiver, sender) for sender, receiver in perm])]


ad.deflinear2(_ppermute_p, _permuted_back)


def runnable(program: Any) -> Callable[..., Sequence[Any]]:
    """A closed jaxpr that holds one ``shard_map``, as a function to be compiled: no empty array enters ``shard_map``.

    Where all that it reads is empty, XLA drops the operands and misses them later: "'func.call' op expected at least
    one operand of @xla.sdy.manual_computation_body to be produced by a xla.sdy.GlobalToLocalShape".
    """
    outer = program.jaxpr
    (mapping,) = outer.eqns
    params, body, keys = mapping.params, mapping.params["jaxpr"], jax.dtypes.extended
    kept = [bool(v.aval.size) or jnp.issubdtype(v.aval.dtype, keys) for v in mapping.invars]
    if all(kept):
        return jaxpr_as_fun(program)  # type: ignore[no-any-return]

    def local(*parts: Any) -> Sequence[Any]:
        given = iter(parts)
        every = [next(given) if k else jnp.zeros(v.aval.shape, v.aval.dtype) for k, v in zip(kept, body.invars)]
        return jaxpr_as_fun(ClosedJaxpr(body, ()))(*every)  # type: ignore[no-any-return]

    in_specs = tuple(spec for k, spec in zip(kept, params["in_specs"], strict=True) if k)
    out_specs = list(params["out_specs"])
    mapped = jax.shard_map(local, mesh=params["mesh"], in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def run(*arrays: Any) -> list[Any]:
        return with_mapping(outer, lambda *xs: mapped(*itertools.compress(xs, kept)), (*program.consts, *arrays))

    return run


def _changed(x: Any, zero: Any) -> Any:
    bits = _bits(x.dtype)
    if not bits:
        return lax.optimization_barrier(x)
    if x.dtype == jnp.bool_:
        return x ^ (zero != 0)
    return lax.bitcast_convert_type(_as_bits(x) ^ zero.astype(bits), x.dtype)


def _as_bits(x: Any) -> Any:
    return x if x.dtype == jnp.bool_ else lax.bitcast_convert_type(x, _bits(x.dtype))


def _bits(dtype: Any) -> Any:
    """The unsigned type as wide as another; None for what has none, such as complex numbers and keys."""
    if dtype == jnp.bool_:
        return jnp.bool_
    if not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)) or dtype.itemsize > 4:
        return None
    return {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[dtype.itemsize]
