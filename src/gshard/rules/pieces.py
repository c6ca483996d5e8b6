"""Pieces: a concatenation of slices as one equation, so that each element moves once.

Rotations (``jnp.roll``), shifts and borders that wrap around are written as slices that are joined again. Taken one by
one, the slices would be spread evenly over the devices and then spread evenly once more. Together they are an exchange:
part ``i`` of the result takes from each operand the window where its piece and the part overlap.

    concatenate(x[7:], x[:7]) of 8 elements over 4 parts      each part sends one element to its neighbour
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from gshard.comm.halo import Window
from gshard.comm.shards import Shards, rest_bytes
from gshard.core.mesh import Mesh
from gshard.core.program import Constant, Equation, Value
from gshard.core.rule import Rule, RuleMaker, moves
from gshard.core.split import Split
from gshard.rules.registry import Call, rule, rule_of
from gshard.rules.slicing import cut

pieces_p = Primitive("concatenate_slices")


@pieces_p.def_impl
def _run(*xs: Any, dimension: int, pieces: Sequence[tuple[int, int]]) -> Any:
    cuts = zip(xs, pieces, strict=True)
    return lax.concatenate([lax.slice_in_dim(x, start, end, axis=dimension) for x, (start, end) in cuts], dimension)


@pieces_p.def_abstract_eval
def _shape(*xs: Any, dimension: int, pieces: Sequence[tuple[int, int]]) -> Any:
    return jax.core.ShapedArray(
        tuple(sum(b - a for a, b in pieces) if d == dimension else n for d, n in enumerate(xs[0].shape)), xs[0].dtype
    )


mlir.register_lowering(pieces_p, mlir.lower_fun(_run, multiple_results=False))


@rule("concatenate_slices")
def concatenate_slices(call: Call) -> Rule:
    """
    >>> params = {"dimension": 0, "pieces": ((7, 8), (0, 7))}
    >>> print(concatenate_slices(Call("concatenate_slices", params, ((8, 2), (8, 2)), ((8, 2),), ("f", "f"))))
    a b, a b -> a b; exchange a
    """
    axis, pieces, (target,) = call.params["dimension"], call.params["pieces"], call.out_shapes
    make = RuleMaker()
    largest = max(target[axis], *(shape[axis] for shape in call.in_shapes))
    dims = [cut(call, make, largest) if d == axis else make.factor(n) for d, n in enumerate(target)]
    offsets = list(itertools.accumulate((limit - start for start, limit in pieces), initial=0))

    def window(k: int, parts: int) -> Window:
        """Result position ``r`` of piece ``k`` is element ``start + r - offset``; what follows it is not needed."""
        size = -(-target[axis] // parts)
        taking = -(-offsets[k + 1] // size) if size else 0
        return Window(pieces[k][1], pieces[k][0] - offsets[k], size, parts, size, taking=taking)

    def local(shards: Shards, *xs: Any) -> list[Any]:
        atoms = shards.atoms(dims[axis][0])
        if not atoms:
            return shards.bind(*xs)
        parts = shards.mesh.count(atoms)
        size = -(-target[axis] // parts)
        at = lax.axis_index(atoms) * size + lax.broadcasted_iota(jnp.int32, shards.out_shape(), axis)
        result = None
        for k, x in enumerate(xs):
            if offsets[k] == offsets[k + 1]:
                continue
            piece = shards.window(x, axis, atoms, window(k, parts), 0)
            result = piece if result is None else jnp.where(at >= offsets[k], piece, result)
        return [jnp.zeros(shards.out_shape(), xs[0].dtype) if result is None else result]

    def sends(mesh: Mesh, split: Split) -> int:
        parts = mesh.count(split.get(dims[axis][0], ()))
        if parts == 1:
            return 0
        total = 0
        for k, shape in enumerate(call.in_shapes):
            rest = rest_bytes(shape, call.in_dtypes[k], axis, dims, split, mesh)
            total += window(k, parts).bytes(-(-shape[axis] // parts), rest)
        return total

    linear = moves(*range(len(call.in_shapes)))
    return make.rule([dims for _ in call.in_shapes], [dims], local=local, sends=sends, linear=linear)


def join_slices(equations: Iterable[Equation], outputs: Sequence[Value | Constant]) -> list[Equation]:
    """The equations with concatenations of slices as one equation each; slices that nobody else reads are gone."""
    equations = list(equations)
    makers = {v: e for e in equations for v in e.outputs}
    joined = {e: new for e in equations if (new := _joined(e, makers)) is not None}
    if not joined:
        return equations
    freed = {makers[v] for e in joined for v in e.inputs if isinstance(v, Value)}
    kept = [joined.get(e, e) for e in equations]
    read = {v for e in kept for v in e.inputs if isinstance(v, Value)} | {v for v in outputs if isinstance(v, Value)}
    return [e for e in kept if e not in freed or any(v in read for v in e.outputs)]


def _joined(e: Equation, makers: dict[Value, Equation]) -> Equation | None:
    if e.name != "concatenate":
        return None
    axis = e.params["dimension"]
    sources, pieces = [], []
    for v in e.inputs:
        maker = makers.get(v) if isinstance(v, Value) else None
        if maker is None or maker.name != "slice" or not isinstance(maker.inputs[0], Value):
            return None
        (source,), p = maker.inputs, maker.params
        if any(n != 1 for n in p["strides"] or ()):
            return None
        bounds = list(zip(p["start_indices"], p["limit_indices"], strict=True))
        if any(b != (0, n) for d, (b, n) in enumerate(zip(bounds, source.shape, strict=True)) if d != axis):
            return None
        sources.append(source)
        pieces.append((int(bounds[axis][0]), int(bounds[axis][1])))
    params = {"dimension": axis, "pieces": tuple(pieces)}
    shapes, dtypes = tuple(x.shape for x in sources), tuple(x.dtype for x in sources)
    call = Call(pieces_p.name, params, shapes, tuple(v.shape for v in e.outputs), dtypes)
    return Equation(pieces_p, params, tuple(sources), e.outputs, rule_of(call), e.source_info)
