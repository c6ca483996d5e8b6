"""A mark is proposed only where the program, planned again with it, sends less; written down, it does what was said."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from device.models import f32
from gshard.core.mark import Mark
from gshard.explanation.trials import changes_of, trials
from gshard.planning.added_marks import with_marks
from gshard.planning.propagate import propagate

MESH = gshard.Mesh.abstract(data=4, model=2)


def rows_of(found):
    """The collectives of each row."""
    return [[one.source for one in row.moved] for row in found.collectives]


def tried(f, *args, mesh=MESH, seconds=math.inf, **options):
    found = gshard.explain(f, *args, mesh=mesh)
    rows = rows_of(found)
    return found, trials(rows, found.plan, found.source.marked, found.cost(), seconds=seconds, **options)


def proposals(f, *args, mesh=MESH):
    found, made = tried(f, *args, mesh=mesh)
    assert made.is_complete
    return found, sorted(made.found, key=lambda p: p.after)


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
    assert [p.at for p in made] == [first.at] * len(made)
    assert first.before == found.total_bytes > first.after
    assert first.mark == "gshard.shard(x, P(('model', 'data'), None))"
    assert "test_proposal.py" in first.at

    def marked(x, w):
        return summed(x, w, mark=lambda h: gshard.shard(h, P(("model", "data"), None)))

    assert gshard.explain(marked, *arguments, mesh=MESH).total_bytes == first.after


def test_what_a_mark_would_spare_may_be_found_without_it():
    assert proposals(layers, *LAYERS)[1] == []


def test_without_seconds_nothing_is_tried():
    found, made = tried(layers, *LAYERS, seconds=0)
    assert (made.tried, made.found, made.changes > 0) == (0, (), True)
    assert "0 of" in str(found.verdict("h100:1x8", seconds=0))


def test_a_change_that_takes_longer_than_there_is_time_for_is_not_tried():
    found = gshard.explain(layers, *LAYERS, mesh=MESH)
    assert 0 < found.source.planning_seconds < 10
    slow = dataclasses.replace(found, source=dataclasses.replace(found.source, planning_seconds=46.2))
    told = slow.verdict("h100:1x8")
    assert told.trials.tried == 0 < slow.verdict("h100:1x8", seconds=math.inf).trials.tried
    text = f"Tried none of {told.trials.changes} changes of marks: one takes about 46.2 s. With more seconds"
    assert text in str(told)


def test_a_value_that_is_marked_is_not_marked_again():
    program = gshard.explain(layers, *LAYERS, mesh=MESH).plan.program
    marked = next(e.outputs[0] for e in program.block.walk() if e.mark is not None)
    assert with_marks(program, {marked: Mark()}) is None


def test_a_mark_inside_a_loop_changes_the_plan_there():
    def f(ws, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), gshard.split(x, 0, "data"), ws)[0]

    program = gshard.jit(f, mesh=MESH).lower(np.ones((3, 16, 16), np.float32), np.ones((8, 16), np.float32)).program
    (product,) = [e for e in program.block.walk() if e.name == "dot_general"]
    marked = with_marks(program, {product.outputs[0]: Mark()})
    (again,) = [e for e in marked.block.walk() if e.mark is not None and e.inputs[0] is product.outputs[0]]
    plan = propagate(marked, MESH)
    assert plan.sharding(again.outputs[0]).dims == ((), ())


def left_over(params, x, mark=gshard.replicate):
    h = jax.nn.relu(gshard.split(x, 0, "data") @ params["up"])
    return jnp.mean((mark(h) @ params["down"]) ** 2)


TWO = {"up": f32(512, 2048), "down": f32(2048, 512)}, f32(4096, 512)


@pytest.mark.parametrize("mark, other, change", [
    (gshard.replicate, lambda h: h, "remove replicate(x) at"),
    (
        lambda h: gshard.shard(h, P(None, "model")), lambda h: gshard.shard(h, P(P.UNCONSTRAINED, "model")),
        "gshard.shard(x, P(P.UNCONSTRAINED, 'model')) instead of shard(x, P(None, 'model')) at"
    ),
])  # fmt: skip
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

    found = gshard.explain(flattened, f32(8, 64, 256), f32(256, 512), mesh=MESH)
    program = gshard.stages.trace(flattened, f32(8, 64, 256), f32(256, 512))
    made = [v for v in program.block.values() if v.made]
    assert {len(v.shape) for v in made} == {2, 3}
    assert all(with_marks(program, {v: Mark()}) is None for v in made)
    best = found.verdict("h100:1x8").proposal
    assert best is None or "P(" not in best.mark or best.at.startswith("the argument")


def deep(count, mark=gshard.replicate, statistics=lambda s: s):
    """A gradient through many layers: a mark that was left in the first, and sums over the batch that leave whole."""

    def loss(ws, x):
        made = []
        for i, w in enumerate(ws):
            made.append(statistics(x.T @ x))
            x = jax.nn.relu(x @ w)
            if i == 0:
                x = mark(x)
        return jnp.mean(x**2), made

    def step(ws, x):
        return jax.grad(loss, has_aux=True)(ws, gshard.split(x, 0, "data"))

    return step, [f32(512, 512)] * count, f32(4096, 512)


@pytest.mark.parametrize("count", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_a_mark_that_was_left_over_is_found_however_large_the_program(count):
    """It is there, so it is tried first: one more plan is enough."""
    mesh = gshard.Mesh.abstract(data=8)
    found, made = tried(*deep(count), mesh=mesh, seconds=1e-9)
    assert made.tried == 1 < made.changes
    (first,) = made.found
    assert first.change.startswith("remove replicate(x) at test_proposal.py:")
    without = gshard.explain(*deep(count, mark=lambda x: x), mesh=mesh)
    assert first.before == found.total_bytes > first.after == without.total_bytes
    text = str(found.verdict("h100:1x8", seconds=1e-9))
    assert first.change in text
    assert f"Tried 1 of {made.changes} changes of marks in " in text


def test_equal_layers_get_one_mark_together():
    mesh = gshard.Mesh.abstract(data=8)
    _, made = proposals(*deep(3, mark=lambda x: x), mesh=mesh)
    line = deep.__code__.co_firstlineno + 6
    at = f"the result of dot_general at test_proposal.py:{line} (deep.<locals>.loss), 3 times"
    (together,) = (p for p in made if p.at == at and p.mark == "gshard.shard(x, P('data', None))")
    step = deep(3, mark=lambda x: x, statistics=lambda s: gshard.shard(s, P("data", None)))
    marked = gshard.explain(*step, mesh=mesh)
    assert together.after == marked.total_bytes


def test_the_order_of_trials_does_not_depend_on_the_time():
    """A clock that counts how often it is read: with less time the first of the same trials are made."""
    step = deep(3)
    mesh = gshard.Mesh.abstract(data=8)
    _, complete = tried(*step, mesh=mesh, clock=itertools.count().__next__)
    for seconds in (1, 8):
        _, some = tried(*step, mesh=mesh, seconds=seconds, clock=itertools.count().__next__)
        assert 0 < some.tried < complete.tried == complete.changes
        assert list(some.found) == [p for p in complete.found if p in some.found]
        assert complete.found[: len(some.found)] == some.found
        assert f"Tried {some.tried} of {complete.changes}" in str(some)


def test_marks_that_are_there_come_first():
    """Then changes at which most bytes are at stake, and last what planning could have chosen without a mark."""
    found = gshard.explain(*deep(3), mesh=gshard.Mesh.abstract(data=8))
    changes = changes_of(rows_of(found), found.plan)
    assert changes[0].instead == "replicate(x)"
    turns = [(not c.instead, c.as_wanted) for c in changes]
    assert turns == sorted(turns)
    for turn in {*turns}:
        stake = [c.stake for c in changes if (not c.instead, c.as_wanted) == turn]
        assert stake == sorted(stake, reverse=True)
        assert stake[0] > 0


def test_a_result_that_leaves_whole_may_be_marked_as_it_is():
    """It is made split, and gathered where it leaves the program: the trial is what the mark of a user would do."""

    def step(p, x, mark=lambda w: w):
        g = jax.grad(left_over)(p, x)
        new = jax.tree.map(lambda w, g: w - 0.1 * g, p, g)
        return {**new, "down": mark(new["down"])}

    mesh = gshard.Mesh.abstract(data=8)
    found = gshard.explain(step, *TWO, mesh=mesh)
    rows = rows_of(found)
    border = [i for i, same in enumerate(rows) if same[0].why == "program result"]
    changes = {c.row: c for c in changes_of(rows, found.plan) if c.row in border and not c.as_wanted}
    assert list(changes) == border != []
    (down,) = (i for i in border if rows[i][0].value.shape == (2048, 512))
    change = changes[down]
    assert "the result of sub at test_proposal.py:" in change.at
    spec = P("data", None) if "P('data', None)" in change.mark else P(None, "data")
    marked = gshard.explain(lambda p, x: step(p, x, lambda w: gshard.shard(w, spec)), *TWO, mesh=mesh)
    again = found.source.marked(change.program())
    assert sum(c.total_bytes for c in again.collectives) == marked.total_bytes


def test_a_plan_for_a_machine_is_proven_for_the_machine():
    """What is proposed is planned as the program was."""
    mesh = gshard.Mesh.abstract(data=8)
    step, *arguments = deep(3)
    found = gshard.explain(gshard.jit(step, mesh=mesh, machine="h100:1x8"), *arguments)
    told = found.verdict("h100:1x8", seconds=math.inf)
    again = gshard.explain(gshard.jit(deep(3, mark=lambda x: x)[0], mesh=mesh, machine="h100:1x8"), *arguments)
    proposed = next(p for p in told.proposals if p and p.instead == "replicate(x)")
    assert proposed.after == again.total_bytes < proposed.before == found.total_bytes
    assert told.proposal.costs[1].seconds <= told.proposal.costs[0].seconds
