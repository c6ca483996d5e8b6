"""The timeline adds up to the modelled time, keeps order and loops, and is a trace that Perfetto reads."""

import json

import jax
import jax.numpy as jnp
import pytest

import gshard
from device.models import f32, model
from gshard.device.fusion_model import COLLECTIVE
from gshard.explanation.timeline import FIRST, ROUNDS, Event, thinned, timeline

MESH = gshard.Mesh.abstract(data=4, model=2)


def costed(f, *args):
    return gshard.explain(f, *args, mesh=MESH).cost("v3:2x2")


@pytest.mark.parametrize("name", ["gradient", "recurrent", "recomputed"])
def test_events_follow_each_other_and_end_with_the_call(name):
    f, args, _, _ = model(name)
    cost = costed(f, *args)
    laid = timeline(cost)
    at = 0.0
    for event in laid.kernels:
        assert event.start == pytest.approx(at)
        at += event.seconds
    assert at == pytest.approx(cost.seconds)
    runs = [sum(e.kernel == i for e in laid.kernels) for i in range(len(cost.kernels))]
    assert runs == [k.times for k in cost.kernels], "short loops are drawn round by round"


def test_a_loop_spans_its_rounds():
    f, args, _, _ = model("recurrent")
    laid = timeline(costed(f, *args))
    assert [loop.name.split()[:2] for loop in laid.loops] == [["scan", "x8"], ["scan", "x8"]]
    for loop in laid.loops:
        inside = [e for e in laid.kernels if loop.start <= e.start < loop.start + loop.seconds and e.depth]
        assert sum(e.seconds for e in inside) == pytest.approx(loop.seconds)


@pytest.mark.parametrize("rounds", [ROUNDS * 4, 7])
def test_of_a_long_loop_the_first_rounds_are_drawn(rounds):
    def f(x):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ x), None), gshard.split(x, 0, "data"), None, rounds)[0]

    cost = costed(f, f32(16, 16))
    laid = timeline(cost)
    rest = [e for e in laid.kernels if e.kernel < 0]
    assert len(rest) == (rounds > ROUNDS)
    assert len(laid.kernels) <= ROUNDS + 20
    assert sum(e.seconds for e in laid.kernels) == pytest.approx(cost.seconds)
    if rest:
        drawn = rounds - int(rest[0].name.split()[0])
        assert FIRST <= drawn < rounds


def test_loops_in_loops_end_where_they_should():
    def inner(x, _):
        return jnp.tanh(x @ x), None

    def outer(x, _):
        return jax.lax.scan(inner, x, None, 5)[0], None

    cost = costed(lambda x: jax.lax.scan(outer, gshard.split(x, 0, "data"), None, 3)[0], f32(16, 16))
    laid = timeline(cost)
    assert [loop.depth for loop in laid.loops] == [0, 1, 1, 1]
    assert laid.loops[0].seconds >= sum(loop.seconds for loop in laid.loops[1:])
    assert sum(e.seconds for e in laid.kernels) == pytest.approx(cost.seconds)


def test_thinning_keeps_time_and_counts():
    events = [Event(float(i), 1.0, i, f"e{i}") for i in range(1000)]
    events.append(Event(1000.0, 500.0, 1000, "long"))
    kept = list(thinned(events, 100))
    assert len(kept) <= 110
    assert sum(count for _, count in kept) == len(events)
    assert sum(e.seconds for e, _ in kept) == pytest.approx(1500.0)
    assert kept[-1] == (events[-1], 1), "what is long stays alone"
    assert [e for e, _ in thinned(events, 10_000)] == events
    assert list(thinned([], 10)) == []


def test_thinning_joins_nothing_across_a_gap():
    """As in the lane of the network, where events begin when something is sent."""
    events = [Event(at, 1e-4, i, "x") for i, at in enumerate([*(1e-4 * k for k in range(99)), 50.0, 99.9999])]
    kept = list(thinned(events, 10))
    assert sum(count for _, count in kept) == len(events)
    assert [(e.start, count) for e, count in kept] == [(0.0, 99), (50.0, 1), (99.9999, 1)]
    assert sum(e.seconds for e, _ in kept) == pytest.approx(101 * 1e-4)


def test_the_trace_is_one_that_perfetto_reads(tmp_path):
    f, args, axes, _ = model("attention")
    found = gshard.explain(f, *args, mesh=gshard.Mesh.abstract(**axes))
    read = json.loads(found.trace(tmp_path / "trace.json", "v3:2x2").read_text())
    rows = read["traceEvents"]
    tracks = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    assert tracks == {0: "loops", 1: "compute", 2: "network"}
    runs = [row for row in rows if row["ph"] == "X"]
    assert {row["ph"] for row in rows} == {"M", "X"}
    assert all(row["ts"] >= 0 and row["dur"] >= 0 for row in runs)
    cost = found.cost("v3:2x2")
    network = sum(row["dur"] for row in runs if row["tid"] == 2) / 1e6
    assert network == pytest.approx(sum(k.total_seconds for k in cost.kernels if k.kind == COLLECTIVE))
    assert sum(row["dur"] for row in runs if row["tid"]) / 1e6 == pytest.approx(cost.seconds)
    assert sum(row["args"].get("bytes sent", 0) for row in runs) == found.total_bytes
    assert all(row["args"]["line"].startswith("models.py:") for row in runs if row["tid"] == 2)
