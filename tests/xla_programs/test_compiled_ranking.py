"""The best plans of a search, compiled: the compiler's program decides, and both figures are shown."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard


def step(params, x):
    def loss(params):
        h = x
        for up, down in params:
            h = jnp.tanh(h @ up) @ down
        return jnp.mean(h**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))


def arguments():
    shape = jax.ShapeDtypeStruct
    return [(shape((256, 1024), jnp.float32), shape((1024, 256), jnp.float32))] * 2, shape((128, 256), jnp.float32)


def test_the_best_plans_are_compiled_and_ranked():
    found = gshard.search(step, *arguments(), mesh={"data": 8}, machine="h100:1x8", donate_argnums=0, compile_best=3)
    ranking = found.compiled
    assert len(ranking.plans) == 3
    times = [plan.cost.seconds for plan in ranking.plans]
    assert times == sorted(times)
    assert found.plan is ranking.best.priced.plan
    modelled = {(p.priced.cost.seconds, p.priced.cost.sent, p.priced.cost.peak) for p in ranking.plans}
    assert len(modelled) == 3, "equal plans count once"
    text = str(found)
    assert "as XLA compiled them for cpu, on h100:1x8" in text
    assert all(f"{plan.priced.cost.seconds * 1e3:.4g} ms" in text for plan in ranking.plans)


def test_figures_are_those_of_the_compiled_program():
    given = arguments()
    found = gshard.search(step, *given, mesh={"data": 8}, machine="h100:1x8", donate_argnums=0, compile_best=1)
    (plan,) = found.compiled.plans
    ours = gshard.jit(step, mesh=found.mesh, plan=found.plan, machine="h100:1x8", donate_argnums=0)
    compiled = ours.lower(*given).compile()
    explained = gshard.explain(compiled.as_text(), mesh=found.mesh, machine="h100:1x8")
    assert plan.cost.sent == explained.total_bytes
    assert plan.cost.seconds == pytest.approx(explained.cost().seconds)
    report = compiled.memory_analysis()
    held = report.argument_size_in_bytes + report.output_size_in_bytes - report.alias_size_in_bytes
    assert plan.cost.peak == held + report.temp_size_in_bytes
    assert plan.error == pytest.approx(explained.cost().seconds / found.cost.seconds)


def test_the_plan_that_is_returned_computes_the_same():
    rng = np.random.default_rng(0)
    params = [(rng.normal(size=(256, 1024)) / 16, rng.normal(size=(1024, 256)) / 32) for _ in range(2)]
    params = jax.tree.map(jnp.float32, params)
    x = jnp.float32(rng.normal(size=(128, 256)))
    found = gshard.search(step, params, x, mesh=8, machine="h100:1x8", compile_best=2)
    run = gshard.jit(step, mesh=found.mesh, plan=found.plan)
    for _ in range(3):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), run(params, x), jax.jit(step)(params, x))


def test_nothing_is_proven_of_a_plan_that_the_model_did_not_choose():
    found = gshard.search(step, *arguments(), mesh={"data": 8}, machine="h100:1x8", compile_best=3)
    plain = gshard.search(step, *arguments(), mesh={"data": 8}, machine="h100:1x8")
    assert plain.compiled is None
    is_same = found.cost.seconds == plain.cost.seconds
    assert found.gap == plain.gap if is_same else found.gap is None


@pytest.mark.parametrize(
    ("options", "hint"),
    [({"compile_best": 0}, "Give a positive number"), ({"compile_best": True}, "Give a positive number")],
)
def test_what_compiles_nothing(options, hint):
    with pytest.raises(gshard.ArgumentError, match="compile") as caught:
        gshard.search(step, *arguments(), mesh=8, machine="h100:1x8", **options)
    assert hint in (caught.value.hint or "")


def test_there_must_be_devices_to_compile_for():
    """An error before the search, which would be lost otherwise."""
    lines = []
    with pytest.raises(gshard.MeshError, match="XLA compiles for devices that exist: the mesh has 64, and there are 8"):
        gshard.search(
            step, *arguments(), mesh=gshard.Mesh.abstract(data=64), machine="h100:8x8", compile_best=1,
            progress=lines.append,
        )  # fmt: skip
    assert lines == []
