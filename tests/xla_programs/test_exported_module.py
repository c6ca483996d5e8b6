"""Plans as StableHLO: the text parses and compiles, and the module runs as the function does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P
from jaxlib.mlir import ir

import gshard
from xla_programs.exported_models import MESHES, X, exported, linen_step, split_hidden


def parsed(text):
    """The module that a text is; in a context of the dialects that JAX writes."""
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        assert module.operation.verify()
        return str(module)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.one_in(3)
def test_the_module_is_for_all_devices_with_the_shardings_of_the_plan(mesh):
    step, variables = linen_step()
    plan = exported(step, variables, X, mesh=mesh, in_shardings=(split_hidden(variables, tuple(mesh)), P()))
    text = plan.stablehlo()
    axes = ", ".join(f'"{name}"={size}' for name, size in mesh.items())
    assert f"sdy.mesh @mesh = <[{axes}]>" in text
    assert "mhlo.num_partitions = 8" in text
    dims = ", ".join(f'"{name}"' for name in mesh)
    assert f"sdy.sharding<@mesh, [{{}}, {{}}, {{{dims}}}]>" in text
    assert "func.func public @main" in parsed(text)
    module = plan.jax_export()
    assert module.nr_devices == 8
    assert module.in_tree == jax.tree.structure(((variables, X), {}))


def test_the_module_runs_as_the_function_and_holds_what_it_closes_over():
    rng = np.random.default_rng(0)
    table = jnp.float32(rng.normal(size=(64, 256)))

    def step(w, x, *, scale):
        h = jnp.tanh(x @ table) @ w
        return {"h": h * scale, "parts": (h.sum(), jnp.int32(3))}

    given = jnp.float32(rng.normal(size=(256, 64))), jnp.float32(rng.normal(size=(64, 64)))
    scale = jnp.float32(rng.normal(size=(64,)))
    devices = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = P("model", None), P("data", None)
    placed = [jax.device_put(a, jax.NamedSharding(devices, s)) for a, s in zip(given, specs, strict=True)]
    found = gshard.search(
        step, *placed, scale=scale, mesh=devices, machine="h100:1x8", progress=False, budget_seconds=1e-3
    )
    plan = gshard.export_plan(found)
    module = plan.jax_export()
    assert sum("captured" in name for name in found.plan.program.names) == 1
    assert len(module.in_avals) == 3
    wanted = step(*given, scale=scale)
    for _ in range(3):
        ran = jax.jit(lambda *args, **kwargs: module.call(*args, **kwargs))(*placed, scale=scale)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ran, wanted)
    compiled = (
        jax.jit(module.call).lower(*placed, scale=jax.device_put(scale, jax.NamedSharding(devices, P()))).compile()
    )
    assert gshard.explain(compiled).bytes_by_kind == plan.compiled.bytes_by_kind
    assert "table" not in plan.arguments


def test_a_constraint_on_every_value_is_in_the_module():
    """What few lines of Python do not say, the module does."""

    def step(x, w):
        h = gshard.split(jnp.tanh(x @ w), 0, "data") @ w
        return jnp.cumsum(gshard.shard(h, P(None, "model")), 1) @ w

    x, w = jax.ShapeDtypeStruct((512, 512), "float32"), jax.ShapeDtypeStruct((512, 512), "float32")
    plan = exported(step, x, w, mesh={"data": 2, "model": 4}, in_shardings=(P(), P()), out_shardings=P())
    assert plan.everywhere
    assert plan.stablehlo().count("sdy.sharding_constraint") >= 3
    parsed(plan.stablehlo())


def test_serialised_modules_come_back():
    pytest.importorskip("flatbuffers", reason="jax.export needs it to write files")
    step, variables = linen_step()
    bare = nn.unbox(variables)
    plan = exported(step, bare, X, mesh={"data": 8}, in_shardings=(split_hidden(bare, ("data",)), P()))
    again = jax.export.deserialize(plan.jax_export().serialize())
    assert again.mlir_module() == plan.stablehlo()
