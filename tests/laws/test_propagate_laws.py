"""Propagation under random marks: it obeys every mark, uses an atom once, is settled, and never changes a value."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from gshard import shard
from gshard.core.mark import resolve
from gshard.core.mesh import Mesh
from gshard.emit.partition import partition
from gshard.planning.propagate import propagate
from gshard.testing import assert_proved
from gshard.testing.rule_checks import emitted, reported
from gshard.tracing.trace import trace
from harness import normal

MESH = Mesh.abstract(data=2, model=3)


def layers(mark, x, weights):
    def layer(carry, w):
        carry = jnp.tanh(mark(carry) @ mark(w))
        return carry, carry.max(0)

    return jax.lax.scan(layer, mark(x), weights)


def attention(mark, q, k, v):
    scores = mark(jnp.einsum("bhqd,bhkd->bhqk", mark(q), k))
    return mark(jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), mark(v)))


def classifier(mark, table, ids, w):
    h = mark(jnp.take(mark(table), mark(ids), axis=0)).mean(1)
    logits = mark(h @ mark(w))
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, :1] % 4, axis=1).mean()


def gating(mark, x, w):
    gates = jax.nn.softmax(mark(x) @ mark(w))
    best = jax.nn.one_hot(jnp.argmax(gates, -1), gates.shape[-1])
    place = jnp.cumsum(mark(best), axis=1) * best
    return mark(jnp.einsum("gse,gsm->egm", mark(best * (place < 3)), x)), place.sum((0, 1))


def branches(mark, x, i):
    out = jax.lax.cond(i > 0, lambda y: mark(y) * 2, lambda y: mark(y[::-1]), mark(x))
    total, _ = jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (mark(c[0]) + jnp.sin(c[0]), c[1] + 1), (out, 0))
    return total, mark(total.T).sum(0)


def noisy(mark, x, key):
    keep = jax.random.bernoulli(key, 0.7, x.shape)
    return mark(jnp.where(keep, mark(x), 0)).reshape(-1), jax.random.normal(key, (5, 4)) + x.sum()


def pictures(mark, x, k):
    y = jax.lax.conv_general_dilated(mark(x), k, (2, 1), "SAME")
    return mark(jnp.pad(mark(y), ((0, 0), (0, 0), (1, 2), (0, 1))))[:, :, 1:, ::2]


IDS = np.random.default_rng(1).integers(0, 9, (5, 3)).astype(np.int32)
PROGRAMS = {
    "layers": (layers, (normal(5, 6), normal(3, 6, 6))),
    "attention": (attention, (normal(3, 4, 5, 2), normal(3, 4, 7, 2), normal(3, 4, 7, 2))),
    "classifier": (classifier, (normal(9, 6), IDS, normal(6, 4))),
    "classifier, gradient": (
        lambda mark, t, i, w: jax.grad(lambda t, w: classifier(mark, t, i, w), (0, 1))(t, w),
        (normal(9, 6), IDS, normal(6, 4)),
    ),
    "gating": (gating, (normal(4, 7, 5), normal(5, 6))),
    "gating, gradient": (
        lambda mark, x, w: jax.grad(lambda x, w: (gating(mark, x, w)[0] ** 2).sum(), (0, 1))(x, w),
        (normal(4, 7, 5), normal(5, 6)),
    ),
    "branches": (branches, (normal(5, 7), np.int32(1))),
    "noisy": (noisy, (normal(6, 4), jax.random.key(2))),
    "pictures": (pictures, (normal(2, 3, 9, 7), normal(4, 3, 3, 3))),
}  # fmt: skip


def random_marks(seed):
    """Marks about half of what it is given, in random ways; never one mark on another."""
    drawn = random.Random(seed)

    def mark(x):
        entries = [None] * x.ndim
        for axis in drawn.sample(["data", "model"], drawn.randint(0, 2)):
            d = drawn.randrange(x.ndim)
            entries[d] = axis if entries[d] is None else (entries[d], axis)
        for d in range(x.ndim):
            if entries[d] is None and drawn.random() < 0.5:
                entries[d] = P.UNCONSTRAINED
        return shard(x, P(*entries)) if drawn.random() < 0.5 else x

    return mark


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(i, marks=pytest.mark.slow) for i in range(3, 23))])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.one_in(3)
def test_random_marks(name, seed):
    check(name, seed)


def test_marks_may_leave_no_plan_in_which_a_loop_holds_less():
    """Then it holds more, and the program is planned all the same."""
    check("branches", 3)


def check(name, seed):
    function, arguments = PROGRAMS[name]
    program = trace(lambda *a: function(random_marks(seed), *a), *arguments)
    plan = propagate(program, MESH)
    for e in program.block.walk():
        for v in e.outputs:
            atoms = [a for dim in plan.shardings[v].dims for a in dim]
            assert len(set(atoms)) == len(atoms)
            waiting = [a for a, _ in plan.shardings[v].unreduced]
            assert not set(waiting) & set(atoms)
            assert not waiting or (e.mark is None and v not in program.block.outputs)
        if e.mark is not None:
            demand = resolve(e.mark, MESH, e.outputs[0].shape, e.line)
            for wanted, is_open, got in zip(demand.dims, demand.open, plan.shardings[e.outputs[0]].dims, strict=True):
                assert is_open or got == wanted, f"{e.mark} at {e.line} was overridden"
    again = propagate(program, MESH)
    assert again.shardings == plan.shardings, "the same program gets the same plan"

    spmd = partition(plan)
    assert emitted(spmd.jaxpr, MESH.atom_sizes) == reported(spmd.collectives)
    assert_right(spmd, lambda *a: function(lambda x: x, *a), arguments)


def assert_right(spmd, f, arguments):
    """Proves that a per-device program computes what a function does."""
    run, captured = jax.extend.core.jaxpr_as_fun(spmd.jaxpr), spmd.program.captured
    assert_proved(lambda *a: run(*captured, *jax.tree.leaves(a)), arguments, like=lambda *a: jax.tree.leaves(f(*a)))


def test_unmarked_programs_are_left_alone():
    for function, arguments in PROGRAMS.values():
        lowered = gshard.jit(lambda *a, f=function: f(lambda x: x, *a), mesh=MESH).lower(*arguments)
        assert all(not s.atoms for s in lowered.plan.shardings.values())
        assert lowered.spmd.collectives == ()


def test_shardings_that_a_plan_found_are_kept_when_they_come_back_as_marks():
    """Feeding the arguments in as the plan wants them gives the same plan: it was settled."""

    def f(x, w):
        return jnp.tanh(shard(x, P("data", None)) @ w) @ shard(w, P(None, "model")).T

    x, w = normal(4, 6), normal(6, 6)
    first = gshard.jit(f, mesh=MESH).lower(x, w).plan
    specs = tuple(P(*(tuple(atoms) or None for atoms in first.shardings[v].dims)) for v in first.program.block.inputs)
    second = gshard.jit(f, mesh=MESH, in_shardings=specs).lower(x, w).plan
    for a, b in zip(first.program.block.walk(), second.program.block.walk(), strict=True):
        assert [first.shardings[v] for v in a.outputs] == [second.shardings[v] for v in b.outputs]


def test_arrays_may_disagree_beside_a_scalar():
    """A scalar has no dimension to disagree about; the others' disagreement is settled all the same."""

    def f(which, x, y):
        data_first, data_last = shard(x, P("data", P.UNCONSTRAINED)), shard(y, P(P.UNCONSTRAINED, "data"))
        return jax.lax.select_n(which, data_first, data_last)

    x = normal(4, 6)
    plan = propagate(trace(f, np.bool_(True), x, x), MESH)
    (result,) = plan.program.block.outputs
    assert plan.sharding(result).dims in [(("data",), ()), ((), ("data",))]
