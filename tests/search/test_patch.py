"""Marks as a change of source files: what it says is what the marks were, and it applies."""

import dataclasses
import importlib.util
import subprocess
import sys

import jax.numpy as jnp
import pytest

import gshard
from gshard.core.number_text import significant
from gshard.core.sharding import Sharding
from gshard.device.cost import cost
from gshard.device.machine import Machine
from gshard.search.as_marks import FoundMark
from gshard.search.patch import patch_of
from search.test_search import shape

SOURCE = '''"""A model."""

import jax
import jax.numpy as jnp


def net(x, a, b):
    h = x @ a
    y = (
        jax.nn.relu(h) @ b
    )
    return y * 2


def chosen(x, a, b):
    return net(x, a, b) + jnp.exp(x).sum()
'''
MESH = gshard.Mesh.abstract(x=8)


def loaded(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def mark_of(v, text):
    return FoundMark("here", text, 0.0, {v: Sharding(((), ()))})


def made_at(program, primitive, times=0):
    return [e.outputs[0] for e in program.block.walk() if e.name == primitive][times]


def test_marks_inside_are_written_by_hand(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(SOURCE)
    program = gshard.stages.trace(
        loaded(tmp_path / "model.py", "model_before").net, shape(8, 16), shape(16, 32), shape(32, 8)
    )
    product = made_at(program, "dot_general", 1)
    told = patch_of([mark_of(product, "gshard.shard(x, P(None, 'x'))")], program, MESH)
    assert told == "# gshard.shard(x, P(None, 'x')) here: not written, do it by hand\n"


def test_the_patched_program_takes_what_the_marks_took(tmp_path, monkeypatch):
    """With no time a patch says how far the unmarked program is from the plan; with more time it looks again."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(SOURCE)
    arguments, machine = (shape(4096, 4096), shape(4096, 8192), shape(8192, 4096)), Machine.of("h100:1x8")
    step = gshard.jit(loaded(tmp_path / "model.py", "model_bare").net, mesh=MESH)
    found, lines = gshard.search(step, *arguments, machine=machine), []
    short = dataclasses.replace(found, budget_seconds=1e-6, progress=lines.append)
    told = short.patch()
    assert [line.partition(": ")[2] for line in lines] == ["the program without further marks"]
    bare = short.marks.bare.cost.seconds
    assert not short.marks.marks
    assert bare > 1.1 * found.cost.seconds
    above = f"{significant(100 * (bare / found.cost.seconds - 1), 2)} % above the plan"
    assert f"{bare * 1e3:.4g} ms without a further mark, {above}" in told
    assert "# the time was over after" in told
    assert "not tried, or cut: further marks" in told
    assert "# gshard.jit(f, mesh=found.mesh, plan=found.plan) runs the plan itself" in told
    assert "\n@@" not in told
    lines.clear()
    assert short.patch() == told, "it takes what is known"
    assert not lines
    found = dataclasses.replace(found, progress=lines.append)
    told = found.patch()
    assert len(lines) > 1
    assert found.marks.marks
    assert told.splitlines()[0] == f"# modelled on h100:1x8: {found.marks.nearness}"
    assert "as the plan" in found.marks.nearness
    assert "\n@@" in told
    assert not any(words in told for words in ("the time was over", "not written", "plan=found.plan"))
    (tmp_path / "marks.diff").write_text(told)
    subprocess.run(["git", "apply", "marks.diff"], cwd=tmp_path, check=True)
    marked = loaded(tmp_path / "model.py", "model_marked").net
    after = gshard.jit(marked, mesh=MESH, machine=machine).lower(*arguments)
    assert cost(after.spmd, machine).seconds == pytest.approx(found.marks.seconds)


def test_what_is_found_later_has_the_time_of_the_search():
    def f(x, w):
        return jnp.tanh(x @ w)

    given = {"mesh": MESH, "machine": "h100:1x8", "progress": False}
    found = gshard.search(f, shape(4096, 4096), shape(4096, 8192), budget_seconds=1e-6, **given)
    assert found.budget_seconds == 1e-6
    assert found.marks.left_out == ("further marks",) or found.marks.is_near
    longer = dataclasses.replace(found, budget_seconds=60)
    assert not longer.marks.left_out
