"""Plans as rules of logical axis names: Flax reads from them what the plan says."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

import gshard
from xla_programs.exported_models import MESHES, X, exported, linen_step, shortened, specs_of, split_hidden

Arrays = dict[str, jax.ShapeDtypeStruct]


def by_flax(names: Any, rules: Any) -> list[Any]:
    specs = nn.logical_to_mesh(names, rules)
    return [shortened(s) for s in jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_flax_gives_boxed_arrays_of_scanned_layers_the_shardings_of_the_plan(mesh: dict[str, int]) -> None:
    step, variables = linen_step()
    plan = exported(step, variables, X, mesh=mesh, in_shardings=(split_hidden(variables, tuple(mesh)), P()))
    assert sum(any(a.axes) for a in plan.arguments) >= 2
    found = plan.logical_axis_rules()
    specs = by_flax(nn.get_partition_spec(variables), found.rows)
    assert specs == [shortened(a.spec) for a in plan.arguments if a.path.startswith("variables")]
    assert not found.changed
    assert found.compiled is plan.compiled
    devices = jax.make_mesh(tuple(mesh.values()), tuple(mesh), axis_types=(jax.sharding.AxisType.Auto,) * len(mesh))
    # Flax's own function of the same names gives shardings with which XLA sends what the rows say.
    given = nn.logical_to_mesh_sharding(nn.get_partition_spec(variables), devices, found.rows)
    arrays = nn.unbox(variables)
    (out, _), x_spec = plan.named(devices)[1], plan.named(devices)[0][1]

    def unboxed(arrays: Any, x: Any) -> Any:
        boxed = jax.tree.unflatten(jax.tree.structure(variables), jax.tree.leaves(arrays))
        return tuple(map(nn.unbox, step(boxed, x)))

    jitted = jax.jit(unboxed, in_shardings=(given, x_spec), out_shardings=(nn.unbox(out), None))
    assert gshard.explain(jitted.lower(arrays, X).compile()).bytes_by_kind == found.compiled.bytes_by_kind


def test_names_come_as_tuples_as_specs_as_words_and_by_path() -> None:
    step, variables = linen_step()
    bare = nn.unbox(variables)
    plan = exported(step, bare, X, mesh={"data": 8}, in_shardings=(split_hidden(bare, ("data",)), P()))
    tuples = {"params": {"blocks": {"up": {"kernel": ("layers", "embed", "mlp")},
                                    "down": {"kernel": ("layers", "mlp", "embed")}}}}  # fmt: skip
    words = jax.tree.map(" ".join, tuples, is_leaf=lambda x: isinstance(x, tuple))
    by_path = {"**/up/kernel": "layers embed mlp", "**/down/kernel": ("layers", "mlp", "embed")}
    ways = [(tuples, None), (words, None), (nn.get_partition_spec(variables), None), (variables, None), by_path]
    rows = [plan.logical_axis_rules(names).rows for names in ways]
    assert rows[0] == (("mlp", "data"), ("layers", None), ("embed", None))
    assert all(one == rows[0] for one in rows)
    with pytest.raises(gshard.ShardingError, match="no array has logical names"):
        plan.logical_axis_rules()
    with pytest.raises(gshard.ShardingError, match="3 dimensions has 2 names"):
        plan.logical_axis_rules({"**/up/kernel": ("embed", "mlp")})


def test_names_of_boxed_arrays_are_given_by_the_path_of_the_box() -> None:
    step, variables = linen_step()
    plan = exported(step, variables, X, mesh={"data": 8}, in_shardings=(split_hidden(variables, ("data",)), P()))
    by_path = {"variables/params/blocks/*/kernel": "layers _ _"}
    with pytest.raises(gshard.ShardingError, match="is split and has no name"):
        plan.logical_axis_rules(by_path)
    by_path = {"**/up/kernel": "layers in mlp", "**/down/kernel": "layers mlp out"}
    assert plan.logical_axis_rules(by_path).rows == (("mlp", "data"), ("layers", None), ("out", None), ("in", None))


def test_names_of_gshard_name_are_read() -> None:
    def named(w: jax.Array, x: jax.Array) -> jax.Array:
        return gshard.name(jnp.tanh(x @ w), "batch mlp") * 2

    arrays = jax.ShapeDtypeStruct((64, 2048), "float32"), X
    made = gshard.jit(
        named, mesh={"data": 8}, layout=gshard.Layout(mlp="data"), names={"w": "embed mlp", "x": "batch embed"}
    )
    found = gshard.search(made, *arrays, machine="h100:1x8", progress=False, budget_seconds=1e-3)
    assert gshard.export_plan(found).logical_axis_rules().rows == (("mlp", "data"), ("embed", None), ("batch", None))


def split_by_hand(specs: dict[str, P], mesh: dict[str, int]) -> gshard.ExportedPlan:
    """A plan in which arguments are split so."""
    arrays: Arrays = {name: jax.ShapeDtypeStruct((64,) * len(spec), "float32") for name, spec in specs.items()}

    def scaled(arrays: Any) -> Any:
        return jax.tree.map(lambda x: x * 2, arrays)

    plan = exported(scaled, arrays, mesh=mesh, in_shardings=(specs,))
    assert specs_of(plan) == {f"arrays/{name}": shortened(spec) for name, spec in specs.items()}
    return plan


def test_the_order_of_rules_decides_where_two_names_want_one_axis() -> None:
    plan = split_by_hand({"u": P("data", None), "v": P("data", None), "w": P(None, "data")}, {"data": 8})
    names = {"u": ("vocab", "embed"), "v": ("embed", "mlp"), "w": ("heads", "mlp")}
    found = plan.logical_axis_rules((names,))
    order = [name for name, axes in found.rows if axes]
    assert order.index("vocab") < order.index("embed") < order.index("mlp")
    assert by_flax({k: P(*n) for k, n in names.items()}, found.rows) == [P("data"), P("data"), P(None, "data")]


def test_rules_are_found_for_every_plan_that_rules_give() -> None:
    """Random rules give random arrays shardings; the rules that are found give the same ones."""
    rng = np.random.default_rng(0)
    words, axes = [f"n{i}" for i in range(5)], ["a", "b", "c", ("a", "b"), ("b", "c"), None]
    names: dict[str, tuple[str, ...]] = {}
    specs: dict[str, P] = {}
    cases = 24
    for case in range(cases):
        rules = [(str(rng.choice(words)), axes[rng.integers(len(axes))]) for _ in range(7)]
        for i in range(6):
            said = tuple(map(str, rng.choice(words, size=rng.integers(1, 4), replace=False)))
            names[f"case{case}_{i}"], specs[f"case{case}_{i}"] = said, nn.logical_to_mesh_axes(said, rules)
    plan = split_by_hand(specs, {"a": 2, "b": 2, "c": 2})
    ordered = 0
    for case in range(cases):
        own = {k: n if k.startswith(f"case{case}_") else None for k, n in names.items()}
        found = plan.logical_axis_rules((own,))
        said = {k: n for k, n in own.items() if n is not None}
        given = by_flax({k: P(*n) for k, n in said.items()}, found.rows)
        assert given == [shortened(specs[k]) for k in sorted(said)], case
        ordered += len({name for name, _ in found.rows}) < len(found.rows)
    assert ordered, "in some case a name has several rules"


def test_a_contradiction_is_refused_or_settled_by_bytes() -> None:
    plan = split_by_hand({"big": P("data", None, None), "small": P(None, None)}, {"data": 8})
    names = ({"big": ("embed", "mlp", "more"), "small": ("embed", "heads")},)
    with pytest.raises(gshard.ShardingError, match="no rules of logical names") as refused:
        plan.logical_axis_rules(names)
    assert "'embed' over 'data': arrays/big" in str(refused.value)
    assert "'embed' over nothing: arrays/small" in str(refused.value)
    found = plan.logical_axis_rules(names, nearest=True)
    assert dict(found.rows)["embed"] == "data"
    assert [(row.argument.path, row.spec) for row in found.changed] == [("arrays/small", P("data", None))]
    assert found.changed[0].more == -64 * 64 * 4 * 7 // 8
    assert "arrays/small" in str(found)
    assert found.compiled is not plan.compiled, "it was compiled with what the rules give"
    assert found.compiled.total_bytes > 0, "the small result is gathered"


def test_what_is_split_stays_split_if_either_of_two_is_wrong() -> None:
    plan = split_by_hand({"v": P("data", None), "w": P(None, "data")}, {"data": 8})
    found = plan.logical_axis_rules(({"v": ("embed", "out"), "w": ("embed", "out")},), nearest=True)
    assert [axes for _, axes in found.rows] == ["data", "data"]
    assert [row.more for row in found.changed] == [0], "one is as planned, the other split along its other dimension"


def test_what_cannot_be_named_is_said() -> None:
    plan = split_by_hand({"v": P("data", None), "w": P(None, "data")}, {"data": 8})
    with pytest.raises(gshard.ShardingError, match="dimension 0 is split and has no name"):
        plan.logical_axis_rules(({"v": (None, "mlp"), "w": ("embed", "vocab")},))
    with pytest.raises(gshard.ShardingError, match="two dimensions of arrays/v are called 'embed'"):
        plan.logical_axis_rules(({"v": ("embed", "embed"), "w": None},))
    found = plan.logical_axis_rules(({"v": ("mlp", "embed"), "w": None},))
    assert [a.path for a in found.unsaid] == ["arrays/w"]
    assert "split by the plan, without a row" in str(found)
    settled = plan.logical_axis_rules(({"v": (None, "mlp"), "w": ("embed", "vocab")},), nearest=True)
    assert [(row.argument.path, row.more) for row in settled.changed] == [("arrays/v", 64 * 64 * 4 * 7 // 8)]
