"""A mark is proposed only where the program, planned again with it, sends less; written down, it does what was said."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from analysis.models import f32, model
from gshard.analysis.proposal import proposal, with_marks
from gshard.core.mark import Mark
from gshard.passes.propagate import propagate

MESH = gshard.Mesh.abstract(data=4, model=2)


def proposals(f, *args, mesh=MESH, tries=12):
    found = gshard.explain(f, *args, mesh=mesh)
    budget = iter(range(tries))
    rows = sorted(found.spmd.collectives, key=lambda c: -c.total_bytes)
    made = [proposal(c, found.plan, found.total_bytes, budget, found.marked) for c in rows]
    return found, [p for p in made if p is not None]


def layers(x, *weights):
    x = gshard.shard(x, P("data", None))
    for wi, wo in zip(weights[::2], weights[1::2], strict=True):
        x = x + jax.nn.relu(x @ gshard.shard(wi, P(None, "model"))) @ gshard.shard(wo, P("model", None))
    return jnp.mean(x * x)


LAYERS = (f32(2048, 256), *[f32(256, 1024), f32(1024, 256)] * 4)


def summed(x, w, mark=lambda x: x):
    """What is summed over devices comes to all of them whole, as long as nobody says how it is to lie."""
    return mark(gshard.split(x, 1, "data") @ w)


def test_a_proposal_written_down_does_what_it_says():
    arguments = f32(256, 1024), f32(1024, 256)
    found, made = proposals(summed, *arguments)
    first = made[0]
    assert first.before == found.total_bytes > first.after
    assert first.mark == "gshard.shard(x, P(('model', 'data'), None))"
    assert "test_proposal.py" in first.at

    def marked(x, w):
        return summed(x, w, mark=lambda h: gshard.shard(h, P(("model", "data"), None)))

    assert gshard.explain(marked, *arguments, mesh=MESH).total_bytes == first.after


def test_what_a_mark_would_spare_may_be_found_without_it():
    """All devices for the batch, as a mark on each layer would have it: less than sums over both axes."""
    assert proposals(layers, *LAYERS)[1] == []


@pytest.mark.parametrize("name", ["gradient", "recurrent", "vocabulary"])
def test_what_is_proposed_sends_less(name):
    f, args, axes, _ = model(name)
    found, made = proposals(f, *args, mesh=gshard.Mesh.abstract(**axes), tries=4)
    assert all(0 <= p.after < p.before == found.total_bytes for p in made)


def test_nothing_is_proposed_without_a_plan():
    assert proposals(layers, *LAYERS, tries=0)[1] == []


def test_a_value_that_is_marked_is_not_marked_again():
    found = gshard.explain(layers, *LAYERS, mesh=MESH)
    marked = next(e.outputs[0] for e in found.plan.program.block.walk() if e.mark is not None)
    assert with_marks(found.plan.program, {marked: Mark("replicate")}) is None


def test_a_mark_inside_a_loop_changes_the_plan_there():
    def f(ws, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), gshard.split(x, 0, "data"), ws)[0]

    program = gshard.jit(f, mesh=MESH).lower(np.ones((3, 16, 16), np.float32), np.ones((8, 16), np.float32)).program
    (product,) = [e for e in program.block.walk() if e.name == "dot_general"]
    marked = with_marks(program, {product.outputs[0]: Mark("replicate")})
    (again,) = [e for e in marked.block.walk() if e.mark is not None and e.inputs[0] is product.outputs[0]]
    plan = propagate(marked, MESH)
    assert plan.sharding(again.outputs[0]).dims == ((), ())


def left_over(params, x, mark=gshard.replicate):
    h = jax.nn.relu(gshard.split(x, 0, "data") @ params["up"])
    return jnp.mean((mark(h) @ params["down"]) ** 2)


TWO = {"up": f32(512, 2048), "down": f32(2048, 512)}, f32(4096, 512)


@pytest.mark.parametrize(
    "mark, other, change",
    [
        (gshard.replicate, lambda h: h, "no replicate(x) at"),
        (
            lambda h: gshard.shard(h, P(None, "model")),
            lambda h: gshard.shard(h, P(P.UNCONSTRAINED, "model")),
            "gshard.shard(x, P(P.UNCONSTRAINED, 'model')) instead of shard(x, P(None, 'model')) at",
        ),
    ],
)
def test_a_mark_that_asks_for_too_much(mark, other, change):
    """Its gradient has the same mark, which goes with it."""
    found = gshard.explain(jax.grad(lambda p, x: left_over(p, x, mark)), *TWO, mesh=MESH)
    best = found.verdict("h100:1x8").proposal
    assert best.change.startswith(change)
    assert "test_proposal.py" in best.at
    without = gshard.explain(jax.grad(lambda p, x: left_over(p, x, other)), *TWO, mesh=MESH)
    assert best.before == found.total_bytes > best.after == without.total_bytes
    assert change in str(found.verdict("h100:1x8"))


def test_a_mark_that_costs_nothing_stays():
    found = gshard.explain(jax.grad(lambda p, x: left_over(p, x, lambda h: h)), *TWO, mesh=MESH)
    best = found.verdict("h100:1x8").proposal
    assert best is None or not best.instead


def test_no_mark_is_written_on_arrays_that_are_not_the_users():
    """The product is made in three dimensions; the user has it in two."""

    def flattened(x, w):
        return jnp.sum(jnp.tanh(gshard.split(x, 1, "data").reshape(-1, 256) @ gshard.split(w, 1, "model")), -1)

    program = gshard.trace(flattened, f32(8, 64, 256), f32(256, 512))
    made = [v for v in program.block.values() if v.made]
    assert {len(v.shape) for v in made} == {2, 3}
    assert all(with_marks(program, {v: Mark("replicate")}) is None for v in made)
    found = gshard.explain(flattened, f32(8, 64, 256), f32(256, 512), mesh=MESH)
    best = found.verdict("h100:1x8").proposal
    assert best is None or "P(" not in best.mark or best.at.startswith("the argument")
