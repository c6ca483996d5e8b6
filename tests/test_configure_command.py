"""The command ``gshard configure``: what it prints and writes, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gshard
from gshard.__main__ import main
from gshard.commands import choices_of_options

PROGRAM = """
import jax, jax.numpy as jnp

def build(global_batch, micro_batches, wide=False):
    def step(w, x):
        rounds = x.reshape(-1, micro_batches, 64).swapaxes(0, 1)
        one = lambda total, x: (total + jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), None)
        return w - 0.1 * jax.lax.scan(one, jnp.zeros_like(w), rounds)[0]
    return step, jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((global_batch, 64), "float32")

def fails(micro_batches):
    raise ValueError("no such size")
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program_of_configure.py").write_text(PROGRAM)
    return "program_of_configure.py:build"


COMMON = ["--machine", "cpu:8", "--mesh", "data=8", "--global-batch", "16", "--donate-argnums", "0"]


def test_it_prints_and_writes(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", "found.json", "--save", "best.json", "--html", "page.html"]
    assert main(["configure", target, *COMMON, "--choice", "micro_batches=1,2", *files]) == 0
    out = capsys.readouterr().out
    assert "examples/s" in out
    assert "wrote best.json: gshard.stages.Configuration.load('best.json', build) reads it" in out
    data = json.loads(Path("found.json").read_text())
    assert data["configurations"][0]["keywords"] == {"micro_batches": 1}
    assert data["bound"] > 0
    assert Path("page.html").read_text().startswith("<!")

    def build(global_batch: int, micro_batches: int) -> object:
        space: dict[str, object] = {}
        exec(PROGRAM, space)
        return space["build"](global_batch, micro_batches)  # type: ignore[operator]

    assert gshard.stages.Configuration.load("best.json", build).keywords == {"micro_batches": 1}


def test_how_it_ends(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configure", target, *COMMON, "--choice", "micro_batches=1", "--memory-limit", "1KiB"]) == 3
    assert "no configuration fits in 1.0 KiB" in capsys.readouterr().err
    assert main(["configure", target, *COMMON, "--choice", "micro_batches=3"]) == 1
    assert "not divided evenly by 3" in capsys.readouterr().err
    assert main(["configure", target.replace("build", "fails"), "--machine", "cpu:8", "--global-batch", "2"]) == 1
    told = capsys.readouterr().err
    assert "no such size" in told
    assert "gshard called fails(micro_batches=1)" in told


def test_values_on_the_command_line() -> None:
    read = choices_of_options(["a=1,2.5,none", "b=True,None,x", "a=3"])
    assert read == {"a": [1, 2.5, "none", 3], "b": [True, None, "x"]}
    for wrong in ("a", "a=", "=1", "a b=1"):
        with pytest.raises(gshard.ArgumentError, match="is not understood"):
            choices_of_options([wrong])
