"""What planning compared for a value: a cost is that of the best plan with the sharding, and the sum of its parts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from device.models import f32
from gshard.core.number_text import format_seconds
from gshard.explanation.value_costs import Causes
from gshard.planning.propagate import choose
from gshard.planning.settled import settled
from gshard.search.seconds import on_machine, seconds_on
from gshard.solver.solve import solve

GRID = gshard.Mesh.abstract(data=4, model=2)


def step(x, w, v):
    def loss(w):
        h = jnp.tanh(gshard.split(x, 0, "data") @ w)
        return jnp.sum((h @ gshard.split(v, 0, "model")) ** 2)

    return w - 0.1 * jax.grad(loss)(w)


def crossed(x, w):
    y = gshard.shard(x, P("data", None)) @ gshard.shard(w, P("data", None))
    return gshard.shard(y.T, P("model", None)), jnp.exp(y * 2.0).sum(0)


def stacked(x, ws):
    body = lambda x, w: (jnp.tanh(x @ w), x.sum(0))  # noqa: E731
    return jax.lax.scan(body, gshard.split(x, 0, "data"), gshard.split(ws, 2, "model"))


def windows(x, k):
    x = gshard.split(x, 2, "data")
    return sum(jax.lax.conv(x, k * i, (1, 1), "SAME") for i in (1, 2)) + x


PROGRAMS = {
    "step": (step, (f32(64, 32), f32(32, 128), f32(128, 16))),
    "crossed": (crossed, (f32(64, 32), f32(32, 48))),
    "stacked": (stacked, (f32(16, 32), f32(4, 32, 32))),
    "windows": (windows, (f32(2, 4, 16, 8), f32(4, 4, 3, 3))),
}


@functools.cache
def explained(name, machine=None):
    f, arguments = PROGRAMS[name]
    found = gshard.explain(f, *arguments, mesh=GRID, machine=machine)
    return found, found.choice()


def forced(choice, v, sharding):
    """The least cost with a sharding of a value, by another solver than the one that planning takes."""
    k, problem = choice.graph.groups.of[v], choice.graph.problem
    texts = [s.format(GRID, v.shape, v.dtype_name) for s in choice.graph.states[k]]
    costs = list(problem.costs)
    costs[k] = np.where([text == sharding for text in texts], costs[k], np.inf)
    return float(solve(dataclasses.replace(problem, costs=tuple(costs))).value)


@pytest.mark.parametrize(
    ("name", "machine"), [("step", None), ("step", "h100:1x8"), ("crossed", None), ("stacked", None)]
)
@pytest.mark.one_in(2)
def test_a_cost_is_that_of_the_best_plan_with_its_sharding_and_the_sum_of_its_parts(name, machine):
    found, choice = explained(name, machine)
    groups = set()
    compared = 0
    for row in found.tensors:
        if (group := choice.graph.groups.of[row.value]) in groups:
            continue
        groups.add(group)
        costs = found.costs(row.short or row.name)
        assert costs.counted.startswith("bytes sent" if machine is None else "time on h100:1x8")
        assert costs.counted.startswith(found.plan.counted)
        assert sum(own.chosen for own in costs.rows) == 1
        assert costs.chosen.cost == costs.rows[0].cost == pytest.approx(choice.cost)
        assert costs.chosen.sharding == choice.graph.states[group][choice.states[group]].format(
            GRID, row.value.shape, row.value.dtype_name
        )
        for own in costs.rows:
            if np.isfinite(own.cost):
                assert sum(part.cost for part in own.parts) == pytest.approx(own.cost, rel=1e-9)
                assert own.more == pytest.approx(own.cost - choice.cost)
                changed = sum(part.cost for part in own.changes)
                assert own.chosen or changed == pytest.approx(own.more, rel=1e-6, abs=1e-8 * choice.cost)
        for own in costs.rows[:4] if name != "stacked" else ():
            assert own.cost == pytest.approx(forced(choice, row.value, own.sharding), rel=1e-9)
            compared += 1
        for own in costs.rows[:4] if name == "stacked" else ():  # what a loop may hold besides can only cost more
            assert own.cost >= forced(choice, row.value, own.sharding) * (1 - 1e-9)
    assert compared > 8 or name == "stacked"


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.one_in(2)
def test_causes_add_up_to_what_states_cost(name, rng):
    f, arguments = PROGRAMS[name]
    machine = gshard.Machine.of("h100:1x8")
    choice = choose(settled(gshard.stages.trace(f, *arguments), on_machine(GRID, machine)), seconds_on(machine))
    causes = Causes(choice.graph)
    for _ in range(5):
        states = np.array([rng.integers(n) for n in choice.graph.problem.states])
        costs = causes.costs(states)
        assert sum(costs.values()) == pytest.approx(choice.graph.problem.value(states))
        for nodes, cost in list(costs.items())[:20]:
            assert causes.cause(nodes, states, cost).text


def test_causes_are_named_with_operations_moves_lines_and_marks():
    found, _ = explained("step")
    text = str(found.costs("%4"))
    assert "  * f32[64@data,128@model]" in text
    assert "result 0 of dot_general: all_gather over model at test_value_costs.py:" in text
    assert "chosen" in text
    assert len(text.splitlines()) < len(found.costs("%4").format(100).splitlines())
    (row,) = (row for row in found.collectives if row.array == "gradient of w")
    causes = [part.cause for part in found.costs("gradient of w").chosen.parts]
    assert f"{row.why}: {row.kind} over {row.axes} at {row.line}" in causes, "it is found by its name"
    assert found.why("gradient of w").startswith("%")
    marked = found.costs("%3")
    assert [row.chosen for row in marked.rows] == [True], "a mark leaves no choice"
    assert "marked split(x, 0, 'data') at test_value_costs.py:" in marked.notes[0]
    assert "the mark is kept" in marked.notes[0]
    assert "the marks decide how this argument comes" in str(found.costs("w"))


def test_values_of_one_sharding_group_are_named():
    found, choice = explained("crossed")
    group = next(own for own in choice.graph.groups.members if len(own) > 1)
    first, second = (next(row for row in found.tensors if row.value is v) for v in group[:2])
    costs = found.costs(first.name)
    assert second.name in next(note for note in costs.notes if note.startswith("one sharding with"))
    assert [row.sharding for row in costs.rows] == [row.sharding for row in found.costs(second.name).rows]


def test_equal_layers_are_compared_together():
    def net(ws, x):
        for w in ws:
            x = jax.nn.relu(x @ gshard.split(w, 1, "data"))
        return jnp.mean(x**2)

    mesh = gshard.Mesh.abstract(data=8)
    found = gshard.explain(jax.grad(net), [f32(64, 64)] * 6, f32(32, 64), mesh=mesh)
    choice = found.choice()
    node = next(
        k for k in range(len(choice.graph.states)) if len(choice.tied_to(k)) > 3 and len(choice.graph.states[k]) > 1
    )
    value = choice.graph.groups.members[node][0]
    costs = found.costs(next(row.name for row in found.tensors if row.value is value))
    assert f"{len(choice.tied_to(node))} equal layers were planned alike" in str(costs)
    assert all(row.cost >= choice.cost for row in costs.rows)


@pytest.mark.slow
def test_a_plan_by_bytes_that_is_as_fast_is_named():
    found, choice = explained("windows", "v5e:2x4")
    assert choice.objective.counted == "bytes sent"
    assert "the plan by bytes is as fast on v5e:2x4 as those by time" in str(found.costs("k"))


def test_what_nothing_was_compared_for():
    costs = gshard.explain(lambda x: x.sum(), f32(8, 4), mesh=GRID).costs("x")
    assert costs.rows == ()
    assert "no mark splits anything" in str(costs)
    found, _ = explained("step")
    with pytest.raises(gshard.ArgumentError, match=r"no tensor is called 'xx'[^$]*Did you mean 'x'"):
        found.costs("xx")
    f, arguments = PROGRAMS["step"]
    given = gshard.explain(gshard.jit(f, mesh=GRID, plan=found.plan), *arguments)
    with pytest.raises(gshard.ArgumentError, match="plan was given"):
        given.costs("w")


def test_a_searched_plan_has_the_costs_that_the_search_compared():
    f, arguments = PROGRAMS["step"]
    found = gshard.search(f, *arguments, mesh=GRID, machine="v5e:2x4", progress=False)
    explained = found.explain()
    assert found.best.chosen is found.best.searched
    costs = explained.costs("w")
    assert costs.counted == "time on v5e:2x4"
    assert len(costs.rows) > 1
    assert costs.chosen.cost == costs.rows[0].cost == pytest.approx(found.best.solution.value)
    assert costs.chosen.sharding == found.plan.format(found.plan.program.block.inputs[1])
    assert sum(part.cost for part in costs.rows[-1].parts) == pytest.approx(costs.rows[-1].cost)


# What another sharding would cost: priced as the program is that a user gets who writes the mark.
MESH = gshard.Mesh.abstract(data=4, model=2)


def trained(weights, x):
    def loss(weights):
        return jnp.mean((jax.nn.relu(gshard.split(x, 0, "data") @ weights[0]) @ weights[1]) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


ARGUMENTS = [f32(256, 1024), f32(1024, 256)], f32(2048, 256)


def test_each_row_is_the_program_with_that_mark():
    donating = gshard.jit(trained, mesh=MESH, donate_argnums=0)
    found = gshard.explain(donating, *ARGUMENTS)
    rows = {row.mark: row for row in found.instead("weights[0]", "h100:1x8")}
    assert len(rows) == 8, "two dimensions over one axis, the other, both, or not at all, but for what it is"
    assert [row.cost.seconds for row in rows.values()] == sorted(row.cost.seconds for row in rows.values())
    row = rows["gshard.shard(x, P(None, 'model'))"]
    by_hand = gshard.explain(
        gshard.jit(trained, mesh=MESH, donate_argnums=0, in_shardings=([P(None, "model"), None], None)), *ARGUMENTS
    )
    assert row.cost.seconds == by_hand.cost("h100:1x8").seconds
    assert row.cost.sent == by_hand.total_bytes
    assert row.seconds == row.cost.seconds - found.cost("h100:1x8").seconds
    assert f"{format_seconds(row.seconds, '+')} a call" in str(row)
    assert row.sharding == "f32[256,1024@model]"


def test_values_inside_can_be_asked_for_too_and_are_found_by_their_number_and_line():
    found = gshard.explain(trained, *ARGUMENTS, mesh=MESH)
    name = next(row.name for row in found.tensors if " max " in row.name)
    whole = next(row for row in found.instead(name, "h100:1x8") if row.mark == "gshard.replicate(x)")
    assert whole.cost.flops > found.cost("h100:1x8").flops
    assert found.why(name.split()[0]) == found.why(name)
    place = name.split(" at ")[1].split(" (")[0]
    assert found.why(place) == found.why(next(row.name for row in found.tensors if f" at {place} (" in row.name))
    marked = next(row.name for row in found.tensors if "gshard_mark" in row.name)
    assert found.instead(marked) == (), "what has a mark has no other way"
    for ask in (found.why, found.instead):
        with pytest.raises(gshard.ArgumentError, match=r"(?s)no tensor is called 'weights'.*'weights/0'"):
            ask("weights")
