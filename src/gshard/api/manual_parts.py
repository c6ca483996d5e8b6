"""Mixed manual and automatic partitioning (GShard paper, section 3.2).

    x = gshard.auto_to_manual(x, 0, 8)       # f32[G, S, M] -> f32[G / 8, S, M]: this device's part
    y = local_gather(x, indices)             # runs on each part unchanged
    y = gshard.manual_to_auto(y, 0, 8)       # f32[G / 8, C, M] -> f32[G, C, M]

Between the two a value stands for what one device holds, and nothing is partitioned or moved. ``manual`` does the same
for a whole function, and gives it a meaning without gshard too: each part by itself, by ``jax.vmap``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from gshard.api.marks import split
from gshard.core.errors import ShardingError
from gshard.core.jax_adapter import user_line

auto_to_manual_p = Primitive("auto_to_manual")
manual_to_auto_p = Primitive("manual_to_auto")
part_index_p = Primitive("part_index")


def auto_to_manual(x: Any, dim: int | None, num_partitions: int) -> Any:
    """From here on an array is one device's part of it.

    Args:
        x: array of any shape and dtype.
        dim: the dimension that is cut, or None to give every part the whole array.
        num_partitions: number of parts.

    Returns:
        the part: dimension ``dim`` has ``ceil(n / num_partitions)`` elements; an uneven one ends in zeros.
        The derivative of an array that every part has is the sum over the parts.

    Raises:
        ShardingError: there is no such dimension, or fewer than one part.
    """
    dim = _checked(x, dim, num_partitions)
    return auto_to_manual_p.bind(jnp.asarray(x), dim=dim, partitions=int(num_partitions))


def manual_to_auto(x: Any, dim: int | None, num_partitions: int, size: int | None = None) -> Any:
    """From here on parts are one array again.

    Args:
        x: one device's part.
        dim: the dimension along which parts are laid side by side, or None for the sum of all parts.
        num_partitions: number of parts, as given to ``auto_to_manual``.
        size: elements of the whole dimension; the default is the part's times ``num_partitions``.

    Returns:
        the whole array.

    Raises:
        ShardingError: there is no such dimension, or ``size`` does not need parts of this size.
    """
    dim = _checked(x, dim, num_partitions)
    x = jnp.asarray(x)
    if dim is None:
        return manual_to_auto_p.bind(x, dim=None, partitions=int(num_partitions), size=0)
    size = x.shape[dim] * num_partitions if size is None else int(size)
    if -(-size // num_partitions) != x.shape[dim]:
        raise ShardingError(
            f"{num_partitions} parts of {x.shape[dim]} elements do not make {size}.",
            user_line(),
            f"part of shape {list(x.shape)}, dimension {dim}",
            f"A dimension of {size} has parts of {-(-size // num_partitions)}.",
        )
    return manual_to_auto_p.bind(x, dim=dim, partitions=int(num_partitions), size=size)


def part_index(num_partitions: int) -> Any:
    """The number of the part that a device works on, an int32 scalar, between ``auto_to_manual`` and back."""
    return part_index_p.bind(partitions=int(num_partitions))


def manual(
    f: Callable[..., Any] | None = None,
    *,
    num_partitions: int,
    in_dims: int | Sequence[int | None] | None = 0,
    out_dims: Any = 0,
    axis_name: str = "parts",
) -> Any:
    """A function that is run on each part of its arguments by itself.

    Args:
        f: a function of arrays (or pytrees of them); it sees parts. ``jax.lax`` collectives over ``axis_name`` talk
            between them.
        num_partitions: number of parts.
        in_dims: for each positional argument the dimension that is cut, or None to give every part all of it.
        out_dims: the dimension along which parts of the results are laid side by side; a pytree prefix.
        axis_name: a name for the parts.

    Returns:
        the function of whole arrays. Sizes must be multiples of ``num_partitions``. Without gshard it computes the
        same, on one device.

    >>> running = manual(jnp.cumsum, num_partitions=2)
    >>> running(jnp.arange(1, 7)).tolist()
    [1, 3, 6, 4, 9, 15]
    """
    if f is None:
        return functools.partial(
            manual, num_partitions=num_partitions, in_dims=in_dims, out_dims=out_dims, axis_name=axis_name
        )

    @functools.wraps(f)
    def parts(*args: Any) -> Any:
        dims = (in_dims,) * len(args) if in_dims is None or isinstance(in_dims, int) else tuple(in_dims)
        if len(dims) != len(args):
            raise ShardingError(
                f"in_dims has {len(dims)} entries for {len(args)} arguments.",
                user_line(),
                hint="Give one for each positional argument.",
            )
        cut = [
            x if d is None else jax.tree.map(functools.partial(_into_parts, dim=d, parts=num_partitions), x)
            for x, d in zip(args, dims, strict=True)
        ]
        out = jax.vmap(f, in_axes=dims, out_axes=out_dims, axis_name=axis_name, axis_size=num_partitions)(*cut)
        leaves, tree = jax.tree.flatten(out)
        along = jax.tree.leaves(jax.tree.broadcast(out_dims, out))
        return jax.tree.unflatten(tree, [_from_parts(x, d, num_partitions) for x, d in zip(leaves, along, strict=True)])

    return parts


def _into_parts(x: Any, dim: int, parts: int) -> Any:
    shape = jnp.shape(x)
    if not 0 <= dim < len(shape) or shape[dim] % parts:
        raise ShardingError(
            f"dimension {dim} cannot be cut into {parts} equal parts.",
            user_line(),
            f"array of shape {list(shape)}",
            "Pad the array, or choose another number of partitions.",
        )
    return split(jnp.reshape(x, (*shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :])), dim, parts)


def _from_parts(x: Any, dim: int, parts: int) -> Any:
    x = split(x, dim, parts)
    return jnp.reshape(x, (*x.shape[:dim], parts * x.shape[dim + 1], *x.shape[dim + 2 :]))


def _checked(x: Any, dim: int | None, partitions: int) -> int | None:
    ndim = jnp.ndim(x)
    if partitions < 1 or (dim is not None and not -ndim <= dim < ndim):
        raise ShardingError(
            f"an array of rank {ndim} has no dimension {dim}." if partitions >= 1 else f"{partitions} parts are none.",
            user_line(),
            f"array of shape {list(jnp.shape(x))}",
            "Name a dimension from 0 on, and at least one part.",
        )
    return None if dim is None else dim % ndim


# -- the primitives --------------------------------------------------------------------------------------------------


@auto_to_manual_p.def_abstract_eval
def _part(x: Any, *, dim: int | None, partitions: int) -> Any:
    if dim is None:
        return x.update(weak_type=False)
    return x.update(shape=(*x.shape[:dim], -(-x.shape[dim] // partitions), *x.shape[dim + 1 :]), weak_type=False)


@manual_to_auto_p.def_abstract_eval
def _whole(x: Any, *, dim: int | None, partitions: int, size: int) -> Any:
    return x.update(shape=x.shape if dim is None else (*x.shape[:dim], size, *x.shape[dim + 1 :]), weak_type=False)


@part_index_p.def_abstract_eval
def _index(*, partitions: int) -> Any:
    return jax.core.ShapedArray((), jnp.int32)


def _turn_part(ct: Any, x: Any, *, dim: int | None, partitions: int) -> list[Any]:
    size = 0 if dim is None else x.aval.shape[dim]
    return [manual_to_auto_p.bind(ct, dim=dim, partitions=partitions, size=size)]


def _turn_whole(ct: Any, x: Any, *, dim: int | None, partitions: int, size: int) -> list[Any]:
    return [auto_to_manual_p.bind(ct, dim=dim, partitions=partitions)]


ad.deflinear2(auto_to_manual_p, _turn_part)
ad.deflinear2(manual_to_auto_p, _turn_whole)


def _batched(primitive: Primitive) -> Callable[..., tuple[Any, int]]:
    def batch(args: Sequence[Any], dims: Sequence[int], *, dim: int | None, **params: Any) -> tuple[Any, int]:
        x = jnp.moveaxis(args[0], dims[0], 0)
        return primitive.bind(x, dim=None if dim is None else dim + 1, **params), 0

    return batch


def _outside(primitive: Primitive) -> Callable[..., Any]:
    """What happens without gshard: one part is the whole, more have no meaning."""

    def run(*args: Any, partitions: int, **params: Any) -> Any:
        if partitions != 1:
            raise ShardingError(
                f"{primitive.name} with {partitions} parts has no meaning outside of gshard.jit.",
                user_line(),
                hint="Run the function by gshard.jit, or write it with gshard.manual, which runs anywhere.",
            )
        return args[0] if args else jnp.zeros((), jnp.int32)

    return run


for _primitive in (auto_to_manual_p, manual_to_auto_p, part_index_p):
    _primitive.def_impl(_outside(_primitive))
    mlir.register_lowering(_primitive, mlir.lower_fun(_outside(_primitive), multiple_results=False))
for _primitive in (auto_to_manual_p, manual_to_auto_p):
    batching.primitive_batchers[_primitive] = _batched(_primitive)
