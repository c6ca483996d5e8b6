"""Plans as a change of the user's files: git applies it, and jax.jit then runs the plan."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

import gshard
from gshard.core.program import format_bytes
from search.test_patch import loaded
from xla_programs.exported_models import MESHES, exported

STEP = '''"""A training step."""

{imports}


def loss(params, x):
    h = jnp.tanh(x @ params["up"])
    return jnp.mean((h @ params["down"]) ** 2)


{decorator}
def step(params, x):
    value, gradients = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value
{after}
'''
USUAL = "import jax\nimport jax.numpy as jnp"
FORMS = {
    "a decorator": (USUAL, "@jax.jit", ""),
    "a call of a decorator": (USUAL, "@jax.jit(donate_argnums=0)", ""),
    "a partial": ("import functools\n\n" + USUAL, "@functools.partial(\n    jax.jit,\n    donate_argnums=(0,),\n)", ""),
    "a call": (USUAL, "", "\n\nstep = jax.jit(step)"),
    "an imported jit": ("import jax\nimport jax.numpy as jnp\nfrom jax import jit", "@jit", ""),
    "another P": (USUAL + "\n\nP = 3.5", "@jax.jit", ""),
    "jax under another name": ("import jax as j\nimport jax\nimport jax.numpy as jnp", "@jax.jit", ""),
    "a spec is there": (USUAL + "\nfrom jax.sharding import PartitionSpec as P", "@jax.jit", ""),
}
Params = dict[str, Any]


def arrays(up: tuple[int, int] = (64, 256)) -> tuple[Params, Any]:
    rng = np.random.default_rng(0)
    params = {"up": jnp.float32(rng.normal(size=up) / 8), "down": jnp.float32(rng.normal(size=up[::-1]) / 16)}
    return params, jnp.float32(rng.normal(size=(64, up[0])))


def jax_mesh(mesh: dict[str, int]) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(mesh.values()), tuple(mesh), axis_types=(jax.sharding.AxisType.Auto,) * len(mesh))


def plain(f: Any) -> Any:
    """The function that the user jitted."""
    return getattr(f, "__wrapped__", f)


def applied(folder: Path, patch: str, name: str) -> Any:
    """The module after the patch."""
    (folder / "plan.diff").write_text(patch)
    subprocess.run(["git", "apply", "plan.diff"], cwd=folder, check=True)
    return loaded(folder / "train.py", name)


def sent(jitted: Any, *args: Any, **kwargs: Any) -> dict[str, int]:
    return gshard.explain(jitted.lower(*args, **kwargs).compile()).bytes_by_kind


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.one_in(3)
def test_the_patched_file_runs_the_plan(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mesh = MESHES[sorted(FORMS).index(form) % 3]
    imports, decorator, after = FORMS[form]
    (tmp_path / "train.py").write_text(STEP.format(imports=imports, decorator=decorator, after=after))
    before = loaded(tmp_path / "train.py", "train_before").step
    split, given = tuple(mesh), arrays()
    specs = ({"up": P(None, split), "down": P(split, None)}, P())
    plan = exported(plain(before), *given, mesh=mesh, in_shardings=specs)
    patch = plan.patch()
    assert "\n@@" in patch
    assert "give jax.jit" not in patch
    wanted = plain(before)(*arrays())
    step = applied(tmp_path, patch, "train_after").step
    with jax.set_mesh(jax_mesh(mesh)):
        assert sent(step, *given) == plan.compiled.bytes_by_kind
        for _ in range(3):
            found = step(*jax.tree.map(jax.device_put, given, specs, is_leaf=lambda x: isinstance(x, jax.Array)))
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, wanted)
    assert found[0]["up"].sharding.spec == P(None, split)


INSIDE = '''"""Values inside."""

import jax
import jax.numpy as jnp

import gshard


@jax.jit
def step(x, w):
    h = jnp.tanh(x @ w)
    h = gshard.split(h, 0, "data")
    return gshard.shard(jnp.sin(h) @ w, jax.P("data", None))
'''


def test_marks_inside_become_constraints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments come whole, so that only marks split the products; under jax.jit marks of gshard's say nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(INSIDE)
    before = loaded(tmp_path / "train.py", "inside_before").step
    x, w = jnp.ones((512, 512)) / 64, jnp.ones((512, 512)) / 64
    mesh = {"data": 8}
    plan = exported(plain(before), x, w, mesh=mesh, in_shardings=(P(), P()), out_shardings=P())
    assert list(plan.tried) == ["shardings alone", "the function's marks"]
    assert plan.tried["shardings alone"] == 0, "every device computes everything"
    assert plan.follows_plan
    assert len(plan.constraints) == 2
    assert "with_sharding_constraint(x, P('data', None))" in str(plan)
    patch = plan.patch()
    assert "+    h = jax.lax.with_sharding_constraint(h, P('data', None))" in patch
    assert "+    return jax.lax.with_sharding_constraint(" in patch
    step = applied(tmp_path, patch, "inside_after").step
    with jax.set_mesh(jax_mesh(mesh)):
        found = gshard.explain(step.lower(x, w).compile())
        np.testing.assert_allclose(step(x, w), plain(before)(x, w), rtol=1e-5)
    assert found.bytes_by_kind == plan.compiled.bytes_by_kind
    assert f"XLA sends {format_bytes(found.total_bytes)}, " in patch


def test_repeated_products_are_told() -> None:
    """What XLA repeats on every device sends nothing, and is not what the plan does."""

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        h = gshard.split(jnp.tanh(x @ w), 0, "data") @ w
        return jnp.cumsum(gshard.shard(h, P(None, "model")), 1) @ w

    x, w = jnp.ones((512, 512)), jnp.ones((512, 512))
    plan = exported(step, x, w, mesh={"data": 2, "model": 4}, in_shardings=(P(), P()), out_shardings=P())
    assert plan.tried["shardings alone"] == 0
    assert not plan.follows_plan
    assert "times its products" in str(plan)
    assert list(plan.tried)[-1] == "a constraint on every value"


BOXED = '''"""Arrays in structures."""

import jax
import jax.numpy as jnp


@jax.jit
def step(variables, x, *, scale=1.0):
    """A step."""
    up, down = jax.tree.leaves(variables)
    return jnp.tanh(x @ up) @ down * scale, {"loss": jnp.mean(x)}
'''


def boxed(kind: str) -> Any:
    """Weights in a structure, and their specs in it."""
    (params, _), specs = arrays(), {"a": P(None, "data"), "b": P("data", None)}
    weights = {"a": params["up"], "b": params["down"]}
    if kind == "dictionary":
        return {"params": weights}, {"params": specs}
    if kind == "Linen":
        return {"params": {k: nn.Partitioned(w, names=(None, None)) for k, w in weights.items()}}, {"params": specs}
    return nnx.State({k: nnx.Param(w) for k, w in weights.items()}), nnx.State(
        {k: nnx.Param(s) for k, s in specs.items()}
    )


@pytest.mark.parametrize("kind", ["Linen", "NNX", "by keyword"])
def test_structures_and_keywords(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A literal says dictionaries of boxes; a state of NNX, and arguments beside one by keyword, are constrained."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(BOXED)
    before = loaded(tmp_path / "train.py", f"boxed_before_{kind[0]}").step
    variables, specs = boxed("dictionary" if kind == "by keyword" else kind)
    mesh, x, kwargs = {"data": 8}, arrays()[1], {}
    devices = jax_mesh(mesh)
    on = jax.tree.map(lambda s: jax.NamedSharding(devices, s), specs, is_leaf=lambda s: isinstance(s, P))
    if kind == "by keyword":
        kwargs = {"scale": jnp.ones((64, 64))}
        given = jax.device_put((variables, x, kwargs), (on, jax.NamedSharding(devices, P()), None))
        found = gshard.search(
            plain(before), given[0], given[1], **kwargs, mesh=devices, machine="h100:1x8", progress=False,
            budget_seconds=1e-3,
        )  # fmt: skip
        plan = gshard.export_plan(found)
    else:
        plan = exported(plain(before), variables, x, mesh=mesh, in_shardings=(specs, P()))
    assert plan.keywords.keys() == kwargs.keys()
    patch = plan.patch()
    assert ("arguments by keyword" in patch) == (kind == "by keyword")
    assert 'a": P(None, "data")' in patch or 'a/value": P(None, "data")' in patch
    assert ("in_shardings=(" in patch) == (kind != "by keyword")
    assert ("variables_specs" in patch) == (kind != "Linen")
    step = applied(tmp_path, patch, f"boxed_after_{kind[0]}").step
    wanted = plain(before)(variables, x, **kwargs)
    with jax.set_mesh(devices):
        leaves, tree = jax.tree.flatten(variables)
        placed = jax.tree.unflatten(tree, list(map(jax.device_put, leaves, jax.tree.leaves(on))))
        assert sent(step, placed, x, **kwargs) == plan.compiled.bytes_by_kind
        found_now = step(placed, x, **kwargs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found_now, wanted)


def test_what_is_not_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    specs = ({"up": P(None, "data"), "down": P("data", None)}, P())
    texts = {
        "twice": STEP.format(imports=USUAL, decorator="", after="\n\none = jax.jit(step)\ntwo = jax.jit(step)"),
        "nowhere": STEP.format(imports=USUAL, decorator="", after=""),
        "given": STEP.format(imports=USUAL, decorator="@jax.jit(out_shardings=None)", after=""),
    }
    told = {"twice": "at 2 places", "nowhere": "is not jitted by jax.jit", "given": "has out_shardings already"}
    for name, text in texts.items():
        (tmp_path / "train.py").write_text(text)
        step = loaded(tmp_path / "train.py", f"train_{name}").step
        patch = exported(plain(step), *arrays(), mesh={"data": 8}, in_shardings=specs).patch()
        assert f"{told[name]}" in patch
        assert "\n@@" not in patch
        assert '#   in_shardings=({"down": P("data"), "up": P(None, "data")}, P()),' in patch
