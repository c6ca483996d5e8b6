"""Marks as a change of source files: what it says is what the marks were, and it applies."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import gshard
from gshard.core.program import Value
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


def loaded(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def mark_of(v: Value, text: str) -> FoundMark:
    return FoundMark("here", text, 0.0, {v: Sharding(((), ()))})


def made_at(program: gshard.Program, primitive: str, times: int = 0) -> Value:
    return [e.outputs[0] for e in program.block.walk() if e.name == primitive][times]


def test_marks_go_after_assignments_and_around_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(SOURCE)
    program = gshard.trace(loaded(tmp_path / "model.py", "model_before").net, shape(8, 16), shape(16, 32), shape(32, 8))
    product = made_at(program, "dot_general", 1)
    told = patch_of(
        [
            mark_of(product, "gshard.shard(x, P(None, 'x'))"),
            mark_of(made_at(program, "mul"), "gshard.replicate(x)"),
            mark_of(made_at(program, "max"), "gshard.shard(x, P('x', None))"),
            mark_of(program.block.inputs[0], "gshard.shard(x, P('x', None))"),
        ],
        program,
    )
    assert "+    y = gshard.shard(y, P(None, 'x'))" in told
    assert "+    return gshard.replicate(y * 2)" in told
    assert told.count("not written, do it by hand") == 2, "a part of an expression, and an argument"
    (tmp_path / "marks.diff").write_text(told)
    subprocess.run(["git", "apply", "marks.diff"], cwd=tmp_path, check=True)
    after = loaded(tmp_path / "model.py", "model_after").net
    marks = [
        str(e.mark) for e in gshard.trace(after, *(shape(8, 16), shape(16, 32), shape(32, 8))).block.walk() if e.mark
    ]
    assert marks == ["shard(x, P(None, 'x'))", "replicate(x)"]


def test_the_patched_program_takes_what_the_marks_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(SOURCE)
    arguments, machine = (shape(4096, 4096), shape(4096, 8192), shape(8192, 4096)), Machine.of("h100:1x8")
    whole = (jax.P(), jax.P(), jax.P())
    step = gshard.jit(loaded(tmp_path / "model.py", "model_bare").net, mesh=MESH, in_shardings=whole)
    found = gshard.search(step, *arguments, machine=machine)
    (tmp_path / "marks.diff").write_text(found.patch())
    assert "not written" not in found.patch()
    assert found.marks.marks
    subprocess.run(["git", "apply", "marks.diff"], cwd=tmp_path, check=True)
    after = gshard.jit(loaded(tmp_path / "model.py", "model_marked").net, mesh=MESH, in_shardings=whole).lower(
        *arguments
    )
    assert cost(after.spmd, machine).seconds == pytest.approx(found.marks.seconds)
    assert jnp.dtype("float32") == after.program.block.outputs[0].dtype
