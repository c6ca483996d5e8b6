"""One program has one modelled time, whoever is asked: jit, explain, search, its presets, pages, the command line."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct

import gshard
from gshard.__main__ import main
from gshard.device.cost import cost

MESH = gshard.Mesh.abstract(data=8)


def shape(*dims, dtype="float32"):
    return ShapeDtypeStruct(dims, dtype)


def data_parallel(w, v, x):
    x = gshard.split(x, 0, "data")
    return jax.grad(lambda w, v: jnp.mean((jax.nn.relu(x @ w) @ v) ** 2), (0, 1))(w, v)


def trained(ws, x):
    ws, x = gshard.split(ws, 1, "data"), gshard.split(x, 0, "data")
    loss = lambda ws: jnp.mean(jax.lax.scan(lambda x, w: (jax.nn.relu(x @ w), None), x, ws)[0] ** 2)  # noqa: E731
    return ws - 0.1 * jax.grad(loss)(ws)


def gathered_for_products(x, w, v):
    """Tokens are gathered before the first product: on v5e it is a collective matmul."""
    h = jax.nn.relu(gshard.split(x, 0, "data") @ gshard.split(w, 1, "data"))
    return gshard.split(gshard.split(h, 1, "data") @ gshard.split(v, 0, "data"), 0, "data")


PROGRAMS = {
    "data parallel": (data_parallel, (shape(256, 1024), shape(1024, 256), shape(2048, 256)), "h100:1x8"),
    "trained": (trained, (shape(4, 512, 512), shape(512, 512)), "h100:1x8"),
    "collective matmul": (
        gathered_for_products,
        tuple(shape(*dims, dtype="bfloat16") for dims in ((8192, 4096), (4096, 16384), (16384, 4096))),
        "v5e:2x4",
    ),
    "on cpus": (data_parallel, (shape(64, 128), shape(128, 64), shape(256, 64)), "cpu:8"),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.one_in(3)
def test_one_program_has_one_modelled_time(name, tmp_path, capsys):
    f, arguments, machine = PROGRAMS[name]
    step = gshard.jit(f, mesh=MESH, machine=machine)
    lowered, told = step.lower(*arguments), gshard.explain(step, *arguments)
    if name == "collective matmul":
        assert lowered.plan.rings
    found = gshard.search(f, *arguments, mesh=MESH, machine=machine, budget_seconds=5)
    (preset,) = (other for other in found.best.others if other.name == "as it is marked")
    as_marked = {
        "lowered": cost(lowered.spmd, gshard.Machine.of(machine), lowered.donated).seconds,
        "explain of jit": told.cost().seconds,
        "with the machine named": told.cost(machine).seconds,
        "explain of the function": gshard.explain(f, *arguments, mesh=MESH, machine=machine).cost().seconds,
        "verdict": told.verdict(seconds=0).cost.seconds,
        "page": told.data(seconds=0)["totals"]["seconds"],
        "search": preset.cost.seconds,
    }
    assert dict.fromkeys(as_marked, preset.cost.seconds) == as_marked
    runs = gshard.jit(f, mesh=MESH, machine=machine, plan=found.plan)
    best = {
        "found": found.cost.seconds,
        "explain of what was found": found.explain().cost().seconds,
        "its page": found.explain().data(seconds=0)["totals"]["seconds"],
        "explain of jit with the plan": gshard.explain(runs, *arguments).cost().seconds,
    }
    assert dict.fromkeys(best, found.cost.seconds) == best
    assert found.cost.seconds <= preset.cost.seconds
    assert found.cost.peak == gshard.explain(runs, *arguments).cost().peak


def test_the_command_line_plans_for_the_machine_that_it_prices(tmp_path):
    text = Path(__file__).read_text("utf-8")
    (tmp_path / "step.py").write_text(text.split("PROGRAMS")[0], "utf-8")
    f, arguments, machine = PROGRAMS["trained"]
    shapes = [f"--arg=f32[{','.join(map(str, a.shape))}]" for a in arguments]
    target, out = f"{tmp_path / 'step.py'}:trained", tmp_path / "told.json"
    assert main(["explain", target, *shapes, "--mesh=data=8", f"--machine={machine}", f"--json={out}"]) == 0
    told = gshard.explain(f, *arguments, mesh=MESH, machine=machine).data(seconds=0)
    assert json.loads(out.read_text("utf-8"))["totals"]["seconds"] == told["totals"]["seconds"]


def test_what_does_not_fit_has_one_time_too():
    """Some of it is computed twice to fit: ``jit`` with the limit does that, too."""

    def deep(ws, x):
        x = gshard.split(x, 0, "data")
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.mean(x * x)

    arguments = [shape(128, 128)] * 8, shape(65536, 128)
    whole = gshard.search(jax.grad(deep), *arguments, mesh=MESH, machine="h100:1x8", budget_seconds=5)
    limit = int(whole.cost.peak * 0.6)
    found = gshard.search(
        jax.grad(deep), *arguments, mesh=MESH, machine="h100:1x8", memory_limit=limit, budget_seconds=5
    )
    assert found.best.fits
    runs = gshard.jit(jax.grad(deep), mesh=MESH, machine="h100:1x8", memory_limit=limit, plan=found.plan)
    told = gshard.explain(runs, *arguments)
    assert (told.spmd.recomputed is not None) == found.best.chosen.recomputed
    assert told.cost().seconds == found.cost.seconds == found.explain().cost().seconds
