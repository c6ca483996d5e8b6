"""Explanations of plans that a search has found: other shardings, added and removed marks, pages."""

import dataclasses
import html
import re

import jax
import jax.numpy as jnp

import gshard
from search.test_search import EIGHT, RESIDUAL, free, shape, small, trained


def test_the_arguments_of_the_plan_are_in_shardings_of_jit():
    found = free()
    lowered = gshard.jit(trained(False), mesh=EIGHT, in_shardings=found.in_shardings).lower(*RESIDUAL)
    pairs = zip(found.plan.program.block.inputs, lowered.program.block.inputs, strict=True)
    assert all(found.plan.shardings[v].dims == lowered.plan.shardings[w].dims for v, w in pairs)


def test_other_shardings_of_an_argument_are_planned():
    found = free()
    assert len(found.marks.marks) == 1
    rows = {row.sharding: row.seconds for row in found.explain().instead("weights[0][0]")}
    assert rows.keys() == {"f32[2048@devices,8192]", "f32[2048,8192]"}
    assert min(rows.values()) > 0


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


def test_notebooks_show_results_as_pages_or_text_and_load_nothing():
    """Names of the user's are text, also in a page in a frame."""
    hostile = "<script>alert(1)</script>"

    def build(width=64):
        def step(params, x):
            return jax.grad(lambda p: jnp.mean(jnp.tanh(x @ p[hostile]) ** 2))(params)

        return step, {hostile: shape(64, width)}, shape(64, 64)

    found = gshard.search(*build(), mesh={"x": 8}, machine="h100:1x8")
    options = {"mesh": {"x": 8}, "machine": "h100:1x8", "choices": {"width": [64]}}
    configured = gshard.configure(build, **options)
    framed = [found, configured, found.explain()]
    assert re.fullmatch(r"<pre [^<>]+>[^<>]+</pre>", found.explain().verdict(seconds=0)._repr_html_())
    for result in framed:
        (escaped,) = re.fullmatch(
            r'<iframe srcdoc="([^"<>]+)" title="[^"<>]+" style="[^"<>]+"></iframe>', result._repr_html_()
        ).groups()
        page = html.unescape(escaped)
        assert hostile not in page
        assert not re.search(r"\ssrc=|<link|https?://(?!www.w3.org)|@import|url\(", page)
        assert ("1 configuration on h100" in page) == (result is configured)


def test_a_page_tells_of_the_search(tmp_path):
    found = gshard.search(small, shape(64, 64), shape(64, 64), mesh=gshard.Mesh.abstract(x=8), machine="h100:1x8")
    page = found.html(tmp_path / "plan.html").read_text()
    assert page.count("optimal for the simplified model") == 1
    assert "ms without further marks" not in page
    assert str(found.marks).splitlines()[0] in found.html(tmp_path / "plan.html").read_text()
    assert repr(found) == str(found)
