"""What a search promises of time, signals, progress and proofs."""

import dataclasses
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import gshard
from gshard.core.time_budget import OutOfTime, Progress, TimeBudget, until
from gshard.search.find import MeshSearch
from gshard.search.presets import Preset
from gshard.solver.solve import solve
from random_problems import layered
from search.test_search import RESIDUAL, donated, shape, small, trained

EIGHT, H100 = gshard.Mesh.abstract(data=8), "h100:1x8"
HEADS, WIDE = 4, 64
TESTS = Path(__file__).resolve().parents[1]


def attention(x, w):
    q, k, v = (a.reshape(*a.shape[:2], HEADS, -1).swapaxes(1, 2) for a in jnp.split(x @ w["qkv"] + w["bias"], 3, -1))
    scores = jnp.where(jnp.tril(jnp.ones((x.shape[1],) * 2, bool)), q @ k.swapaxes(2, 3), -1e9)
    return x + (jax.nn.softmax(scores) @ v).swapaxes(1, 2).reshape(x.shape) @ w["out"]


def step(state, x):
    """A training step whose split state takes gshard many times as long to plan as the step without a mark."""

    def loss(layers):
        y = x
        for w in layers:
            y = attention(y, w)
            y = y + jax.nn.gelu(y @ w["up"]) @ w["down"]
        return jnp.mean(y**2)

    weights, momentum = state
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, jax.grad(loss)(weights))
    return jax.tree.map(lambda w, m: w - 0.1 * m, weights, momentum), momentum


def arguments():
    one = {
        "qkv": shape(WIDE, 3 * WIDE), "bias": shape(3 * WIDE), "out": shape(WIDE, WIDE),
        "up": shape(WIDE, 4 * WIDE), "down": shape(4 * WIDE, WIDE),
    }  # fmt: skip
    return ([one], [one]), shape(16, 32, WIDE)


def searched(seconds, **options):
    return gshard.search(donated(step), *arguments(), mesh=EIGHT, machine=H100, budget_seconds=seconds, **options)


def test_a_budget_is_of_all_that_a_search_does():
    """Presets, too; what is returned is never worse than the expected ones."""
    least = searched(1e-6)
    expected = ["as it is marked", "data parallel", "data parallel, state split (ZeRO, FSDP)"]
    assert [other.name for other in least.best.others] == expected
    assert (least.best.searched, least.gap) == (None, None)
    assert least.plan.shardings
    assert "nothing is proven: the search did not get as far" in str(least)
    assert "the preset 'data parallel'" in least.left_out
    assert "the problem of mesh (data=8)" in least.left_out
    assert "not tried, or cut: the preset" in str(least)


def test_a_step_that_is_out_of_time_is_cut_and_named():
    problem = layered(0)
    budget = TimeBudget.of(1e-9, False)
    assert budget.attempt("solving", lambda: solve(problem)) is None, "it does not begin"
    late = dataclasses.replace(TimeBudget.of(60, False), left_out=budget.left_out)

    def solved():
        with until(0.0):
            solve(problem)
        raise AssertionError("reduce checks the deadline")

    assert late.attempt("cut", solved) is None
    assert budget.left_out == ["solving", "cut"]
    assert budget.attempt("the least", lambda: solve(problem), always=True).states.size
    assert budget.left_out == ["solving", "cut"]
    with until(0.0), pytest.raises(OutOfTime):
        solve(problem)


def test_the_searched_plan_is_priced_in_the_model_that_has_the_bound():
    """What is proven is of that plan only: nothing of a preset."""
    mesh = gshard.Mesh.abstract(x=2, y=4)
    found = gshard.search(donated(trained(False)), *RESIDUAL, mesh=mesh, machine=H100)
    best = found.best
    assert best.predicted == pytest.approx(best.solution.value, rel=1e-9)
    assert best.predicted >= best.bound * (1 - 1e-9)
    for other in best.others:
        alone = dataclasses.replace(found, best=dataclasses.replace(best, chosen=other, predicted=None))
        assert alone.gap is None
        assert "nothing is proven of this plan: it is not the plan that was searched" in str(alone)
        assert f"this is the plan of '{other.name}'; the searched plan takes" in str(alone)


def test_nothing_is_said_to_be_proven_that_is_not():
    found = gshard.search(small, shape(64, 64), shape(64, 64), mesh=gshard.Mesh.abstract(x=8), machine=H100)
    assert found.gap == 0
    assert "optimal for the simplified model" in str(found)
    for change in ({"predicted": None}, {"bound": 0.0}, {"limit": 1.0}):
        other = dataclasses.replace(found, best=dataclasses.replace(found.best, **change))
        assert other.gap is None
        assert "optimal" not in str(other)
    chosen = dataclasses.replace(found.best.chosen, recomputed=True)
    other = dataclasses.replace(found, best=dataclasses.replace(found.best, chosen=chosen, predicted=None))
    assert "nothing is proven of this plan: the simplified model has no recomputed values" in str(other)


def test_a_candidate_that_fails_ends_nothing(monkeypatch):
    """Presets, meshes and problems; what fails by bytes is not tried by time."""
    planned, posed = Preset.planned, MeshSearch._posed

    def preset_fails(self, *args):
        if "ZeRO" in self.name:
            raise ValueError("shapes differ\nin many ways")
        return planned(self, *args)

    def problem_fails(self, *args):
        if dict(self.mesh.axes).get("model") == 2:
            raise KeyError("no such axis")
        return posed(self, *args)

    monkeypatch.setattr(Preset, "planned", preset_fails)
    monkeypatch.setattr(MeshSearch, "_posed", problem_fails)
    found = gshard.search(small, shape(64, 64), shape(64, 64), mesh=8, machine=H100, progress=False)
    assert found.failed == (
        "the preset 'data parallel, state split (ZeRO, FSDP)', planned by bytes: ValueError: shapes differ",
        "the problem of mesh (data=4, model=2): KeyError: 'no such axis'",
    )
    assert f"not tried, because of an error: {'; '.join(found.failed)}" in str(found)
    assert not any("ZeRO" in preset.name for preset in found.presets)
    monkeypatch.setattr(Preset, "planned", lambda *args: 1 / 0)
    assert gshard.search(small, shape(64, 64), shape(64, 64), mesh=EIGHT, machine=H100).gap == 0


