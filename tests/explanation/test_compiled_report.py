"""The page and the data of a compiled program: the format of gshard's own explanations, for CPU, GPU and TPU."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from explanation.compiled_texts import GPU, TPU
from gshard.explanation.difference import DifferenceError, difference
from gshard.explanation.report.data import NO_MACHINE

MESH = gshard.Mesh.abstract(data=2, model=4)
MACHINES = {"cpu": None, "gpu": "h100:1x8", "tpu": "v5e:2x4"}


def step(w, v, x):
    h = jnp.tanh(x @ w)
    return jnp.sum((h @ v) ** 2)


def arguments(mesh=None):
    shapes = ((64, 128), (128, 32), (256, 64))
    if mesh is None:
        return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    specs = (P(), P(), P("data"))
    return [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.fixture(scope="module")
def found(mesh):
    return {
        "cpu": gshard.explain(jax.jit(jax.grad(step, (0, 1))), *arguments(mesh), machine="cpu"),
        "gpu": gshard.explain(GPU, mesh=MESH, machine=MACHINES["gpu"]),
        "tpu": gshard.explain(TPU, mesh=MESH, machine=MACHINES["tpu"]),
    }


@pytest.fixture(scope="module", params=["cpu", "gpu", "tpu"])
def one(request, found):
    return found[request.param]


def test_the_data_has_the_format_of_gshards_own(one):
    ours = gshard.explain(step, *arguments(), mesh=8, machine="cpu").data(seconds=0)
    data = json.loads(json.dumps(one.data(), allow_nan=False))
    assert set(data) == set(ours)
    for name in ("mesh", "machine", "totals", "verdict", "memory", "timeline"):
        assert set(data[name]) == set(ours[name]), name
    sent = gshard.explain(lambda x: gshard.split(x, 0, 8).sum(), jnp.ones(8), mesh=8).data(seconds=0)
    for name in ("collectives", "tensors", "time"):
        assert {frozenset(row) for row in data[name]} == {frozenset(sent[name][0])}, name


def test_the_parts_of_the_data_add_up(one):
    data, cost = one.data(), one.cost()
    sent = data["totals"]["sent"]
    assert sent > 0
    assert sum(row[1] for row in data["lines"].values()) == sent
    assert sum(c["bytes"] for c in data["collectives"]) == sent
    assert data["totals"]["flops"] == cost.flops > 0
    # A counter of a loop has no line.
    assert sum(row[2] for row in data["lines"].values()) == pytest.approx(cost.flops, rel=1e-5)
    assert sum(row[0] for row in data["lines"].values()) == pytest.approx(cost.seconds, rel=1e-3)
    whole = sum(sum(row[what] for what in data["verdict"]["shares"]) for row in data["time"])
    assert whole == pytest.approx(cost.seconds)
    assert max(e[0] + e[1] for e in data["timeline"]["events"]) == pytest.approx(1e6 * cost.seconds, rel=1e-3)
    memory = data["memory"]
    assert memory["fixed"] + memory["temporaries"] == data["totals"]["peak"] == one.peak
    assert max(b for b, _ in memory["curve"]) == one.source.program.held.temporaries
    assert sum(row[1] for row in memory["alive"]) + memory["more"][1] == one.source.program.held.temporaries
    shown = {f"{f['name']}:{n}" for f in data["files"] for n, _ in f["lines"]}
    assert set(data["lines"]) <= shown
    assert {c["cause"] for c in data["collectives"]} <= shown
    assert all(c["group"] in data["groups"] for c in data["collectives"])
    starts = [e[0] for e in data["timeline"]["events"]]
    assert starts == sorted(starts)


def test_what_passes_beside_kernels_is_told_and_drawn_beside_them(found):
    data = found["gpu"].data()
    assert data["lines"]["layers.py:7"][2] == 2 * 64 * 256, "a fusion has the line of what it computes"
    hidden = {c["kind"]: c["hidden"] for c in data["collectives"]}
    assert hidden == {"all_gather": 1.0, "all_reduce": 0.0}
    texts, events = data["timeline"]["texts"], data["timeline"]["events"]
    named = [(texts[e[3]], e[0]) for e in events]
    assert ("mul f32[64,256]", 0.0) in named
    assert ("all_gather f32[256,128]", 0.0) in named, "both begin at once"
    assert sum(name.startswith("all_reduce") for name, _ in named) == 3, "each round is drawn"
    (loop,) = data["timeline"]["loops"]
    assert texts[loop[3]] == "while x3 train.py:12"
    assert "% of the network's time passes while kernels run" in data["overlap"]


def test_arguments_have_their_axes_and_the_lines_that_read_them(found):
    w, x, g = found["gpu"].data()["tensors"]
    assert (w["name"], w["short"], w["spec"]) == ("params['w']", "params/w", "P(None, 'data')")
    assert (w["shape"], w["dims"], w["local"], w["bytes"]) == ([256, 256], [[], ["data"]], 131072, 262144)
    assert set(w["read"]) == {"train.py:12", "layers.py:9"}
    assert (x["shape"], x["note"]) == ([128, 256], "one of 2 parts")
    assert (g["spec"], g["dims"], g["note"]) == ("P()", [[]], "all of it")
    assert found["tpu"].data()["tensors"][1]["dims"] is None, "the text has no sharding of x"


def test_without_a_machine_there_are_bytes_and_no_times():
    timed = gshard.explain(GPU, mesh=MESH, machine="h100:1x8").data()
    data = gshard.explain(GPU, mesh=MESH).data()
    assert data["machine"] is None
    assert (data["verdict"]["headline"], data["totals"]) == (NO_MACHINE, {**timed["totals"], "seconds": 0.0})
    assert data["lines"] == {place: [0.0, *row[1:]] for place, row in timed["lines"].items()}
    assert data["timeline"]["events"] == data["time"] == []
    compared = difference(data, timed)
    assert compared.lines == ()
    assert "time of a call" not in str(compared)
    assert gshard.explain(GPU, mesh=MESH).data("h100") == timed, "a machine may be named later"


def test_a_program_of_xla_is_compared_with_gshards_by_line(mesh):
    """The gradients are sums over the batch, which both split: the same lines compute and send."""

    def marked(w, v, x):
        return step(w, v, gshard.split(x, 0, "data"))

    theirs = gshard.explain(jax.jit(jax.grad(step, (0, 1))), *arguments(mesh), machine="h100")
    ours = gshard.explain(jax.grad(marked, (0, 1)), *arguments(), mesh=mesh, machine="h100")
    first = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "h = jnp.tanh" in text)
    places = {f"{Path(__file__).name}:{n}" for n in (first, first + 1)}
    before, after = ours.data(seconds=0), theirs.data()
    assert {place for place, row in before["lines"].items() if row[2]} == places
    assert set(after["lines"]) == places
    assert sum(row[1] for row in after["lines"].values()) == (64 * 128 + 128 * 32) * 4 * 2 * 7 / 8
    compared = theirs.difference(ours)
    assert (compared.before.sent, compared.after.sent) == (before["totals"]["sent"], after["totals"]["sent"])
    assert {line.place for line in compared.lines if line.after.flops} <= places
    assert {line.place for line in compared.lines if line.after.flops and line.before.flops} == places
    assert ours.difference(theirs).before == compared.after
    with pytest.raises(DifferenceError, match="this is no explanation"):
        theirs.difference(3)
    with pytest.raises(DifferenceError, match="two kinds of machines"):
        theirs.difference(ours.data("v3", seconds=0))


def test_lines_of_files_that_are_not_here_are_compared_by_their_numbers(found, tmp_path):
    before = found["tpu"]
    assert before.data()["files"] == [{"name": "train.py", "lines": [[4, ""], [5, ""]]}]
    more = TPU.replace("{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", "{{0,0}}")
    (line,) = gshard.explain(more, mesh=MESH, machine="v5e:2x4").difference(before).lines
    assert (line.place, line.more) == ("train.py:5", -8192)
    page = gshard.explain(more, mesh=MESH).html(tmp_path / "page.html", "v5e:2x4", against=before).read_text()
    assert '"difference":' in page


# In a browser.


@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_opens_and_is_no_wider_than_the_screen(browser, one, width, tmp_path):
    browser.look("light", width, 900)
    browser.open(one.html(tmp_path / "page.html").as_uri())
    assert browser.run("document.body.dataset.ready") == "1"
    browser.run("document.querySelectorAll('tr[data-i]').forEach(row => row.click())")
    assert browser.run("document.documentElement.scrollWidth") <= width
    text = browser.run("document.body.innerText")
    assert f"{one.source.program.instructions:,} instructions, compiled by XLA" in text
    for untrue in ("nothing overlaps", "equations", "No mark", "undefined", "NaN", "null", "the border"):
        assert untrue not in text
    assert browser.run("document.getElementById('tensors').hidden"), "there are no arrays inside"
    assert not browser.run("document.getElementById('timeline').hidden")


def test_devices_send_to_the_groups_of_the_text(browser, found, tmp_path):
    browser.look("light", 1280, 900)
    browser.open(found["tpu"].html(tmp_path / "page.html").as_uri())
    got = {}
    for i, kind in enumerate(browser.run("D.collectives.map(c => c.kind)")):
        sent = browser.run(f"[...Array(8).keys()].map(d => receivers(D.collectives[{i}], d))")
        got[kind] = {(d, to) for d, pairs in enumerate(sent) for to, _ in pairs}
        assert sum(n for pairs in sent for _, n in pairs) == 8 * browser.run(f"D.collectives[{i}].bytes")
        browser.run(f"chosen.row = {i}; exchange()")
        assert "sends" in browser.run("document.getElementById('senders').textContent")
    pairs = [(0, 5), (1, 4), (2, 7), (3, 6)]
    assert got["all_reduce"] == {*pairs, *((b, a) for a, b in pairs)}
    assert got["all_gather"] == {(d, (d + 4) % 8) for d in range(8)}
    assert got["collective_permute"] == {(d, d // 4 * 4 + (d + 1) % 4) for d in range(8)}
