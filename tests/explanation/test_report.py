"""The report: totals agree with the program's own, hostile names are text, and it is small; test_page opens it."""

import copy
import json
import linecache
import re
import types

import jax
import jax.numpy as jnp
import pytest

import gshard
from device.models import explained, f32, model
from gshard.device.cost import BOUNDS
from gshard.explanation.difference import DifferenceError, Figures, difference
from gshard.explanation.report.data import FIRST, ROUNDS, Event, thinned, timeline
from gshard.testing.rule_checks import emitted

MESH, FOUR = gshard.Mesh.abstract(data=4, model=2), gshard.Mesh.abstract(d=4)


@pytest.fixture(scope="module")
def attention():
    return explained("attention")


@pytest.fixture(scope="module")
def data(attention):
    return attention.data("v3:2x2", seconds=0)


def test_totals_are_those_of_the_emitted_program(attention, data):
    sent = sum(emitted(attention.spmd.jaxpr, attention.mesh.atom_sizes).values())
    assert data["totals"]["sent"] == sum(c["bytes"] for c in data["collectives"]) == sent
    assert sum(row["sent"] for row in data["time"]) == sent
    assert sum(line[1] for line in data["lines"].values()) == sent
    assert data["totals"]["seconds"] == pytest.approx(sum(r[k] for r in data["time"] for k in BOUNDS))
    assert {name: tuple(lines) for name, _, lines in data["lists"]} == {k: v for k, v in attention.lists.items() if v}
    peak = data["memory"]["fixed"] + max(bytes for bytes, _ in data["memory"]["curve"])
    assert peak == data["totals"]["peak"] == attention.cost("v3:2x2").peak


def test_reasons_lead_to_marks(attention, data):
    """Following the rows of the data ends at a mark or argument, as the text's chain does."""
    tensors = data["tensors"]
    ends = 0
    for row, text in zip(tensors, attention.tensors, strict=True):
        for (dim, *_), chain in zip(row["reasons"], text.why, strict=True):
            at, d, found = row, dim, []
            while at is not None and len(found) < 999:
                _, reason, source, there = next(r for r in at["reasons"] if r[0] == d)
                found.append(reason)
                at, d = (tensors[source] if source >= 0 else None), there
            assert chain[-1].endswith(found[-1])
            assert len(found) == len(chain)
            ends += found[-1].startswith(("marked", "argument"))
    assert ends > 100


def test_lines_show_their_source_and_every_collective_is_explained(data):
    shown = {f"{f['name']}:{n}": text for f in data["files"] for n, text in f["lines"]}
    most = max(data["lines"], key=lambda line: data["lines"][line][1])
    assert 'p["wi"]' in shown[most], "the products over `model` send most"
    for c in data["collectives"]:
        assert c["seconds"] > 0
        assert c["line"].startswith("models.py:")
        assert "marked" in c["advice"], c
        assert re.match(r"\d+ groups? of \d+: \{0,", data["groups"][c["group"]])


def test_names_are_text_and_not_html(tmp_path):
    name = "</script><script>alert(1)</script>"
    hostile = gshard.explain(lambda p: jnp.sum(gshard.split(p[name], 0, 4)), {name: f32(8)}, mesh=FOUR)
    text = hostile.html(tmp_path / "page.html", seconds=0).read_text("utf-8")
    assert text.count("</script>") == 2
    data = json.loads(re.search(r'type="application/json">(.*?)</script>', text, re.S)[1])
    assert any("<script>alert(1)" in t["name"] for t in data["tensors"])


def test_the_page_needs_no_network(attention, tmp_path):
    text = attention.html(tmp_path / "page.html", seconds=0).read_text("utf-8")
    assert not re.search(r"""(src|href)=["'](?!#)|@import|url\(|fetch\(|https?://(?!www\.w3\.org/2000/svg)""", text)


def test_parts_of_axes_are_named_where_a_collective_is_over_one():
    mesh = gshard.Mesh.abstract(data=8, model=4)
    in_two = gshard.explain(lambda x: gshard.split(x, 0, 2).sum(), f32(8, 16), mesh=mesh)
    (row,) = in_two.collectives
    assert row.axes == "data.0"
    assert "\n  data.0, data.1, data.2: parts of axis data, 2 x 2 x 2 devices" in str(in_two)
    whole = gshard.explain(lambda x: gshard.split(x, 0, "data").sum(), f32(8, 16), mesh=mesh)
    assert "parts of axis" not in str(whole)


