"""Smaller sizes of two programs: both run at these sizes, every equation as its shapes say, and agree."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gshard
import gshard.rules
from families import CASES
from gshard.core.jax_adapter import bind, called_jaxpr, closed, evaluate, jaxpr_without_dead_code, scan_counts
from gshard.exact.shrunk import elements_of, shrunk
from steps import TENSOR, TRUE_SIZES

SIZED = {"broadcast_in_dim": "shape", "reshape": "new_sizes", "iota": "shape", "empty": "shape"}
CUT = {"gather": "slice_sizes", "slice": "limit_indices"}  # parameters that may hold sizes of the operand
IDENTITIES = {"gshard_mark", "sharding_constraint", "reshard"}


def at(jaxpr, sizes, *arrays):
    """Runs a closed jaxpr at the smaller sizes, and compares all shapes with them."""
    body, consts = closed(jaxpr)

    def read(eqn, xs):
        xs = [x if (n := sizes.number(eqn, i)) is None else np.asarray(n, x.dtype) for i, x in enumerate(xs)]
        results = equation(eqn, sizes, xs)
        assert [np.shape(x) for x in results] == [sizes.shape(v) for v in eqn.outvars], eqn
        return results

    assert [np.shape(x) for x in arrays] == [sizes.shape(v) for v in body.invars]
    literal = lambda v: np.asarray(v.val, v.aval.dtype)  # noqa: E731
    return evaluate(body, [sizes.cut(c, v) for c, v in zip(consts, body.constvars)], arrays, read, literal)


def equation(eqn, sizes, xs):
    name, p, called = eqn.primitive.name, dict(sizes.params(eqn)), called_jaxpr(eqn)
    run = lambda key, *xs: at(p[key], sizes, *xs)  # noqa: E731
    if called is not None:
        return at(called, sizes, *xs)
    if name == "scan":
        consts, carry = scan_counts(p)
        step = lambda c, x: (lambda out: (out[:carry], out[carry:]))(run("jaxpr", *xs[:consts], *c, *x))  # noqa: E731
        end, ys = lax.scan(step, xs[consts : consts + carry], xs[consts + carry :], sizes.length(eqn), p["reverse"])
        return [*end, *ys]
    if name == "while":
        n, first = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        go_on = lambda c: run("cond_jaxpr", *xs[:n], *c)[0]  # noqa: E731
        return lax.while_loop(go_on, lambda c: run("body_jaxpr", *xs[n:first], *c), xs[first:])
    if name == "cond":
        return lax.switch(xs[0].astype("int32"), [functools.partial(at, b, sizes) for b in p["branches"]], *xs[1:])
    if name == "shard_map":
        shape = tuple(p["mesh"].shape.values())
        mesh = jax.sharding.Mesh(np.array(jax.devices()[: math.prod(shape)]).reshape(shape), tuple(p["mesh"].shape))
        body, specs = functools.partial(run, "jaxpr"), {"in_specs": p["in_specs"], "out_specs": list(p["out_specs"])}
        return jax.shard_map(body, mesh=mesh, check_vma=False, **specs)(*xs)
    if name in IDENTITIES:
        return xs
    if name in SIZED:
        p[SIZED[name]] = sizes.shape(eqn.outvars[0])
    elif name in CUT:
        pairs = zip(p[CUT[name]], eqn.invars[0].aval.shape, xs[0].shape, strict=True)
        p[CUT[name]] = tuple(m if size == n else size for size, n, m in pairs)
    elif name == "dynamic_slice":
        return [lax.dynamic_slice(xs[0], xs[1:], sizes.shape(eqn.outvars[0]))]
    return bind(eqn.primitive, p, xs)


def programs(f, mesh, *args, marked=None):
    """The plain and the sharded program."""
    traced = jax.make_jaxpr(f)(*args), gshard.jit(marked or f, mesh=mesh).lower(*args).spmd.jaxpr
    return list(map(jaxpr_without_dead_code, traced))


def agree(plain, sharded, sizes, leaves):
    arrays = [sizes.cut(x, v) for x, v in zip(leaves, closed(plain)[0].invars, strict=True)]
    some, others = (jax.jit(functools.partial(at, jaxpr, sizes))(*arrays) for jaxpr in (plain, sharded))
    for a, b in zip(some, others, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * (1 + np.max(np.abs(a), initial=0)))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", CASES)
def test_both_programs_agree_at_the_smaller_sizes(name):
    case = CASES[name]
    plain, sharded = programs(case.function, case.jax_mesh, *case.arguments)
    agree(plain, sharded, shrunk(plain, sharded, most=0), jax.tree.leaves(case.arguments))


def test_a_large_training_step_becomes_small():
    step = dataclasses.replace(TRUE_SIZES["70B"], axes={"fsdp": 4, "tensor": 2}, rules=TENSOR)
    arguments = step.arguments()
    plain, sharded = programs(step.function(), step.mesh(), *arguments)
    sizes = shrunk(plain, sharded)
    assert elements_of(plain) > 2e14
    assert max(n for jaxpr in (plain, sharded) for v in closed(jaxpr)[0].invars for n in sizes.shape(v)) < 200
    assert sum(math.prod(sizes.shape(v)) for v in closed(plain)[0].invars) < 2e7
    assert any(note.startswith("80 -> ") and "iterations of the scan at model.py" in note for note in sizes.notes)
    inner = functools.partial(at, plain, sizes), functools.partial(at, sharded, sizes)
    shapes = [jax.ShapeDtypeStruct(sizes.shape(v), v.aval.dtype) for v in closed(plain)[0].invars]
    some, others = (jax.eval_shape(f, *shapes) for f in inner)  # compares the shapes of all equations
    assert list(map(str, some)) == list(map(str, others))


X = np.zeros((64, 96), np.float32)
WHOLE = {
    "elementwise": (lambda x: x + 1, (2, 3)),
    "causal": (lambda x: jnp.where(jnp.tril(jnp.ones((64, 64), bool)), x @ x.T, 0.0), (2, 3)),
    "window": (lambda x: jnp.where(jnp.arange(64)[:, None] < jnp.arange(64) + 9, x @ x.T, 0.0), (64, 2)),
    "compared with data": (lambda x: x * (jnp.arange(96) < x.astype(int)), (2, 96)),
    "rows at computed indices": (lambda x: x[x.sum(1).astype(int)], (64, 2)),
    "rows at indices": (lambda x, t: x[t], (2, 3)),
    "one hot": (lambda x, t: jax.nn.one_hot(t, 64) @ x, (2, 3)),
    "indices that are compared": (lambda x, t: x[t] * (t != 7)[:, None], (64, 2)),
    "indices as numbers": (lambda x, t: x[t] * t.astype(np.float32)[:, None], (64, 2)),
    "indices of two arrays": (lambda x, t: x[t] + x.T[t, :1], (64, 96)),
    "slice": (lambda x: x[:, :5], (2, 96)),
    "halves": (lambda x: jnp.concatenate([x[:, 48:], x[:, :48]], 1), (2, 6)),
    "quarters": (lambda x: jnp.pad(lax.split(x, (24, 72), 1)[1], ((0, 0), (24, 0))), (2, 12)),
    "some positions": (lambda x: x[:, :48] + jnp.arange(96.0)[48:], (2, 96)),
    "counts": (lambda x: jnp.where((x > 0).sum(1) > 7, 1.0, 0.0), (2, 96)),
    "scan": (lambda x: lax.scan(lambda c, r: (c + r, c), x[0] * 0, x)[1], (64, 2)),
    "random numbers": (lambda x: x + jax.random.normal(jax.random.key(0), x.shape), (64, 96)),
    "fixed number of rounds": (lambda x: lax.fori_loop(0, 9, lambda i, y: y * 2 + i, x), (2, 3)),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_depends_on_a_size_keeps_it(name):
    f, shape = WHOLE[name]
    (plain,) = map(jaxpr_without_dead_code, [jax.make_jaxpr(f)(X, *[np.arange(9)] * (f.__code__.co_argcount - 1))])
    assert shrunk(plain, plain, most=0).shape(plain.jaxpr.invars[0]) == shape


def test_small_programs_stay_as_they_are():
    plain = jax.make_jaxpr(lambda x: x + 1)(X)
    sizes = shrunk(plain, plain, most=4 * X.size)
    assert (sizes.notes, sizes.shape(plain.jaxpr.invars[0])) == ([], X.shape)
