"""Linear algebra and Fourier transforms: leading dimensions are parallel; dimensions that are mixed cannot be split."""

from __future__ import annotations

import math
from typing import Any

from gshard.comm.shards import Shards
from gshard.core.rule import Rule, RuleMaker
from gshard.core.xla_workarounds import row_major
from gshard.language.registry import Call, rule
from gshard.language.traits import if_finite

_MATRIX = """
cholesky cholesky_update eig eigh hessenberg householder_product lu lu_pivots_to_permutation ormqr qr geqrf geqp3 schur
svd symmetric_product tridiagonal tridiagonal_solve triangular_solve
""".split()


@rule(*_MATRIX)
def of_matrices(call: Call) -> Rule:
    """The leading dimensions, in front of the matrix or vector, are parallel.

    A triangular solve is also parallel over the columns of its second operand (from the right, over the rows), and a
    tridiagonal solve over the columns of its last operand.

    >>> print(of_matrices(Call("qr", {}, ((3, 5, 4),), ((3, 5, 4), (3, 4, 4)), ("f4",))))
    a b c -> a d e, a f g; replicate b c d e f g
    """
    mixed = 1 if call.name in ("lu_pivots_to_permutation", "tridiagonal_solve") else 2
    leading = len(call.in_shapes[0]) - mixed
    make = RuleMaker()
    parallel = dict(enumerate(make.parallel(call.in_shapes[0][:leading])))
    right_side = {"triangular_solve": 1, "tridiagonal_solve": 3}.get(call.name)
    of_right_side = parallel
    finite = []
    if right_side is not None:
        free = leading + (1 if call.params.get("left_side", True) else 0)
        of_right_side = {**parallel, free: make.factor(call.in_shapes[right_side][free])}
        finite = if_finite(call.in_dtypes[right_side], (right_side,))  # a solve is linear in the right-hand sides

    def array(shape: tuple[int, ...], dims: dict[int, tuple[int, ...]]) -> list[tuple[int, ...]]:
        return [dims[d] if d in dims else make.replicate(n) for d, n in enumerate(shape)]

    operands = [array(s, of_right_side if i == right_side else parallel) for i, s in enumerate(call.in_shapes)]
    results = [array(s, of_right_side) for s in call.out_shapes]
    flops = max(math.prod(s) * s[-1] for s in call.in_shapes if s)
    return make.rule(operands, results, flops=flops, finite=finite)


@rule("fft")
def fft(call: Call) -> Rule:
    """The transformed dimensions (the last ones) cannot be split.

    >>> print(fft(Call("fft", {"fft_lengths": (6,)}, ((4, 6),), ((4, 6),), ("c8",))))
    a b -> a c; replicate b c
    """
    leading = len(call.in_shapes[0]) - len(call.params["fft_lengths"])
    make = RuleMaker()
    shared = make.parallel(call.in_shapes[0][:leading])
    operand, result = (
        [*shared, *(make.replicate(n) for n in shape[leading:])] for shape in (call.in_shapes[0], call.out_shapes[0])
    )
    return make.rule([operand], [result], local=_row_major, finite=if_finite(call.in_dtypes[0], (0,)))


def _row_major(shards: Shards, x: Any) -> list[Any]:
    """The transform of an array in row-major order on CPU. On other platforms XLA chooses the order."""
    if shards.mesh.devices is None or shards.mesh.devices[0].platform != "cpu":
        return shards.bind(x)
    return [row_major(lambda x: shards.bind(x)[0], x)]
