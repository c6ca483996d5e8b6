"""Two explanations by line: lines are matched by their text, totals are those of both, and nothing else is compared."""

import copy
import linecache
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from device import models
from device.models import f32
from gshard.explanation.difference import DifferenceError, Figures, difference

MESH = gshard.Mesh.abstract(d=4)
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
    """A function of a file of its own, which need not exist."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    module = types.ModuleType("written")
    module.__dict__.update(gshard=gshard, jnp=jnp, P=jax.P)
    exec(compile(text, name, "exec"), module.__dict__)
    return module.f


def explained(text, name):
    return gshard.explain(program(text, name), f32(64, 512), f32(512, 64), f32(64, 8), mesh=MESH)


def test_a_line_that_was_added_moves_no_other():
    before = explained(BEFORE, "written.py")
    data = before.data("v3:1x2")  # as long as the file has that text
    after = explained(AFTER, "written.py")
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
        totals = {"seconds": 1.0, "sent": 8 * at, "flops": 0, "peak": 1}
        numbered = [list(pair) for pair in enumerate(lines, 1)]
        files = [{"name": "f.py", "lines": numbered}]
        sides.append(
            {"format": 2, "name": "f", "totals": totals, "lines": {f"f.py:{at}": [1.0, 8 * at, 0]}, "files": files}
        )
    (changed,) = difference(*sides).lines
    assert (changed.place, changed.before.sent, changed.after.sent) == ("f.py:3", 16, 24)
    (back,) = difference(*reversed(sides)).lines
    assert (back.place, back.more) == ("f.py:2", -8)


def test_a_renamed_file_is_the_same_file():
    before, after = explained(BEFORE, "old.py"), explained(BEFORE, "new.py")
    assert after.difference(before).lines == ()
    assert "no line changed" in str(after.difference(before))


def test_a_line_that_is_gone_is_told():
    before = explained(BEFORE, "gone.py").data()
    found = explained("def f(x, w, v):\n    return x + 1\n", "gone.py").difference(before)
    assert sum(line.before.sent for line in found.lines) == before["totals"]["sent"]
    assert any(line.place.endswith(" (gone)") and line.after == Figures() for line in found.lines)
    assert found.worse == ()


def test_nothing_differs_from_itself():
    found = models.explained("attention")
    same = found.difference(found)
    assert same.lines == ()
    assert same.before == same.after
    assert same.before.seconds == found.cost().seconds


def test_turned_round_it_has_the_other_sign():
    a, b = explained(BEFORE, "a.py"), explained(AFTER, "a.py")
    there, back = b.difference(a), a.difference(b)
    assert sum(x.more for x in there.lines) == -sum(x.more for x in back.lines)
    assert (there.before, there.after) == (back.after, back.before)


@pytest.mark.parametrize("wrong", [{}, {"format": 1, "totals": {}}, [], "text", None])
def test_what_is_no_explanation_is_refused(wrong):
    good = explained(BEFORE, "good.py").data()
    with pytest.raises(DifferenceError, match="no explanation that can be compared"):
        difference(copy.deepcopy(wrong), good)


def test_against_xla_counts_what_both_compilers_made():
    """The same marks and arguments: XLA gathers where we gather, and the products are those of the program."""

    def f(x, w):
        return jnp.tanh(gshard.split(x, 0, "data") @ w)

    mesh = {"data": 8}
    found = gshard.explain(f, f32(512, 64), f32(64, 32), mesh=mesh).against_xla("h100:1x8")
    assert found.before.flops == found.after.flops == 2 * 512 * 64 * 32 // 8
    assert found.peaks is None
    g = gshard.explain(
        lambda x, w: gshard.replicate(gshard.split(x, 1, "data") @ w), f32(64, 512), f32(512, 32), mesh=mesh
    )
    both = g.against_xla("h100:1x8")
    assert both.after.sent == g.total_bytes == both.before.sent
    with pytest.raises(gshard.MeshError, match="abstract mesh"):
        explained(BEFORE, "abstract.py").against_xla()


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_against_xla_runs_manual_regions_as_they_are(whole, check_vma):
    """Weights that a region reads whole are cast to vary there, and their gradients are summed there."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def layer(x, w):
        return jnp.tanh(x @ w if whole else jax.lax.psum(x @ w, "model") * jax.lax.axis_index("data"))

    specs = (P("data"), P()) if whole else (P("data", "model"), P("model"))
    mapped = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=check_vma)
    for f in (mapped, jax.grad(lambda x, w: jnp.sum(mapped(x, w) ** 2), 1)):
        found = gshard.explain(f, f32(64, 64), f32(64, 64), mesh=mesh).against_xla("h100:1x8")
        assert found.before.flops == found.after.flops > 0
        assert f is not mapped or found.before.sent == found.after.sent