# The timeline adds up to the modelled time, keeps order and loops, and is a trace that Perfetto reads.


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
    if name == "recurrent":
        assert [loop.name.split()[:2] for loop in laid.loops] == [["scan", "x8"]] * 2
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
    inner = lambda x, _: (jnp.tanh(x @ x), None)  # noqa: E731
    outer = lambda x, _: (jax.lax.scan(inner, x, None, 5)[0], None)  # noqa: E731
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


# Two explanations by line: lines are matched by their text, totals are those of both, and nothing else is compared.
BEFORE = """
def f(x, w, v):
    x = gshard.split(x, 1, "d")
    h = x @ w
    return jnp.tanh(h) @ v
"""
AFTER = BEFORE.replace(
    "    h = x @ w\n", "    # one line more, and a mark\n    h = gshard.shard(x @ w, P('d', None))\n"
)


def program(text, name):
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    module = types.ModuleType("written")
    module.__dict__.update(gshard=gshard, jnp=jnp, P=jax.P)
    exec(compile(text, name, "exec"), module.__dict__)
    return module.f


def explained_text(text, name):
    return gshard.explain(program(text, name), f32(64, 512), f32(512, 64), f32(64, 8), mesh=FOUR)


def test_a_line_that_was_added_moves_no_other():
    before = explained_text(BEFORE, "written.py")
    data = before.data("v3:1x2", seconds=0)  # as long as the file has that text
    after = explained_text(AFTER, "written.py")
    found = after.difference(data, "v3:1x2")
    assert found.before.sent == before.total_bytes
    assert found.after.sent == after.total_bytes
    assert found.after.sent < found.before.sent
    assert sum(line.more for line in found.lines) == found.after.sent - found.before.sent
    (changed,) = found.lines  # the edited line sends what it did, and no result has to be gathered any more
    assert (changed.place, changed.text) == ("written.py:6", "    return jnp.tanh(h) @ v")
    assert changed.after.sent == 0
    assert str(found).startswith("f -> f\n  sent by each device")
    assert "written.py:6" in str(found)


def test_an_edited_line_is_the_same_line():
    """Wrapped in a mark, between lines that were added."""
    texts = ("    h = x @ w", "    h = gshard.shard(x @ w, P('d', None))")
    sides = []
    for lines in (["a = 1", texts[0], "b = 2"], ["a = 1", "# more", texts[1], "print(a)", "b = 2"]):
        at = next(n for n, text in enumerate(lines, 1) if text in texts)
        files = [{"name": "f.py", "lines": [list(pair) for pair in enumerate(lines, 1)]}]
        own = {
            "totals": {"seconds": 1.0, "sent": 8 * at, "flops": 0, "peak": 1, "messages": 1},
            "sent": {"all_gather": [1, 8 * at], "all_gather of x": [1, 8 * at]},
            "lines": {f"f.py:{at}": [1.0, 8 * at, 0]},
        }
        sides.append({"format": 3, "name": "f", "files": files, **own})
    found = difference(*sides)
    (changed,) = found.lines
    assert (changed.place, changed.before.sent, changed.after.sent) == ("f.py:3", 16, 24)
    assert [change.place for change in found.collectives] == ["all_gather", "all_gather of x"]
    (back,) = difference(*reversed(sides)).lines
    assert (back.place, back.more) == ("f.py:2", -8)


def test_a_renamed_file_is_the_same_file_and_a_line_that_is_gone_is_told(attention, data):
    before, after = explained_text(BEFORE, "old.py"), explained_text(BEFORE, "new.py")
    assert after.difference(before).lines == ()
    assert "no line changed" in str(after.difference(before))
    old = before.data(seconds=0)  # as long as the file has that text
    found = explained_text("def f(x, w, v):\n    return x + 1\n", "old.py").difference(old)
    assert sum(line.before.sent for line in found.lines) == before.total_bytes
    assert any(line.place.endswith(" (gone)") and line.after == Figures() for line in found.lines)
    assert found.worse == ()
    same = difference(data, data)
    assert (same.lines, same.before) == ((), same.after)
    assert same.before.seconds == attention.cost("v3:2x2").seconds


@pytest.mark.parametrize("wrong", [{}, {"format": 1, "totals": {}}, [], "text", None])
def test_what_is_no_explanation_is_refused(wrong):
    good = explained_text(BEFORE, "good.py").data(seconds=0)
    with pytest.raises(DifferenceError, match="no explanation that can be compared"):
        difference(copy.deepcopy(wrong), good)
