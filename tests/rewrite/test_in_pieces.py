"""The law: an equation of arrays in pieces computes what it computes of the whole, whatever lies outside of windows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from gshard.core.program import Value
from gshard.rewrite.piecewise import Piece, in_pieces, may_be_in_pieces, starts_of, touched, whole
from harness import rows
from sampled import sampled_rows

ROWS = {r.name: r for r in rows()}


def layouts(n):
    yield (Piece(n + 3, 0, n),)
    yield (Piece(n + 3, 2, n + 2),)
    if n > 1:
        yield Piece(1, 0, 1), Piece(n - 1, 0, n - 1)
        yield Piece(n - 1, 0, n - 1), Piece(1, 0, 1)
    if n > 3:
        yield Piece(2, 0, 2), Piece(n - 1, 1, n - 2), Piece(1, 0, 1)


def poisoned(x, rng):
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return rng.choice([np.nan, np.inf, -np.inf, 7.0], x.shape).astype(x.dtype)
    return rng.integers(0, 2, x.shape).astype(x.dtype)


def parts_of(x, dim, layout, rng):
    found = []
    for p, start in zip(layout, starts_of(layout), strict=True):
        frame = poisoned(np.zeros((*x.shape[:dim], p.size, *x.shape[dim + 1 :]), x.dtype), rng)
        inner = (slice(None),) * dim
        frame[(*inner, slice(p.start, p.end))] = x[(*inner, slice(start, start + p.length))]
        found.append(jnp.asarray(frame))
    return found


def whole_of(parts, dim, layout):
    own = [lax.slice_in_dim(x, p.start, p.end, axis=dim) for x, p in zip(parts, layout, strict=True)]
    return np.asarray(lax.concatenate(own, dim))


def touches(e):
    for f in range(len(e.rule.factors)):
        t = touched(e, f)
        if t is not None and any(d is not None for d in (*t.operands, *t.results)):
            yield t


def run(e, operands):
    out = e.primitive.bind(*operands, **e.params)
    return list(out) if e.primitive.multiple_results else [out]


def operands_of(row, program, e):
    found = dict(zip(program.block.inputs, [*program.captured, *jax.tree.leaves(row.arguments)]))
    for q in program.block.equations:
        given = [found[x] if isinstance(x, Value) else x.value for x in q.inputs]
        if q is e:
            return given
        found.update(zip(q.outputs, run(q, given), strict=True))
    raise AssertionError(e.name)


@pytest.mark.parametrize("name", [r.name for r in sampled_rows(ROWS.values(), "in_pieces")])
@pytest.mark.one_in(5)
def test_an_equation_of_pieces_computes_the_whole(name, rng):
    check(ROWS[name], rng, most=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_an_equation_of_pieces_computes_the_whole_in_every_layout(name, rng):
    check(ROWS[name], rng, most=9)


def check(row, rng, most):
    program = row.program
    e = next((q for q in program.block.equations if q.name == row.primitive), None)
    if e is None or e.rule is None or e.mark is not None:
        pytest.skip("no equation without a body")
    operands = operands_of(row, program, e)
    for t in touches(e):
        size = e.rule.factors[t.factor].size
        every = list(layouts(size))
        for i in rng.permutation(len(every))[:most]:
            layout = every[i]
            sizes = [x.shape[d] for x, d in zip((*e.inputs, *e.outputs), (*t.operands, *t.results)) if d is not None]
            if any(n != size for n in sizes) or not may_be_in_pieces(t, layout):
                continue
            given = [
                jnp.asarray(x) if d is None else parts_of(np.asarray(x), d, layout, rng)
                for x, d in zip(operands, t.operands)
            ]
            expected = run(e, operands)
            found = in_pieces(t, layout)(given)
            for y, own, d in zip(expected, found, t.results, strict=True):
                is_same(own if d is None else whole_of(own, d, layout), y, row.tolerance, t)


def is_same(x, y, tolerance, t):
    x, y = np.asarray(x), np.asarray(y)
    assert (x.shape, x.dtype) == (y.shape, y.dtype), t
    summed = t.kind == "reduce" or "dot_general" in t.equation.name
    tolerance = max(tolerance, 1e-5) if summed else tolerance
    if jnp.issubdtype(x.dtype, jnp.inexact) and tolerance:
        np.testing.assert_allclose(x.astype(complex), y.astype(complex), tolerance, tolerance, err_msg=str(t.factor))
    else:
        np.testing.assert_array_equal(x, y)


NAMES = frozenset(
    """
    add argmax argmin broadcast_in_dim cumsum dot_general gather iota reduce_and reduce_max reduce_min reduce_or
    reduce_prod reduce_sum reshape scatter scatter-add scatter-max select_n sort transpose
    """.split()
)


def test_these_are_computed_in_pieces():
    seen = set()
    for row in ROWS.values():
        for e in row.program.block.equations:
            if e.name in NAMES and e.rule is not None:
                seen |= {e.name for t in touches(e) if may_be_in_pieces(t, whole(e.rule.factors[t.factor].size))}
    assert seen == NAMES
