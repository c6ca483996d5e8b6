"""What is told of a plan that was found: alternatives and their prices, marks more and less, pages."""

import dataclasses

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from gshard.device.machine import Machine
from gshard.emit.partition import partition
from gshard.explanation.search_result import alternatives
from search.test_search import EIGHT, H100, RESIDUAL, free, shape, small, trained


def test_alternatives_are_priced_from_below():
    found = free()
    (row,) = found.why("weights[0][0]")
    assert row.startswith("weights/0/0: f32[2048,8192@devices]\n    instead f32[2048@devices,8192]: +0.0")
    told = float(row.split("+")[1].split(" ms")[0]) / 1e3
    given = ([(P("devices"), None)] + [None] * 2, None)
    other = gshard.jit(trained(False), mesh=EIGHT, in_shardings=given, donate_argnums=0)
    assert gshard.search(other, *RESIDUAL, machine=H100).bound - found.bound >= told * (1 - 1e-2)


def test_the_arguments_of_the_plan_are_in_shardings_of_jit():
    found = free()
    lowered = gshard.jit(trained(False), mesh=EIGHT, in_shardings=found.in_shardings).lower(*RESIDUAL)
    pairs = zip(found.plan.program.block.inputs, lowered.program.block.inputs, strict=True)
    assert all(found.plan.shardings[v].dims == lowered.plan.shardings[w].dims for v, w in pairs)


def test_one_mark_less_and_one_more():
    found = free()
    assert len(found.marks.marks) == 1
    worse = found.with_mark("weights[0][0]", P("devices", None))
    assert worse.plan.shardings[worse.plan.program.block.inputs[0]].dims == (found.mesh.atoms, ())
    assert worse.cost.seconds > found.cost.seconds
    assert found.with_mark("weights[0][0]", P(None, "devices")).cost.seconds == pytest.approx(found.cost.seconds)


@pytest.mark.parametrize(("ask", "message"), [
    (lambda found: found.with_mark("nobody", P()), "nothing is called 'nobody'"),
    (lambda found: found.with_mark("weights[0][0]", P("y")), "no axis"),
    (lambda found: found.with_mark("weights[0][0]", P("devices", None, None)),
     r"3 entries, and 'weights\[0\]\[0\]' names an array of 2 dimensions"),
    (lambda found: found.with_mark("weights[0][0]", "x"), r"(?s)'x' is no PartitionSpec.*Write P\('devices'\)"),
    (lambda found: found.why("weight/*/*"), r"Did you mean 'weights/\*/1'\?"),
    (lambda found: found.why(38), "38 is no text"),
])  # fmt: skip
def test_what_cannot_be_asked(ask, message):
    with pytest.raises((gshard.ArgumentError, gshard.ShardingError), match=message):
        ask(free())


def test_what_a_preset_found_is_said_in_marks_too():
    """Its own marks are not the user's: without any nothing is split."""
    mesh = gshard.Mesh.abstract(x=8)
    found = gshard.search(small, shape(64, 32), shape(65536, 64), mesh=mesh, machine="h100:1x8")
    preset = next(other for other in found.best.others if other.name == "data parallel")
    chosen = dataclasses.replace(found, best=dataclasses.replace(found.best, chosen=preset))
    assert preset.plan.program.argument_marks == (None, None)
    (mark,) = chosen.marks.marks
    assert mark.text == "gshard.shard(x, P('x', None))"
    assert chosen.marks.without > chosen.marks.seconds
    assert chosen.with_mark("w", P("x")).cost.seconds > 0


def test_what_insisting_costs_is_solved():
    mesh, machine = gshard.Mesh.abstract(x=8), Machine.of("v5e:2x4")
    found = gshard.search(trained(False), *RESIDUAL, mesh=mesh, machine=machine, donate_argnums=0)
    graph, solution, v = found.best.graph, found.best.solution, found.plan.program.block.inputs[0]
    rows = alternatives(graph, solution, v, found.plan.shardings[v])
    assert len(rows) == len(graph.states[graph.groups.of[v]]) - 1
    for seconds, sharding in rows:
        forced = found.with_mark("weights[0][0]", P("x") if "@x," in sharding else P())
        assert forced.best.predicted - found.best.predicted == pytest.approx(seconds, rel=1e-3)
    assert len(alternatives(graph, solution, v, found.plan.shardings[v], 1e-9)) == 1


def test_a_page_tells_of_the_search(tmp_path):
    found = gshard.search(small, shape(64, 64), shape(64, 64), mesh=gshard.Mesh.abstract(x=8), machine="h100:1x8")
    page = found.html(tmp_path / "plan.html").read_text()
    assert page.count("optimal for the simplified model") == 1
    assert "ms without further marks" not in page
    assert str(found.marks).splitlines()[0] in found.html(tmp_path / "plan.html").read_text()
    assert repr(found) == str(found)


def test_a_mark_may_ask_for_parts_of_sums():
    """Of y = x u v w over a split of the first sum: a finished y u is sent, an unreduced one is not."""

    def chain(x, u, v):
        x = gshard.split(x, 1, "x")
        h = jnp.dot(x, u)
        return jnp.dot(h, gshard.replicate(v))

    mesh = gshard.Mesh.abstract(x=8)
    found = gshard.search(chain, shape(1024, 1024), shape(1024, 1024), shape(1024, 8), mesh=mesh, machine="h100:1x8")
    (line,) = {e.line for e in found.plan.program.block.equations if e.outputs[0].shape == (1024, 1024) and not e.mark}
    where = line.split(" ")[0]
    finished, in_parts = (found.with_mark(where, spec).plan for spec in (P(), P(unreduced={"x"})))
    (marked,) = (e for e in in_parts.program.block.equations if e.mark and e.mark.unreduced)
    assert in_parts.sharding(marked.outputs[0]).unreduced == tuple((a, "add") for a in mesh.atoms)
    sent = [sum(c.total_bytes for c in partition(plan).collectives) for plan in (finished, in_parts)]
    assert sent == [7 * (1024 // 8) * 1024 * 4 + 7 * (1024 // 8) * (1024 // 8) * 4, 7 * 1024 * 8 * 4 // 8]
    with pytest.raises(gshard.ArgumentError, match="'u' is an argument"):
        found.with_mark("u", P(unreduced={"x"}))
    with pytest.raises(gshard.ShardingError, match="no axis 'z'"):
        found.with_mark(where, P(unreduced={"z"}))
