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
from exact.faults import PROGRAMS
from families import CASES
from gshard.api import prove
from gshard.core.jax_adapter import closed, jaxpr_without_dead_code
from gshard.exact.interpreter import Interpreter
from gshard.exact.shrunk import elements_of, shrunk
from steps import TENSOR, TRUE_SIZES


@pytest.fixture
def all_shrink(monkeypatch):
    """Small programs shrink too, there is no second run at their own sizes, and all shapes are compared."""
    run = Interpreter._results

    def results(self, eqn, operands):
        found = run(self, eqn, operands)
        shapes = [(tuple(x.shape[1:]), self.sizes.shape(v)) for x, v in zip(found, eqn.outvars, strict=False)]
        assert type(self) is not Interpreter or all(a == b for a, b in shapes), eqn  # repairs try other shapes
        return found

    monkeypatch.setattr(Interpreter, "_results", results)
    monkeypatch.setattr(prove, "shrunk", functools.partial(shrunk, most=0))
    monkeypatch.setattr(prove, "_MOST_ELEMENTS", -1)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", CASES)
def test_both_programs_agree_at_the_smaller_sizes(name, all_shrink):
    case = CASES[name]
    proof = gshard.prove(gshard.jit(case.function, mesh=case.jax_mesh), *case.arguments)
    assert proof.verdict != "different", proof


@pytest.mark.one_in(6)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_faults_are_found_at_the_smaller_sizes(program, all_shrink):
    for fault in ["", *program.faults]:
        plain, sharded = program.versions(fault)
        verdict = gshard.prove(sharded, *program.arguments(), like=plain).verdict
        assert (verdict == "different") == bool(fault), fault


def test_a_large_training_step_becomes_small():
    step = dataclasses.replace(TRUE_SIZES["70B"], axes={"fsdp": 4, "tensor": 2}, rules=TENSOR)
    f, arguments = step.function(), step.arguments()
    traced = jax.make_jaxpr(f)(*arguments), gshard.jit(f, mesh=step.mesh()).lower(*arguments).spmd.jaxpr
    plain, sharded = map(jaxpr_without_dead_code, traced)
    sizes = shrunk(plain, sharded)
    assert elements_of(plain) > 2e14
    assert max(n for jaxpr in (plain, sharded) for v in closed(jaxpr)[0].invars for n in sizes.shape(v)) < 200
    assert sum(math.prod(sizes.shape(v)) for v in closed(plain)[0].invars) < 300_000
    assert any(note.startswith("80 -> ") and "iterations of the scan at model.py" in note for note in sizes.notes)


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
