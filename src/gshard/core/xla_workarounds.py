"""Works around bugs of XLA, which were all last observed in jaxlib 0.10.2.

``tests/core/test_xla_workarounds.py`` reproduces each bug. If a test there fails, its workaround can be removed.

    opaque_identity   CPU merges equal computations on both sides of a barrier            no issue
    opaque_for_slice  CPU: an integer slice of a product of a slice loses the factor      no issue
    with_initial      a reduction over one element drops its initial value                no issue
    taken             an index out of range reads elements beside a slice                 openxla/xla#49121
    update_window     an index out of range writes elements beside a slice                openxla/xla#49121
    row_major         CPU: an FFT beside a gather gets a layout that it refuses           no issue
    all_to_all        CPU: an all-to-all of an all-to-all may not compile                 no issue
    all_gather,       CPU: collectives that move elements convert bfloat16 to float32     no issue
    ppermute
    ragged_all_to_all CPU has none: "UNIMPLEMENTED: HLO opcode `ragged-all-to-all`"  no issue
    runnable          a shard_map that reads only empty arrays may not compile            no issue
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

from gshard.core.jax_adapter import all_gather_p, all_to_all_p, ppermute_p, ragged_all_to_all_p
from gshard.core.jax_adapter_retracing import with_mapping

# Whether XLA for CPU keeps barriers, as it does for other devices.
_KEEPS_BARRIERS = jax.__version_info__[:2] >= (0, 12)


def opaque_identity(arrays: Sequence[Any], late: Any) -> list[Any]:
    """Arrays with the same bits that XLA treats as different arrays, which depend on ``late``.

    XLA for GPU and TPU keeps ``optimization_barrier``. Up to jaxlib 0.11, XLA for CPU removes the barrier and then
    merges the computations on both sides. So gshard combines each array with a number that is always zero, which these
    versions of XLA cannot prove. Later versions can prove it, but keep the barrier.

    >>> opaque_identity([jnp.float32(-0.0), jnp.arange(2), jnp.bool_(True)], jnp.float32(7))
    [Array(-0., dtype=float32), Array([0, 1], dtype=int32), Array(True, dtype=bool)]
    """
    if _KEEPS_BARRIERS:
        return list(lax.optimization_barrier((*arrays, late))[:-1])
    first = late[(0,) * late.ndim] if late.size and _bits(late.dtype) else None
    seed = jnp.uint32(1) if first is None else _as_bits(first).astype(jnp.uint32)
    zero = seed & lax.rng_uniform(jnp.uint32(0), jnp.uint32(1), ())
    return [_changed(x, zero) for x in arrays]


def opaque_for_slice(x: Any, dim: int, size: int) -> Any:
    """Puts a barrier before a slice of ``size`` elements along ``dim``, if XLA would compute a wrong result.

    XLA on CPU loses the factor of ``dynamic_slice(dynamic_slice(x) * 3)`` if the result is one integer.
    """
    count = x.size // x.shape[dim] * size if x.size else 0
    return opaque_for_one(x, count) if jnp.issubdtype(x.dtype, jnp.integer) else x


def opaque_for_one(x: Any, count: int) -> Any:
    """Puts a barrier before an access to ``count`` elements of an array of any dtype, if ``count`` is one."""
    return lax.optimization_barrier(x) if count == 1 else x


def with_initial(folded: Any, initial: Any, combine: Callable[[Any, Any], Any], counts: Any) -> Any:
    """Combines the result of a reduction with an initial value where ``counts`` is true.

    XLA drops the initial value of a reduction over one element, so gshard reduces from the identity instead.
    """
    return jnp.where(counts, combine(folded, jnp.broadcast_to(initial, folded.shape)), folded)


def taken(x: Any, index: Any, axis: int) -> Any:
    """The elements at some positions along a dimension. Positions out of range are clipped.

    XLA on CPU converts a single index to a slice. If the operand is also a slice, XLA does not clip this index.

    >>> taken(jnp.arange(4), jnp.array([-3, 2, 9]), 0)
    Array([0, 2, 3], dtype=int32)
    """
    if index.size == 1:
        index = jnp.clip(index, 0, max(0, x.shape[axis] - 1))
    return jnp.take(x, index, axis=axis, mode="clip")


def update_window(
    x: Any, start: Sequence[Any], sizes: Sequence[int], change: Callable[[Any], Any], applies: Any
) -> Any:
    """Changes a window inside an array if ``applies`` is true; otherwise writes the present elements.

    XLA reads a wrong element if the single index of a scatter is out of range and the operand is a slice.
    """
    if any(size > n for size, n in zip(sizes, x.shape, strict=True)):
        return x  # no such window is inside the array
    present = lax.dynamic_slice(x, start, sizes)
    return lax.dynamic_update_slice(x, jnp.where(applies, change(present), present), start)


def row_major(transform: Callable[[Any], Any], x: Any) -> Any:
    """Applies a transform whose operand and result have row-major layout.

    The FFT of XLA on CPU requires this layout at run time. But the compiler may choose the layout that a neighbour
    prefers (a gather along the last dimension), and the FFT then fails: "RET_CHECK failure (fft_thunk.cc)
    LayoutUtil::IsMonotonicWithDim0Major".
    """
    y = transform(with_layout_constraint(x, Layout(tuple(range(x.ndim)))))
    return with_layout_constraint(y, Layout(tuple(range(y.ndim))))


def all_to_all(x: Any, atoms: Sequence[str], split: int, joined: int) -> Any:
    """``lax.all_to_all`` in tiles: splits one dimension over the devices and joins the received parts along another.

    XLA on CPU decomposes an all-to-all into one operand for each device, with the layout of the array. If such an
    operand is the result of another all-to-all, XLA uses this result directly, with its layout, and then refuses
    operands with two layouts: "HLO all-to-all has operands with different shapes". Only transposes cause such layouts.
    The lowering for CPU adds a leading dimension of one by a reshape, which forces a row-major layout. It is a part of
    the lowering, so the traced program is the same for all devices.
    """
    params = {"axis_name": tuple(atoms), "split_axis": split, "concat_axis": joined}
    return _all_to_all_p.bind(x, **params, axis_index_groups=None, tiled=True)


def all_gather(x: Any, atoms: Sequence[str], dim: int) -> Any:
    """``lax.all_gather`` in tiles along a dimension.

    XLA for CPU converts bfloat16 to float32, and floats of 8 bits to float16, before each collective, and back after
    it. This doubles the bytes and adds two kernels. So on CPU, collectives that only move elements move integers of the
    same width. This is a part of the lowering for CPU, so the traced program is the same for all devices.
    """
    atoms = tuple(atoms)
    params = {"all_gather_dimension": dim, "axis_name": atoms, "axis_index_groups": None, "tiled": True}
    return _all_gather_p.bind(x, **params, axis_size=lax.axis_size(atoms))


def ppermute(x: Any, atoms: Sequence[str], pairs: Sequence[tuple[int, int]]) -> Any:
    """``lax.ppermute``; on CPU it moves integers of the same width, like ``all_gather``."""
    return _ppermute_p.bind(x, axis_name=tuple(atoms), perm=tuple(map(tuple, pairs)))


def ragged_all_to_all(
    x: Any, output: Any, starts: Any, sizes: Any, targets: Any, received_sizes: Any, atoms: Sequence[str]
) -> Any:
    """``lax.ragged_all_to_all`` with one chunk for each receiver.

    XLA for CPU has none. There, each device gathers the operands of all devices and reads its chunks from them. This is
    a part of the lowering for CPU, so the traced program is the same for all devices.
    """
    operands = (x, output, starts, sizes, targets, received_sizes)
    return _ragged_all_to_all_p.bind(*operands, axis_name=tuple(atoms), axis_index_groups=None)


def _gathered_chunks(
    x: Any, output: Any, starts: Any, sizes: Any, targets: Any, _: Any, *, axis_name: Sequence[str], **params: Any
) -> Any:
    if not x.size or not output.size:
        return output
    index, count = lax.axis_index(axis_name), x.shape[0]
    rows = all_gather(x, axis_name, 0)
    table = all_gather(jnp.stack([starts, sizes, targets])[None], axis_name, 0)  # [sender, 3, receiver]
    starts, sizes, targets = lax.dynamic_index_in_dim(table, index, axis=2, keepdims=False).T
    offset = jnp.arange(output.shape[0], dtype=starts.dtype) - targets[:, None]  # [sender, row of the output]
    arrives = (offset >= 0) & (offset < sizes[:, None])
    sender = jnp.argmax(arrives, axis=0)
    position = jnp.take_along_axis(offset + starts[:, None], sender[None], axis=0)[0]
    read = taken(rows, sender.astype(position.dtype) * count + position, 0)
    return jnp.where(jnp.any(arrives, axis=0).reshape(-1, *(1,) * (output.ndim - 1)), read, output)


def _with_leading_dimension(x: Any, *, split_axis: int, concat_axis: int, **params: Any) -> Any:
    expanded = lax.reshape(x, (1, *x.shape))
    received = all_to_all_p.bind(expanded, split_axis=split_axis + 1, concat_axis=concat_axis + 1, **params)
    return lax.reshape(received, received.shape[1:])


def _moved_as_integers(move: Callable[..., Any]) -> Callable[..., Any]:
    """A collective that only moves elements, changed to move floats that XLA for CPU would widen as integers."""

    def moved(x: Any, **params: Any) -> Any:
        is_float = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype != jnp.float16
        if not is_float or jnp.finfo(x.dtype).bits not in (8, 16):  # XLA widens floats of 8 bits and bfloat16
            return move(x, **params)
        return lax.bitcast_convert_type(move(lax.bitcast_convert_type(x, _bits(x.dtype)), **params), x.dtype)

    return moved


def _like(jax_primitive: Any, on_cpu: Callable[..., Any]) -> Primitive:
    """A primitive with the name, types and lowering of a JAX primitive, and with another lowering for CPU."""
    primitive = Primitive(jax_primitive.name)
    primitive.def_effectful_abstract_eval(jax_primitive.abstract_eval)
    mlir.register_lowering(primitive, mlir.lower_fun(jax_primitive.bind, multiple_results=False))
    mlir.register_lowering(primitive, mlir.lower_fun(on_cpu, multiple_results=False), platform="cpu")
    return primitive


_all_to_all_p = _like(all_to_all_p, _moved_as_integers(_with_leading_dimension))
_all_gather_p = _like(all_gather_p, _moved_as_integers(all_gather_p.bind))
_ppermute_p = _like(ppermute_p, _moved_as_integers(ppermute_p.bind))
_ragged_all_to_all_p = _like(ragged_all_to_all_p, _gathered_chunks)


def _permuted_back(cotangent: Any, _: Any, *, axis_name: Sequence[str], perm: Sequence[tuple[int, int]]) -> list[Any]:
    return [ppermute(cotangent, axis_name, [(receiver, sender) for sender, receiver in perm])]


ad.deflinear2(_ppermute_p, _permuted_back)


def runnable(program: Any) -> Callable[..., Sequence[Any]]:
    """A closed jaxpr with one ``shard_map``, as a function to compile: no empty array enters the ``shard_map``.

    If all operands are empty, XLA removes them and then fails: "'func.call' op expected at least one operand of
    @xla.sdy.manual_computation_body to be produced by a xla.sdy.GlobalToLocalShape".
    """
    outer = program.jaxpr
    (mapping,) = outer.eqns
    params = mapping.params
    body = params["jaxpr"]
    keys = jax.dtypes.extended
    kept = [bool(v.aval.size) or jnp.issubdtype(v.aval.dtype, keys) for v in mapping.invars]
    if all(kept):
        return jaxpr_as_fun(program)  # type: ignore[no-any-return]

    def local(*parts: Any) -> Sequence[Any]:
        remaining = iter(parts)
        operands = [
            next(remaining) if is_kept else jnp.zeros(v.aval.shape, v.aval.dtype)
            for is_kept, v in zip(kept, body.invars)
        ]
        return jaxpr_as_fun(ClosedJaxpr(body, ()))(*operands)  # type: ignore[no-any-return]

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
    """The unsigned integer dtype of the same width; None for dtypes without one, such as complex numbers and keys."""
    if dtype == jnp.bool_:
        return jnp.bool_
    if not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)) or dtype.itemsize > 4:
        return None
    return {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[dtype.itemsize]
