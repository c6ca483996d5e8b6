"""Batch dimensions of primitives without a rule: what their vmap rule proves, and what it does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.testing import check_rule
from gshard.tracing.trace import trace
from invented import invented_p, primitive_of

RNG = np.random.default_rng(8)
X = RNG.standard_normal((7, 5, 4)).astype(np.float32)
SQUARES = RNG.standard_normal((4, 4, 4)).astype(np.float32)


def leading(primitive):
    """The usual vmap rule: the primitive takes any number of batch dimensions in front."""

    def batched(args, dims, **params):
        size = next(x.shape[d] for x, d in zip(args, dims) if d is not None)
        moved = [
            jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims)
        ]
        return primitive().bind(*moved, **params), 0

    return batched


centred_p = primitive_of("centred", lambda x: x - x.mean((-2, -1), keepdims=True), leading(lambda: centred_p))
applied_p = primitive_of(
    "applied", lambda x, y: jnp.einsum("...ab,...b->...a", x, jnp.sin(y)), leading(lambda: applied_p)
)


def along(args, dims, *, axis):
    (x,), (d,) = args, dims
    return summed_p.bind(x, axis=axis + (axis >= d)), d


summed_p = primitive_of("summed", lambda x, axis: jnp.cumsum(x, axis), along)


def rule_of(f, *args):
    (equation,) = trace(f, *args).block.equations
    assert equation.rule is not None
    assert not equation.rule.known
    return equation.rule


@pytest.mark.parametrize(
    "f, args, rule",
    [
        (centred_p.bind, (X,), "a b c -> a d e; replicate b c d e"),
        (centred_p.bind, (X[None],), "a b c d -> a b e f; replicate c d e f"),
        (centred_p.bind, (RNG.standard_normal((3, 3, 3, 3)),), "a b c d -> a b e f; replicate c d e f"),
        (centred_p.bind, (SQUARES,), "a b c -> a d e; replicate b c d e"),
        (applied_p.bind, (X, X[:, 0]), "a b c, a d -> a e; replicate b c d e"),
        (applied_p.bind, (SQUARES, SQUARES[0]), "a b c, a d -> a e; replicate b c d e"),
        (lambda x: summed_p.bind(x, axis=1), (X,), "a b c -> a d c; replicate b d"),
        (lambda x: summed_p.bind(x, axis=0), (SQUARES,), "a b c -> d b c; replicate a d"),
        (invented_p.bind, (X,), "a b c -> d e f; replicate a b c d e f"),  # no vmap rule
    ],
)
def test_what_is_proven_is_true(f, args, rule):
    assert str(rule_of(f, *args)) == rule
    assert f == invented_p.bind or check_rule(f, *args, most=2)


def test_a_batch_stays_where_it_lies_and_nothing_is_reported():
    def f(x):
        return centred_p.bind(gshard.split(x, 0, 7)) * 2

    found = gshard.explain(f, X, mesh=7)
    assert (found.lists["gathered"], found.total_bytes) == ((), 0)
    jitted = gshard.jit(f, mesh=7, strict=True)
    assert "split a@devices; proven by its vmap rule" in str(jitted.lower(X).plan)
    np.testing.assert_allclose(jitted(X), 2 * centred_p.bind(X), rtol=1e-5, atol=1e-5)


def test_another_dimension_is_gathered_and_reported():
    def f(x):
        return centred_p.bind(gshard.shard(x, jax.P("a", "b")))

    mesh = gshard.Mesh.abstract(a=7, b=5)
    (text,) = gshard.explain(f, X, mesh=mesh).lists["gathered"]
    assert text.startswith("centred at test_batch.py:")
    assert "f32[7,5,4] (80 B on every device)" in text
    assert "no rule: gathered" in str(gshard.jit(f, mesh=mesh).lower(X).plan)
    with pytest.raises(gshard.PlanError, match="'centred' has no rule"):
        gshard.jit(f, mesh=mesh, strict=True).lower(X).plan  # noqa: B018


@pytest.mark.parametrize(
    "f, args",
    [(jax.lax.linalg.ormqr, (X, X[:, :4, 0], X)), (jax.random.clone, (jax.random.split(jax.random.key(0), 7),))],
)
def test_primitives_of_jaxs_own(f, args):
    (equation,) = trace(f, *args).block.equations
    assert equation.rule is not None
    assert "parallel" in {factor.kind for factor in equation.rule.factors}
    assert check_rule(f, *args)


def test_arrays_that_the_primitive_was_not_made_for_prove_nothing():
    """Its shape rule takes anything; what it would compute for a vector cannot be lowered."""
    meaning = lambda x: x - x.mean((-2, -1), keepdims=True)  # noqa: E731
    careless_p = primitive_of("careless", meaning, leading(lambda: careless_p))
    careless_p.def_abstract_eval(lambda x: x)
    assert str(rule_of(careless_p.bind, X[0])) == "a b -> c d; replicate a b c d"
    assert str(rule_of(careless_p.bind, X)) == "a b c -> a d e; replicate b c d e"


def test_a_vmap_rule_that_says_more_than_the_primitive_proves_nothing():
    meaning = lambda x: jnp.cumsum(x, 0)  # noqa: E731

    def transposed(args, dims):
        return jnp.moveaxis(turned_p.bind(jnp.moveaxis(args[0], dims[0], -1)), -1, 0), 0

    turned_p = primitive_of("turned", meaning, transposed)
    assert str(rule_of(turned_p.bind, X[0])) == "a b -> c d; replicate a b c d"

    def negated(args, dims):
        return -negated_p.bind(-jnp.moveaxis(args[0], dims[0], 0)), 0

    negated_p = primitive_of("negated", jnp.sin, negated)
    assert str(rule_of(negated_p.bind, X[0])) == "a b -> c d; replicate a b c d"

    def counted(args, dims, *, batches):
        return counted_p.bind(jnp.moveaxis(args[0], dims[0], 0), batches=batches + 1), 0

    counted_p = primitive_of("counted", lambda x, batches: x.sum(tuple(range(batches, x.ndim))), counted)
    assert str(rule_of(lambda x: counted_p.bind(x, batches=0), X)).startswith("a b c -> ()")