def test_progress_is_printed_where_a_search_takes_long(capsys):
    now, late = time.monotonic(), time.monotonic() - 3
    by_default, from_the_first = Progress.of(None), Progress.of(True)
    for progress, since in ((by_default, now), (from_the_first, now), (Progress.of(False), late)):
        progress.since = since
        progress.step("the problem")
    assert capsys.readouterr().err == "gshard.search   0.0 s: the problem\n"
    by_default.better("data parallel: 3 ms")
    assert capsys.readouterr().err == "", "it has not taken two seconds yet"
    by_default.since, by_default.end = late, late + 60
    by_default.beat()
    printed = capsys.readouterr().err
    assert (
        printed == "gshard.search   3.0 s: still the problem (ends in 57 s at most); best so far: data parallel: 3 ms\n"
    )
    by_default.beat()
    assert capsys.readouterr().err == "", "one line in ten seconds is enough"


SIGNALS = """
import os, signal, sys
import gshard
from search.test_promises import searched
def own(number, frame):
    print("own handler")
def stopped_by(number, at, **options):
    def heard(line):
        if at in f"{line}.":
            os.kill(os.getpid(), number)
    return searched(600.0, progress=heard, **options)
signal.signal(signal.SIGTERM, own)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored in the background
found = stopped_by(signal.SIGTERM, "the preset 'data parallel'.")
print(found.stopped == signal.SIGTERM, found.best.searched is not None, signal.getsignal(signal.SIGTERM) is own)
print([line for line in str(found).splitlines() if "ended the search" in line][0].split(" after ")[0])
found = stopped_by(signal.SIGINT, "solving for mesh")
print(found.stopped == signal.SIGINT, [other.name for other in found.best.others][:3], found.gap)
try:
    stopped_by(signal.SIGINT, "tracing")
except KeyboardInterrupt:
    print("nothing was found yet")
signal.signal(signal.SIGTERM, signal.SIG_DFL)
print("last", flush=True)
stopped_by(signal.SIGTERM, "tracing")
print("not reached")
"""


def test_signals_end_a_search_with_the_best_plan_so_far(tmp_path):
    done = subprocess.run([sys.executable, "-c", SIGNALS], capture_output=True, text=True, cwd=TESTS, check=False)
    assert done.stdout.splitlines() == [
        "own handler", "True True True", "SIGTERM ended the search",
        "True ['as it is marked', 'data parallel', 'data parallel, state split (ZeRO, FSDP)'] None",
        "nothing was found yet", "last",
    ], done.stderr  # fmt: skip
    assert done.returncode == -signal.SIGTERM, "as without a search"


def test_the_command_line_writes_what_was_found_before_a_signal(tmp_path):
    command = [
        sys.executable, "-m", "gshard", "search", "search.test_promises:example", "--mesh", "data=8",
        "--machine", H100, "--save", str(tmp_path / "plan.json"),
    ]  # fmt: skip
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": TESTS}
    with subprocess.Popen(command, **pipes) as running:
        for line in running.stderr:
            if "the preset" in line:
                running.send_signal(signal.SIGTERM)
                break
        out, _ = running.communicate()
    assert running.returncode == 128 + signal.SIGTERM
    assert "SIGTERM ended the search" in out
    assert gshard.SavedPlan.load(tmp_path / "plan.json").axes == (("data", 8),)


def example():
    return donated(step), *arguments()


def scaled(kind, w, x, *, by=1.0):
    assert kind in ("product", "sum")
    return w - by * (x.sum(0) if kind == "sum" else jnp.tanh(x @ w).sum(0)), x


def test_static_and_donated_arguments_are_those_of_jit():
    """Errors do not show gshard's own frames."""
    given = {"static_argnums": 0, "static_argnames": "by", "donate_argnums": 1}
    w, x = shape(64, 64), shape(4096, 64)
    found = gshard.search(jax.jit(scaled, **given), "product", w, x, by=0.5, mesh=EIGHT, machine=H100)
    assert found.donated == (0,)
    assert len(found.in_shardings) == 2, "a static argument has no sharding"
    jitted = gshard.jit(scaled, mesh=EIGHT, machine=H100, plan=found.plan, **given)
    assert list(jitted.lower("product", w, x, by=0.5).plan.shardings.values()) == list(found.plan.shardings.values())
    by_name = {"static_argnames": ("kind", "by"), "donate_argnames": "w"}
    again = gshard.search(jax.jit(scaled, **by_name), "product", w, x, by=0.5, mesh=EIGHT, machine=H100)
    assert (again.donated, again.cost.seconds) == ((0,), found.cost.seconds)
    kept = gshard.explain(jax.jit(scaled, static_argnums=0), "product", w, x, mesh=EIGHT)
    told = gshard.explain(jax.jit(scaled, **given), "product", w, x, mesh=EIGHT)
    assert told.cost(H100).peak < kept.cost(H100).peak, "the result takes the donated argument's memory"
    for function in (gshard.search, gshard.explain):
        with pytest.raises(TypeError) as raised:
            function(small, w, x, mesh=EIGHT, machine=H100, nobody=1)
        shown = [Path(entry.path) for entry in raised.traceback]
        assert shown == [Path(__file__)], "no frames of gshard"
