"""Kernels of the user's (``pallas_call``): what ``vmap`` mapped them over is parallel, all else is theirs.

A kernel may do anything with its blocks and knows where in its grid it is, so its own dimensions are whole. Those that
``jax.vmap`` (and so ``gshard.manual``) added are steps of the grid that the kernel does not see: a device takes fewer.

    vmap(kernel)    grid (rows, *own), block i of an operand is its row i       a b -> a c; replicate b c
"""

from __future__ import annotations

from typing import Any

from gshard.comm.shards import Shards
from gshard.core.jax_adapter import closed
from gshard.core.rule import Rule, RuleMaker
from gshard.language.kernel_rule import kernel_rule
from gshard.language.registry import Call, rule


@rule("pallas_call")
def pallas_call(call: Call) -> Rule:
    """Mapped dimensions are parallel, all others whole, as are sizes of the grid and scalars, which come first.

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
    places = {g: _places(grid.block_mappings, g, first) for g in grid.vmapped_dims if isinstance(grid.grid[g], int)}
    make = RuleMaker()
    factors = {g: make.factor(grid.grid[g]) for g, found in places.items() if found is not None}
    of_dim = {place: factors[g] for g in factors for place in places[g] or ()}
    arrays = [
        [of_dim[i, d] if (i, d) in of_dim else make.replicate(n) for d, n in enumerate(shape)]
        for i, shape in enumerate((*call.in_shapes, *call.out_shapes))
    ]

    def local(shards: Shards, *parts: Any) -> list[Any]:
        count = len(call.in_shapes)
        shapes = [shards.in_shape(i) for i in range(count)]
        shapes += [shards.out_shape(i) for i in range(len(call.out_shapes))]
        steps = [shards.size(factors[g][0]) if g in factors else n for g, n in enumerate(grid.grid)]
        blocks = tuple(
            block.replace(array_aval=block.array_aval.update(shape=shape))
            for block, shape in zip(grid.block_mappings, shapes[first:], strict=True)
        )
        made = tuple(x.update(shape=shape) for x, shape in zip(call.params["out_avals"], shapes[count:], strict=True))
        changed = grid.replace(grid=tuple(steps), block_mappings=blocks)
        return shards.bind(*parts, grid_mapping=changed, out_avals=made)

    return make.rule(arrays[: len(call.in_shapes)], arrays[len(call.in_shapes) :], local=local, known=bool(factors))


def _places(blocks: Any, g: int, first: int) -> set[tuple[int, int]] | None:
    """The dimensions (array, dimension) whose step is that of the grid along ``g``; None if it counts elsewhere too.

    Blocks are of all arrays but the ``first`` ones.
    """
    found = set()
    for i, block in enumerate(blocks, first):
        index, _ = closed(block.index_map_jaxpr)
        step = index.invars[g]
        if any(step is v for e in index.eqns for v in e.invars):
            return None
        at = [d for d, v in enumerate(index.outvars[: len(block.block_shape)]) if v is step]
        if any(type(block.block_shape[d]).__name__ != "Squeezed" for d in at):
            return None
        found |= {(i, d) for d in at}
    return found


@rule("gshard_kernel")
def gshard_kernel(call: Call) -> Rule:
    """A kernel of ``gshard.kernel`` is split as its plain function allows."""
    return kernel_rule(call)
