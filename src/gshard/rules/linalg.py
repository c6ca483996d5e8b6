"""Linear algebra and Fourier transforms: leading dimensions are parallel, those that the operation mixes are whole."""

from __future__ import annotations

import math
from typing import Any

from gshard.comm.shards import Shards
from gshard.core.rule import Rule, RuleMaker, moves
from gshard.core.xla_workarounds import row_major
from gshard.language.passing import if_finite
from gshard.language.registry import Call, rule

_MATRIX = """
cholesky cholesky_update eig eigh hessenberg householder_product lu lu_pivots_to_permutation ormqr qr geqrf geqp3 schur
svd symmetric_product tridiagonal tridiagonal_solve triangular_solve
""".split()


@rule(*_MATRIX)
def of_matrices(call: Call) -> Rule:
    """As many leading dimensions are parallel as all operands and results share in front of a matrix or vector.

    A triangular solve treats the columns (or, from the right, the rows) of its second operand apart, a tridiagonal one
    the columns of its last: parallel too.

    >>> print(of_matrices(Call("qr", {}, ((3, 5, 4),), ((3, 5, 4), (3, 4, 4)), ("f4",))))
    a b c -> a d e, a f g; replicate b c d e f g
    """
    vectors = ("lu_pivots_to_permutation", "tridiagonal_solve", "cholesky_update")
    mixed = 1 if call.name in vectors[:2] else 2
    leading = len(call.in_shapes[0]) - mixed
    make = RuleMaker()
    shared = make.parallel(call.in_shapes[0][:leading])

    apart: dict[int, tuple[int, ...]] = {}
    solved = {"triangular_solve": 1, "tridiagonal_solve": 3}.get(call.name)
    if solved is not None:
        free = leading + (1 if call.params.get("left_side", True) else 0)
        apart = {free: make.factor(call.in_shapes[solved][free])}

    def tensor(shape: tuple[int, ...], own: dict[int, tuple[int, ...]]) -> list[tuple[int, ...]]:
        return [shared[d] if d < leading else own[d] if d in own else make.replicate(n) for d, n in enumerate(shape)]

    operands = [tensor(s, apart if i == solved else {}) for i, s in enumerate(call.in_shapes)]
    results = [tensor(s, apart) for s in call.out_shapes]
    flops = max(math.prod(s) * s[-1] for s in call.in_shapes if s)
    finite = [] if solved is None else if_finite(call.in_dtypes[solved], (solved,))  # linear in the right-hand sides
    return make.rule(operands, results, flops=flops, finite=finite)


@rule("fft")
def fft(call: Call) -> Rule:
    """The transformed dimensions, the last ones, are whole.

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
    """The transform between arrays that are in memory row by row on CPU; elsewhere XLA chooses."""
    if shards.mesh.devices is None or shards.mesh.devices[0].platform != "cpu":
        return shards.bind(x)
    return [row_major(lambda x: shards.bind(x)[0], x)]


@rule("layout_constraint")
def layout_constraint(call: Call) -> Rule:
    """The order of dimensions in memory is that of every part.

    >>> print(layout_constraint(Call("layout_constraint", {}, ((4, 6),), ((4, 6),), ("f4",))))
    a b -> a b
    """
    make = RuleMaker()
    dims = make.parallel(call.in_shapes[0])
    return make.rule([dims], [dims], linear=moves(0), passes=True)
