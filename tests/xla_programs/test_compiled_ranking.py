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


RNG = np.random.default_rng(0)
PARAMS = [tuple(jnp.float32(RNG.normal(size=s) / 16) for s in ((256, 1024), (1024, 256))) for _ in range(2)]
ARGUMENTS = PARAMS, jnp.float32(RNG.normal(size=(128, 256)))
OPTIONS = {"mesh": {"data": 8}, "machine": "h100:1x8", "donate_argnums": 0}


def test_the_best_plans_are_compiled_and_ranked_and_the_first_one_runs():
    found = gshard.search(step, *ARGUMENTS, **OPTIONS, compile_best=3)
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
    plain = gshard.search(step, *ARGUMENTS, **OPTIONS)
    assert plain.compiled is None
    # Nothing is proven of a plan that the model did not choose.
    assert found.gap == (plain.gap if found.cost.seconds == plain.cost.seconds else None)
    # Figures are those of the compiled program.
    plan = ranking.plans[0]
    compiled = gshard.jit(step, plan=found.plan, **OPTIONS).lower(*ARGUMENTS).compile()
    explained = gshard.explain(compiled.as_text(), mesh=found.mesh, machine="h100:1x8")
    assert plan.cost.sent == explained.total_bytes
    assert plan.cost.seconds == pytest.approx(explained.cost().seconds)
    report = compiled.memory_analysis()
    held = report.argument_size_in_bytes + report.output_size_in_bytes - report.alias_size_in_bytes
    assert plan.cost.peak == held + report.temp_size_in_bytes
    assert plan.error == pytest.approx(explained.cost().seconds / found.cost.seconds)
    run, want = gshard.jit(step, mesh=found.mesh, plan=found.plan), jax.jit(step)(*ARGUMENTS)
    for _ in range(3):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), run(*ARGUMENTS), want)


@pytest.mark.parametrize("number", [0, True])
def test_what_compiles_nothing(number):
    with pytest.raises(gshard.ArgumentError, match="compile") as caught:
        gshard.search(step, *ARGUMENTS, mesh=8, machine="h100:1x8", compile_best=number)
    assert "Give a positive number" in (caught.value.hint or "")


def test_there_must_be_devices_to_compile_for():
    """An error before the search, which would be lost otherwise."""
    lines = []
    options = {"mesh": gshard.Mesh.abstract(data=64), "machine": "h100:8x8", "progress": lines.append}
    with pytest.raises(gshard.MeshError, match="XLA compiles for devices that exist: the mesh has 64, and there are 8"):
        gshard.search(step, *ARGUMENTS, compile_best=1, **options)
    assert lines == []
