"""The user's kernels (``pallas_call``): dimensions that ``jax.vmap`` added are parallel, others cannot be split.

A kernel may combine its blocks in any way and reads its position in the grid. Dimensions of ``jax.vmap`` are steps of
the grid that it does not see: ``vmap(kernel)`` over rows is ``a b -> a c; replicate b c``.
"""

from __future__ import annotations

from typing import Any

from gshard.comm.shards import Shards
from gshard.core.jax_adapter import closed
from gshard.core.rule import Rule, RuleMaker
from gshard.language.kernel_primitive import kernel_rule
from gshard.language.registry import Call, rule


@rule("pallas_call")
def pallas_call(call: Call) -> Rule:
    """Mapped dimensions are parallel. All others, and the leading operands without blocks, cannot be split.

    >>> import jax
    >>> from jax.experimental import pallas
    >>> row = jax.ShapeDtypeStruct((4,), "float32")
    >>> double = pallas.pallas_call(lambda x, y: y.__setitem__(..., 2 * x[...]), row)
    >>> (e,) = jax.make_jaxpr(jax.vmap(double))(jax.numpy.ones((6, 4))).eqns
    >>> print(pallas_call(Call("pallas_call", e.params, ((6, 4),), ((6, 4),), ("f4",))))
    a b -> a c; replicate b c
    """
    grid = call.params["grid_mapping"]
    first = grid.num_dynamic_grid_bounds + grid.num_index_operands  # operands without blocks
    make = RuleMaker()
    factors: dict[int, tuple[int, ...]] = {}  # by dimension of the grid
    mapped: dict[tuple[int, int], tuple[int, ...]] = {}  # by array and dimension
    for g in grid.vmapped_dims:
        dims = _mapped_dims(grid.block_mappings, g, first) if isinstance(grid.grid[g], int) else None
        if dims is not None:
            factors[g] = make.factor(grid.grid[g])
            mapped |= dict.fromkeys(dims, factors[g])
    arrays = [
        [mapped[i, d] if (i, d) in mapped else make.replicate(n) for d, n in enumerate(shape)]
        for i, shape in enumerate((*call.in_shapes, *call.out_shapes))
    ]

    def local(shards: Shards, *parts: Any) -> list[Any]:
        in_shapes = [shards.in_shape(i) for i in range(len(call.in_shapes))]
        out_shapes = [shards.out_shape(i) for i in range(len(call.out_shapes))]
        steps = [shards.size(factors[g][0]) if g in factors else n for g, n in enumerate(grid.grid)]
        blocks = tuple(
            block.replace(array_aval=block.array_aval.update(shape=shape))
            for block, shape in zip(grid.block_mappings, (*in_shapes, *out_shapes)[first:], strict=True)
        )
        out_avals = tuple(x.update(shape=shape) for x, shape in zip(call.params["out_avals"], out_shapes, strict=True))
        local_grid = grid.replace(grid=tuple(steps), block_mappings=blocks)
        return shards.bind(*parts, grid_mapping=local_grid, out_avals=out_avals)

    return make.rule(arrays[: len(call.in_shapes)], arrays[len(call.in_shapes) :], local=local, known=bool(factors))


def _mapped_dims(blocks: Any, g: int, first: int) -> set[tuple[int, int]] | None:
    """The dimensions whose index is the step of the grid along dimension ``g``."""
    mapped = set()
    for i, block in enumerate(blocks, first):
        index, _ = closed(block.index_map_jaxpr)
        step = index.invars[g]
        if any(step is v for e in index.eqns for v in e.invars):
            return None
        dims = [d for d, v in enumerate(index.outvars[: len(block.block_shape)]) if v is step]
        if any(type(block.block_shape[d]).__name__ != "Squeezed" for d in dims):
            return None
        mapped |= {(i, d) for d in dims}
    return mapped


@rule("gshard_kernel")
def gshard_kernel(call: Call) -> Rule:
    """A kernel of ``gshard.kernel`` has the splits of its plain function."""
    return kernel_rule(call)
