"""Plans as rows of Keras's LayoutMap, looked up as each version of Keras does; and by Keras, where it is installed."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from xla_programs.exported_models import MESHES, X, exported, shortened, split_hidden

SHAPES = {
    "model/block_1/up.kernel": (64, 256), "model/block_1/down.kernel": (256, 64),
    "model/block_2/up.kernel": (64, 256), "model/block_2/down.kernel": (256, 64),
    "model/block_2/up.kernel_bias": (256,), "model/block_12/scale": (64,),
}  # fmt: skip


def step(params: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    def loss(params: dict[str, jax.Array]) -> jax.Array:
        h = jnp.tanh(x @ params["model/block_1/up.kernel"]) @ params["model/block_1/down.kernel"]
        h = jnp.tanh(h @ params["model/block_2/up.kernel"] + params["model/block_2/up.kernel_bias"])
        return jnp.mean((h @ params["model/block_2/down.kernel"] * params["model/block_12/scale"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value


def plan_on(mesh: Any) -> gshard.ExportedPlan:
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in SHAPES.items()}
    return exported(step, params, X, mesh=mesh, in_shardings=(split_hidden(params, tuple(mesh)), P()))


def looked_up(rows: Sequence[tuple[str, Any]], path: str) -> Any:
    """What a variable gets: whole paths or parts of them, the first row or the only one, in all versions the same."""
    ways = [[axes for key, axes in rows if match(key, path)] for match in (re.search, re.match, re.fullmatch)]
    assert len(ways[0]) <= 1, path
    assert ways[0] == ways[1] == ways[2]
    return P(*ways[0][0]) if ways[0] else P()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_variable_has_one_row_with_the_sharding_of_the_plan(mesh: dict[str, int]) -> None:
    plan = plan_on(mesh)
    found = plan.layout_map(below="params", nearest=True)
    own = {a.path.removeprefix("params/"): a for a in plan.arguments if a.path.startswith("params/")}
    assert own.keys() == SHAPES.keys()
    changed = {row.argument.path.removeprefix("params/"): row.spec for row in found.changed}
    for path, argument in own.items():
        wanted = changed.get(path, argument.spec)
        assert shortened(looked_up(found.rows, path)) == shortened(wanted)
        assert (path in changed) == any(len(axes) > 1 for axes in argument.axes)
    assert looked_up(found.rows, "other/model/block_1/up.kernel") == P()
    assert looked_up(found.rows, "model/block_1/upXkernel") == P()
    assert f"DeviceMesh({tuple(mesh.values())}, {tuple(mesh)})" in found.code


def test_alike_paths_have_one_row() -> None:
    found = plan_on({"data": 8}).layout_map(below="params")
    assert dict(found.rows)[r"^model/block_\d+/up\.kernel$"] == (None, "data")
    assert len(found.rows) < len(SHAPES)
    assert "layout_map[r\"^model/block_\\d+/up\\.kernel$\"] = (None, 'data')" in found.code
    assert not found.changed


def test_paths_are_given_for_arrays() -> None:
    plan = plan_on({"data": 8})
    own = {name: f"net/{i}" for i, name in enumerate(SHAPES)}
    found = plan.layout_map((own, None))
    assert {key for key, _ in found.rows} <= {f"^net/{i}$" for i in range(6)}
    assert found.compiled is plan.compiled
    with pytest.raises(gshard.ArgumentError, match="in the structure of the positional arguments"):
        plan.layout_map((own,))
    with pytest.raises(gshard.ArgumentError, match="split otherwise"):
        plan.layout_map(({name: "same" for name in SHAPES}, None))
    with pytest.raises(gshard.ArgumentError, match="no argument is at 'parms'"):
        plan.layout_map(below="parms")


def test_several_axes_of_one_dimension_are_refused() -> None:
    """Keras has no words for it; the nearest takes the largest axis, and is compiled with it."""
    plan = plan_on({"data": 2, "model": 4})
    with pytest.raises(gshard.ShardingError, match="the plan splits some over several"):
        plan.layout_map(below="params")
    found = plan.layout_map(below="params", nearest=True)
    assert {axis for _, axes in found.rows for axis in axes} <= {None, "data", "model"}
    assert found.changed
    assert all(row.more > 0 for row in found.changed)
    assert found.compiled is not plan.compiled


KERAS = """
import keras, jax
{code}
{paths}
distribution = keras.distribution.ModelParallel(layout_map=layout_map)
keras.distribution.set_distribution(distribution)
inputs = keras.Input((64,), batch_size=64)
h = keras.layers.Dense(256, activation="gelu", name="up_1")(inputs)
h = keras.layers.Dense(64, name="down_1")(h)
h = keras.layers.Dense(256, activation="gelu", name="up_2")(h)
model = keras.Model(inputs, keras.layers.Dense(64, name="down_2")(h))
for variable in model.variables:
    spec = tuple(variable.value.sharding.spec)
    spec = spec + (None,) * (len(variable.shape) - len(spec))
    assert spec == paths[variable.path], (variable.path, spec)
model.compile(optimizer="adam", loss="mse")
import numpy as np
x = np.linspace(-1, 1, 64 * 64).reshape(64, 64).astype("float32")
assert np.isfinite(model.fit(x, x, batch_size=64, epochs=2, verbose=0).history["loss"]).all()
for variable in model.variables:
    spec = tuple(variable.value.sharding.spec)
    assert spec + (None,) * (len(variable.shape) - len(spec)) == paths[variable.path], "after training"
print("all as planned")
"""
LAYERS = {"up_1": (64, 256), "down_1": (256, 64), "up_2": (64, 256), "down_2": (256, 64)}


def keras_program() -> str:
    """A program in which Keras trains a model with the rows of a plan, and compares the shardings of its variables."""
    shapes = {f"{n}/{kind}": s if kind == "kernel" else s[1:] for n, s in LAYERS.items() for kind in ("kernel", "bias")}

    def layers(params: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        def loss(params: dict[str, jax.Array]) -> jax.Array:
            h = x
            for name in LAYERS:
                h = h @ params[f"{name}/kernel"] + params[f"{name}/bias"]
                h = jax.nn.gelu(h) if name.startswith("up") else h
            return jnp.mean((h - x) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value

    arrays = {path: jax.ShapeDtypeStruct(shape, "float32") for path, shape in shapes.items()}
    plan = exported(layers, arrays, X, mesh={"model": 8}, in_shardings=(split_hidden(arrays, ("model",)), P()))
    found = plan.layout_map(below="params")
    assert found.rows
    paths = {a.path.removeprefix("params/"): tuple(a.spec) for a in plan.arguments if a.path != "x"}
    return KERAS.format(code=found.code, paths=f"paths = {paths}")


def test_keras_gives_its_variables_these_shardings() -> None:
    """With Keras itself on JAX; without it what the program needs of ``LayoutMap`` is that of ``looked_up``."""
    program = keras_program()
    if importlib.util.find_spec("keras") is None:
        values: dict[str, Any] = {}
        rows = [line for line in program.splitlines() if line.startswith(("layout_map[", "paths ="))]
        values["layout_map"] = {}
        exec("\n".join(rows), values)
        for path, spec in values["paths"].items():
            assert shortened(looked_up(list(values["layout_map"].items()), path)) == shortened(spec)
        return
    flags = "--xla_force_host_platform_device_count=8"
    env = {**os.environ, "KERAS_BACKEND": "jax", "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert "all as planned" in ran.stdout, ran.stderr
