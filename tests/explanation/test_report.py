"""The report: totals agree with the program's own, hostile names are text, and it is small; test_page opens it."""

import json
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from device.models import explained, f32
from gshard.device.cost import BOUNDS
from gshard.device.machine import MachineError
from gshard.testing.rule_checks import emitted


@pytest.fixture(scope="module")
def attention():
    return explained("attention")


def test_totals_are_those_of_the_emitted_program(attention):
    data = attention.data("v3:2x2")
    sent = sum(emitted(attention.spmd.jaxpr, attention.mesh.atom_sizes).values())
    assert data["totals"]["sent"] == sum(c["bytes"] for c in data["collectives"]) == sent
    assert sum(row["sent"] for row in data["time"]) == sent
    assert sum(line[1] for line in data["lines"].values()) == sent
    assert data["totals"]["seconds"] == pytest.approx(sum(r[k] for r in data["time"] for k in BOUNDS))
    peak = data["memory"]["fixed"] + max(bytes for bytes, _ in data["memory"]["curve"])
    assert peak == data["totals"]["peak"] == attention.cost("v3:2x2").peak


def test_the_page_tells_what_collectives_are_for(attention):
    notes = dict(attention.data()["notes"])
    rows = notes["What the collectives are for"]
    assert len(rows) == len(attention.purposes) > 1
    assert sum(p.bytes for p in attention.purposes) == attention.total_bytes
    assert rows == [str(purpose) for purpose in attention.purposes]


def test_reasons_lead_to_marks(attention):
    """Following the rows of the data ends at a mark or argument, as the text's chain does."""
    tensors = attention.data()["tensors"]
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


def test_lines_show_the_source_as_it_was_written(attention):
    data = attention.data()
    shown = {f"{f['name']}:{n}": text for f in data["files"] for n, text in f["lines"]}
    most = max(data["lines"], key=lambda line: data["lines"][line][1])
    assert 'p["wi"]' in shown[most], "the products over `model` send most"


def test_every_collective_is_explained(attention):
    data = attention.data()
    for c in data["collectives"]:
        assert c["seconds"] > 0
        assert c["line"].startswith("models.py:")
        assert "marked" in c["advice"], c
        assert re.match(r"\d+ groups? of \d+: \{0,", data["groups"][c["group"]])


def test_names_are_text_and_not_html(tmp_path):
    def hostile(params):
        return jnp.sum(gshard.split(params["</script><script>alert(1)</script>"], 0, 4))

    path = gshard.explain(hostile, {"</script><script>alert(1)</script>": f32(8)}, mesh=gshard.Mesh.abstract(d=4)).html(
        tmp_path / "page.html"
    )
    text = path.read_text("utf-8")
    assert text.count("</script>") == 2
    data = json.loads(re.search(r'type="application/json">(.*?)</script>', text, re.S)[1])
    assert any("<script>alert(1)" in t["name"] for t in data["tensors"])


def test_the_page_needs_no_network(attention, tmp_path):
    text = attention.html(tmp_path / "page.html").read_text("utf-8")
    assert not re.search(r"""(src|href)=["'](?!#)|@import|url\(|fetch\(|https?://(?!www\.w3\.org/2000/svg)""", text)


def deep(params, x):
    x = gshard.split(x, 0, "data")
    for wi, wo in params:
        h = x - jnp.mean(x, -1, keepdims=True)
        x = x + jax.nn.gelu(h @ gshard.split(wi, 1, "model")) @ wo
    return jnp.mean(x * x)


@pytest.mark.slow
def test_a_page_of_a_thousand_equations_takes_linear_time_and_no_two_megabytes(tmp_path):
    def found(layers):
        params = [(f32(64, 128), f32(128, 64))] * layers
        f = gshard.jit(jax.grad(deep), mesh=gshard.Mesh.abstract(data=8, model=4))
        return gshard.explain(f, params, f32(256, 64))

    def takes(explanation, path):
        before = time.process_time()
        explanation.html(path)
        return time.process_time() - before

    short, long = found(6), found(25)
    assert long.equations > 1000
    small, large = tmp_path / "short.html", tmp_path / "long.html"
    # Quadratic time would be sixteen times; a machine that stops for a while makes one measurement wrong, not five.
    assert any(takes(long, large) < 9 * takes(short, small) for _ in range(5))
    assert large.stat().st_size < 2 << 20


def test_a_machine_of_another_size_is_refused(attention):
    with pytest.raises(MachineError, match="128 devices, and the mesh has 8"):
        attention.cost("v3:8x8")


def test_a_slice_of_the_picture_is_the_slice_of_the_device():
    """The page's arithmetic, in Python: atoms of a dimension, major to minor, number its slices."""
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    x = jnp.arange(16.0)
    y = gshard.jit(lambda x: gshard.shard(x, jax.sharding.PartitionSpec(("b", "a"))) + 0, mesh=mesh)(x)
    found = gshard.explain(
        lambda x: gshard.shard(x, jax.sharding.PartitionSpec(("b", "a"))) + 0, x, mesh=gshard.Mesh.abstract(a=2, b=4)
    )
    data = found.data()
    dims = data["tensors"][0]["dims"][0]
    sizes = dict(data["mesh"]["atoms"])
    for device in range(8):
        at, rest = {}, device
        for atom, n in reversed(data["mesh"]["atoms"]):
            rest, at[atom] = divmod(rest, n)
        part = 0
        for atom in dims:
            part = part * sizes[atom] + at[atom]
        (shard,) = [s for s in y.addressable_shards if s.device == mesh.devices.flat[device]]
        np.testing.assert_array_equal(shard.data, x[2 * part : 2 * part + 2])


def test_parts_of_axes_are_named_where_a_collective_is_over_one():
    mesh = gshard.Mesh.abstract(data=8, model=4)
    in_two = gshard.explain(lambda x: gshard.split(x, 0, 2).sum(), f32(8, 16), mesh=mesh)
    (row,) = in_two.collectives
    assert row.axes == "data.0"
    assert "\n  data.0, data.1, data.2: parts of axis data, 2 x 2 x 2 devices" in str(in_two)
    whole = gshard.explain(lambda x: gshard.split(x, 0, "data").sum(), f32(8, 16), mesh=mesh)
    assert "parts of axis" not in str(whole)
