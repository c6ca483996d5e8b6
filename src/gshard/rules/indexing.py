"""Look-ups by index and their transposes: gather and the scatter family.

What splits:

    batching dimensions             parallel, shared by operand, indices and result
    window dimensions taken whole   parallel, shared by operand and result (or updates)
    dimensions of the indices       parallel for a gather; for a scatter that accumulates, a reduce factor: every
                                    device scatters its own updates and the results are combined
    dimensions that are indexed     whole
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from gshard.comm.shards import Shards, identity
from gshard.core.rule import REDUCE, Rule, RuleMaker
from gshard.rules.registry import Call, rule


@rule("gather")
def gather(call: Call) -> Rule:
    """
    >>> import jax
    >>> numbers = jax.lax.GatherDimensionNumbers((1,), (0,), (0,))
    >>> params = {"dimension_numbers": numbers, "slice_sizes": (1, 6)}
    >>> print(gather(Call("gather", params, ((10, 6), (4, 1)), ((4, 6),), ("f", "i"))))
    a b, c d -> c b; whole a d
    """
    numbers, slice_sizes = call.params["dimension_numbers"], call.params["slice_sizes"]
    operand_shape, indices_shape = call.in_shapes
    make = RuleMaker()
    batch = make.parallel(indices_shape[:-1])
    # Result dimensions that are not offsets are the indices' dimensions, in order.
    result: list[tuple[int, ...]] = [() for _ in call.out_shapes[0]]
    outside = [d for d in range(len(result)) if d not in numbers.offset_dims]
    for d, dim in zip(outside, batch, strict=True):
        result[d] = dim
    shared = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    offsets = iter(numbers.offset_dims)
    operand: list[tuple[int, ...]] = []
    for d, n in enumerate(operand_shape):
        if d in shared:
            operand.append(batch[shared[d]])
        elif d in numbers.collapsed_slice_dims:
            operand.append(make.whole(n))
        elif slice_sizes[d] == n:
            operand.append(make.factor(n))
            result[next(offsets)] = operand[-1]
        else:
            operand.append(make.whole(n))
            result[next(offsets)] = make.whole(slice_sizes[d])

    def local(shards: Shards, x: Any, indices: Any) -> list[Any]:
        sizes = tuple(x.shape[d] if size == n else size for d, (n, size) in enumerate(zip(operand_shape, slice_sizes)))
        return shards.bind(x, indices, slice_sizes=sizes)

    indices = [*batch, make.whole(indices_shape[-1])]
    return make.rule([operand, indices], [result], local=local, flops=0)


_MONOIDS = {"scatter-add": "add", "scatter-mul": "mul", "scatter-min": "min", "scatter-max": "max", "scatter": None}


@rule(*_MONOIDS)
def scatter(call: Call) -> Rule:
    """The transpose of ``gather``; updates that are split are scattered apart and combined.

    The operand itself must count once: all devices but the first along the split start from the monoid's identity.

    >>> import jax
    >>> numbers = jax.lax.ScatterDimensionNumbers((1,), (0,), (0,))
    >>> print(scatter(Call("scatter-add", {"dimension_numbers": numbers}, ((10, 6), (4, 1), (4, 6)), ((10, 6),), ())))
    a b, c d, c b -> a b; add over c=4; whole a d
    """
    numbers, monoid = call.params["dimension_numbers"], _MONOIDS[call.name]
    operand_shape, indices_shape, updates_shape = call.in_shapes
    batching = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    make = RuleMaker()
    batch: list[tuple[int, ...]] = []
    for d, n in enumerate(indices_shape[:-1]):
        if d in batching.values():
            batch.append(make.factor(n))
        else:
            batch.append(make.factor(n, REDUCE, monoid) if monoid else make.whole(n))
    updates: list[tuple[int, ...]] = [() for _ in updates_shape]
    outside = [d for d in range(len(updates)) if d not in numbers.update_window_dims]
    for d, dim in zip(outside, batch, strict=True):
        updates[d] = dim
    windows = iter(numbers.update_window_dims)
    operand: list[tuple[int, ...]] = []
    for d, n in enumerate(operand_shape):
        if d in batching:
            operand.append(batch[batching[d]])
        elif d in numbers.inserted_window_dims:
            operand.append(make.whole(n))
        else:
            at = next(windows)
            same = updates_shape[at] == n
            operand.append(make.factor(n) if same else make.whole(n))
            updates[at] = operand[-1] if same else make.whole(updates_shape[at])

    def local(shards: Shards, x: Any, indices: Any, changes: Any) -> list[Any]:
        atoms = shards.reduced_atoms()
        if atoms:
            assert monoid is not None
            x = jnp.where(shards.is_first(atoms), x, jnp.asarray(identity(monoid, x.dtype), x.dtype))
        return shards.bind(x, indices, changes)

    indices = [*batch, make.whole(indices_shape[-1])]
    return make.rule([operand, indices, updates], [operand], local=local, flops=0)
