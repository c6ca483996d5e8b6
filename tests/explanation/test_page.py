"""The page in a browser: every line that communicates has its collectives, every filter can be undone, and the keyboard
reaches everything, on wide screens and on narrow ones."""

import json
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

import gshard
from device.models import explained, f32, model
from gshard.device.network import groups


@pytest.fixture(scope="module")
def experts():
    """A real program: three files, loops, collectives that are emitted at other lines than they are caused at."""
    return explained("experts gradient")


@pytest.fixture
def opened(browser, experts, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "experts.html"
    if not path.exists():
        experts.html(path, "v3:2x2")
    browser.look("light", 1280, 900)
    browser.open(path.as_uri())
    assert browser.run("document.body.dataset.ready") == "1", "the script ran to its end"
    return browser


def rows(browser, table="collective-table"):
    return browser.run(f"document.querySelectorAll('#{table} tbody tr[data-i]').length")


ROWS = "#collective-table tr[data-i]"
CLICK = "[...document.querySelectorAll('#files .row')].find(r => r.dataset.at === {}).click()"


def test_every_line_that_communicates_has_its_collectives(opened, experts):
    """The review's main finding: the line with most bytes said "nothing here"."""
    data = experts.data("v3:2x2")
    sent = {place: row[1] for place, row in data["lines"].items() if row[1]}
    emitted = {c["emitted"] for c in data["collectives"]}
    assert len(sent) > 5
    assert emitted - set(sent), "some are emitted where nothing is caused"
    shown = opened.run("[...document.querySelectorAll('#files .row')].map(r => r.dataset.at)")
    for place in {*sent, *emitted}:
        assert place in shown
        opened.run(CLICK.format(json.dumps(place)))
        opened.run("tables['collective-table'].limit = 999; draw()")
        found = opened.run(f"[...document.querySelectorAll('{ROWS}')].map(r => D.collectives[r.dataset.i])")
        assert found, f"{place} has no collective"
        assert all(place in (c["cause"], c["emitted"]) for c in found)
        assert sum(c["bytes"] for c in found if c["cause"] == place) == sent.get(place, 0)
        assert opened.run("document.querySelectorAll('#chips .chip').length") == 1
        opened.run("document.querySelector('#chips .chip').click()")
    assert opened.run("chosen.line") == ""
    assert opened.run("Object.values(D.lines).reduce((sum, row) => sum + row[1], 0)") == data["totals"]["sent"]


def test_the_places_of_a_collective_lead_to_its_lines(opened):
    at = opened.run("D.collectives.findIndex(c => c.cause !== c.emitted)")
    opened.run("tables['collective-table'].limit = 999; draw()")
    for i, what in enumerate(("cause", "emitted")):
        opened.run(f"document.querySelectorAll('#collective-table tr[data-i=\"{at}\"] .place')[{i}].click()")
        assert opened.run("chosen.line") == opened.run(f"D.collectives[{at}].{what}")
        assert opened.run("document.querySelector('#files .picked').dataset.at") == opened.run("chosen.line")
        opened.press("Escape", 27)
        assert opened.run("chosen.line") == ""


def test_every_filter_can_be_undone(opened):
    assert not [address for address in opened.requested if not address.startswith(("file:", "data:", "about:"))]
    cut = "[...document.querySelectorAll('#files .row code')].filter(c => c.title !== c.textContent.trim()).length"
    assert opened.run(cut) == 0, "a line that is cut is whole in its tooltip"
    before = opened.run("document.querySelector('main').textContent")
    opened.press("/", 191)
    opened.run("document.getElementById('search').focus()")
    opened.type("all_to_all")
    assert opened.run("document.querySelector('#chips .chip').textContent").startswith("“all_to_all”")
    opened.run("choose('line', D.collectives[0].cause)")
    assert opened.run("document.querySelectorAll('#chips .chip').length") == 2
    opened.press("Escape", 27)
    assert opened.run("[chosen.line, chosen.query]") == ["", "all_to_all"]
    opened.press("Escape", 27)
    assert opened.run("[chosen.line, chosen.query, document.getElementById('search').value]") == ["", "", ""]
    assert opened.run("document.querySelector('main').textContent") == before
    opened.run("choose('query', 'no such thing')")
    assert opened.run("document.querySelector('main').textContent.split('nothing here').length") >= 4


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_a_narrow_screen(opened, scheme):
    opened.look(scheme, 400, 800)
    opened.run("draw()")
    opened.run("document.querySelectorAll('tr[data-i]').forEach((row, i) => i % 7 || row.click())")
    opened.run("choose('line', D.collectives[0].cause)")
    assert opened.run("document.documentElement.scrollWidth") <= 400
    wide = "[...document.querySelectorAll('main *, nav *')].filter(e => e.getBoundingClientRect().right > 401 && !e.closest('.links')).map(e => e.outerHTML.slice(0, 90))"  # noqa: E501
    assert opened.run(wide) == []


def test_the_keyboard_reaches_everything(opened):
    """What can be clicked is a button or a link, or can have the focus and obeys Enter."""
    mute = "[...document.querySelectorAll('*')].filter(e => e.onclick && !(e instanceof SVGElement && e.tabIndex < 0) && e.tabIndex < 0).map(e => e.outerHTML.slice(0, 90))"  # noqa: E501
    assert opened.run(mute) == []
    opened.run("document.querySelector('#collective-table tr[data-i]').focus()")
    opened.press("Enter", 13)
    assert opened.run("document.querySelector('#collective-table tr[data-i]').getAttribute('aria-expanded')") == "true"
    assert "Needed for" in opened.run("document.querySelector('#collective-table tr.why').textContent")
    opened.press("ArrowDown", 40)
    assert opened.run("document.activeElement === document.querySelectorAll('#collective-table tr[data-i]')[1]")
    opened.run("document.querySelector('#files .row.has').focus()")
    opened.press("Enter", 13)
    assert opened.run("chosen.line") == opened.run("document.querySelector('#files .row.has').dataset.at")
    opened.press("ArrowDown", 40)
    assert opened.run("document.activeElement === document.querySelectorAll('#files .row.has')[1]")
    opened.press("Escape", 27)
    opened.run("document.getElementById('canvas').focus()")
    for _ in range(3):
        opened.press("ArrowRight", 39)
    assert opened.run("view.at") == 2
    assert opened.run("document.getElementById('now').textContent") != ""


def test_equal_layers_are_one_row_that_opens(opened, tmp_path):
    opened.open(explained("adam").html(tmp_path / "layers.html", "v3:2x2").as_uri())
    at = opened.run("D.collectives.findIndex(c => c.layers.length > 1)")
    opened.run("tables['collective-table'].limit = 999; draw()")
    row = f"document.querySelector('#collective-table tr[data-i=\"{at}\"]')"
    layers = opened.run(f"D.collectives[{at}].layers")
    assert f"×{len(layers)}" in opened.run(f"{row}.textContent")
    opened.run(f"{row}.click()")
    listed = opened.run(f"[...{row}.nextSibling.querySelectorAll('details li')].map(item => item.textContent)")
    assert len(listed) == len(layers)
    assert all(array in text for (array, *_), text in zip(layers, listed, strict=True))
    opened.run(f"choose('query', {json.dumps(layers[1][0])})")
    assert opened.run(f"{row} !== null"), "each layer is found by its own name"


def test_columns_are_sorted_by_their_headings(opened):
    opened.run("tables['collective-table'].limit = 999; draw()")
    values = f"[...document.querySelectorAll('{ROWS}')].map(r => D.collectives[r.dataset.i].bytes)"
    buttons = "[...document.querySelectorAll('#collective-table th button')]"
    click = f"{buttons}.find(b => b.textContent.startsWith('bytes')).click()"
    opened.run(click)
    assert opened.run(values) == sorted(opened.run(values), reverse=True)
    assert (
        opened.run("document.querySelector('#collective-table th[aria-sort]').getAttribute('aria-sort')")
        == "descending"
    )
    opened.run(click)
    assert opened.run(values) == sorted(opened.run(values))


def test_the_timeline_adds_up_and_leads_to_lines(opened, experts):
    cost = experts.cost("v3:2x2")
    assert opened.run("T.events.reduce((sum, e) => sum + e[1], 0)") == pytest.approx(1e6 * cost.seconds, rel=1e-3)
    opened.run("view.at = T.events.findIndex(e => e[5] >= 0); chooseEvent()")
    assert opened.run("chosen.line") == opened.run("D.collectives[T.events[view.at][5]].cause")
    opened.run("zoom(0.25, 0.5)")
    assert opened.run("view.to - view.from") == pytest.approx(opened.run("END") / 4)
    opened.run("zoom(1000, 0.5)")
    assert opened.run("[view.from, view.to - END]") == [0, 0]


def test_devices_send_to_their_group(opened, experts):
    """The page's arithmetic against ours: for every device the members of its group, none twice."""
    mesh = experts.mesh
    for i, c in enumerate(experts.data("v3:2x2")["collectives"]):
        if c["kind"] == "collective_permute":
            continue
        atoms = tuple(c["group"].split(","))
        theirs = {d: set(group) - {d} for group in groups(mesh, atoms) for d in group}
        got = opened.run(f"[...Array({mesh.size}).keys()].map(d => receivers(D.collectives[{i}], d))")
        for device, pairs in enumerate(got):
            assert {to for to, _ in pairs} == theirs[device]
            assert sum(n for _, n in pairs) == pytest.approx(c["bytes"] / c["times"])


def test_a_permutation_is_drawn_as_it_is_sent(browser, tmp_path):
    mesh = gshard.Mesh.abstract(a=2, b=4)
    found = gshard.explain(lambda x: jnp.roll(gshard.split(x, 0, "b"), 3, 0), f32(32, 4), mesh=mesh)
    data = found.data()
    browser.open(found.html(tmp_path / "roll.html").as_uri())
    sent = 0
    for i, c in enumerate(data["collectives"]):
        if c["kind"] != "collective_permute":
            continue
        sent += 1
        got = {(d, to) for d in range(8) for to, _ in browser.run(f"receivers(D.collectives[{i}], {d})")}
        assert got == {(4 * row + b, 4 * row + (b + 1) % 4) for row in range(2) for b in range(4)}
        browser.run(f"chosen.row = {i}; exchange()")
        assert "sends its part" in browser.run("document.getElementById('senders').textContent")
    assert sent


def test_a_difference_is_shown_line_by_line(browser, tmp_path):
    f, args, axes, _ = model("gradient")
    found = gshard.explain(f, *args, mesh=gshard.Mesh.abstract(**axes))
    g, more, axes, _ = model("descent")
    other = gshard.explain(g, *more, mesh=gshard.Mesh.abstract(**axes))
    browser.open(found.html(tmp_path / "difference.html", against=other).as_uri())
    assert browser.run("document.getElementById('difference').hidden") is False
    changed = found.difference(other).lines
    assert rows(browser, "difference-table") == 0
    assert browser.run("document.querySelectorAll('#difference-table tbody tr').length") == min(len(changed), 40)
    signs = Counter(browser.run("[...document.querySelectorAll('#difference-table td.n span')].map(s => s.className)"))
    assert signs["better"] + signs["worse"] > 0


def test_a_notebook_shows_the_page_in_a_frame(browser, tmp_path):
    found = gshard.explain(lambda x: jax.numpy.sum(gshard.split(x, 0, 4)), f32(8), mesh=gshard.Mesh.abstract(d=4))
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!doctype html><body>{found._repr_html_()}</body>", "utf-8")
    browser.open(notebook.as_uri())
    browser.wait("document.querySelector('iframe').contentDocument.body.dataset.ready === '1'")
    title = browser.run("document.querySelector('iframe').contentDocument.getElementById('title').textContent")
    assert title == "<lambda> on 4 devices"


@pytest.mark.parametrize("width", [1010, 1110, 1280, 1440])
def test_nothing_is_wider_than_a_wide_screen_where_there_are_several_files(opened, width):
    opened.look("light", width, 900)
    opened.run("draw()")
    assert opened.run("D.files.length") > 1
    assert opened.run("document.documentElement.scrollWidth") <= width


def test_a_line_shows_the_arguments_that_it_reads(opened):
    whole = opened.run("D.tensors.filter(t => t.argument).length")
    read = opened.run("D.tensors.find(t => t.read.length).read[0]")
    opened.run(f"tables['argument-table'].limit = 999; choose('line', {json.dumps(read)})")
    names = opened.run(
        "[...document.querySelectorAll('#argument-table tr[data-i]')].map(r => D.tensors[r.dataset.i].name)"
    )
    assert names == opened.run(f"D.tensors.filter(t => t.read.includes({json.dumps(read)})).map(t => t.name)")
    assert 0 < len(names) < whole
    other = opened.run("D.tensors.find(t => t.place && !D.tensors.some(a => a.read.includes(t.place))).place")
    opened.run(f"choose('line', {json.dumps(other)})")
    assert f"{other} reads no argument itself" in opened.run("document.getElementById('arguments').textContent")
    opened.run("choose('line', '')")


def test_a_narrow_screen_begins_with_few_rows_and_names_a_line_once(browser, tmp_path):
    path = tmp_path / "narrow.html"
    explained("experts gradient").html(path, "v3:2x2")
    browser.look("light", 400, 800)
    browser.open(path.as_uri())
    assert rows(browser, "collective-table") == rows(browser, "tensor-table") == 5
    text = browser.run("[...document.querySelectorAll('#tensor-table td[data-name=line]')].map(c => c.textContent)")
    assert text
    assert not any(line.startswith("line") for line in text)
    assert "gradient" in browser.run("getComputedStyle(document.querySelector('nav .links')).maskImage")
    browser.look("light", 1280, 900)
