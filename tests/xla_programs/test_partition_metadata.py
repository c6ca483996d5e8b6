"""Plans as metadata of Flax's initializers: Flax reads the plan's shardings from models that have it."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

import gshard
from xla_programs.exported_models import MESHES, Perceptron, X, exported, linen_step, nnx_step, shortened, split_hidden


def specs_by_path(specs: Any) -> dict[str, P]:
    paths = jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda x: isinstance(x, P))
    return {jax.tree_util.keystr(k, simple=True, separator="/"): shortened(spec) for k, spec in paths}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.one_in(3)
def test_nnx_reads_the_plan_from_its_variables(mesh: dict[str, int]) -> None:
    step, state = nnx_step()
    plan = exported(step, state, X, mesh=mesh, in_shardings=(split_hidden(state, tuple(mesh)), P()))
    rows = dict(plan.partition_metadata("state").rows)
    assert rows.keys() == {"up/kernel", "down/kernel"}
    with nnx.use_eager_sharding(False):
        model = Perceptron(nnx.Rngs(0))
        for path, variable in nnx.to_flat_state(nnx.state(model)):
            if (names := rows.get("/".join(map(str, path)))) is not None:
                variable.set_metadata(out_sharding=names)
        read = specs_by_path(nnx.get_partition_spec(nnx.state(model)))
        wanted = {a.path.removeprefix("state/"): shortened(a.spec) for a in plan.arguments if a.path != "x"}
        assert {path.removesuffix("/value"): spec for path, spec in read.items()} == wanted
    devices = jax.make_mesh(tuple(mesh.values()), tuple(mesh), axis_types=(jax.sharding.AxisType.Auto,) * len(mesh))
    # The other way round: initializers with this metadata make arrays that are split so.
    init = nnx.initializers.lecun_normal()
    with jax.set_mesh(devices):
        made = nnx.Linear(
            64, 256, use_bias=False, kernel_init=nnx.with_partitioning(init, rows["up/kernel"]), rngs=nnx.Rngs(0)
        )
    assert shortened(made.kernel[...].sharding.spec) == wanted["up/kernel"]
    assert f"up/kernel: with_partitioning(init, {rows['up/kernel']})" in str(plan.partition_metadata("state"))


def test_linen_reads_the_plan_from_boxes() -> None:
    step, variables = linen_step()
    bare = nn.unbox(variables)
    split = split_hidden(bare, ("data", "model"))
    plan = exported(step, bare, X, mesh={"data": 2, "model": 4}, in_shardings=(split, P()))
    rows = dict(plan.partition_metadata("variables").rows)
    assert len(rows) == 2

    def boxed(path: Any, x: Any) -> Any:
        names = rows.get(jax.tree_util.keystr(path, simple=True, separator="/"))
        return x if names is None else nn.Partitioned(x, names=names)

    specs = nn.get_partition_spec(jax.tree_util.tree_map_with_path(boxed, nn.unbox(variables)))
    wanted = {a.path.removeprefix("variables/"): shortened(a.spec) for a in plan.arguments if a.path != "x"}
    assert specs_by_path(specs) == wanted


def test_arrays_outside_are_listed() -> None:
    step, state = nnx_step()
    plan = exported(step, state, X, mesh={"data": 8}, in_shardings=(split_hidden(state, ("data",)), P()))
    found = plan.partition_metadata("state/up")
    assert [path for path, _ in found.rows] == ["kernel"]
    assert [a.path for a in found.unsaid] == ["state/down/kernel"]
    assert found.compiled is plan.compiled
    with pytest.raises(gshard.ArgumentError, match="no argument is at 'sate'"):
        plan.partition_metadata("sate")
