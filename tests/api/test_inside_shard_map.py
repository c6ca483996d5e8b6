"""``gshard.jit`` inside of a ``jax.shard_map`` over other axes is partitioned over the axes that stay automatic."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from gshard.xla.hlo_collectives import collectives

MESH = jax.make_mesh((2, 4), ("stage", "model"), axis_types=(AxisType.Auto,) * 2)
RANDOM = np.random.default_rng(0)
X, W = (RANDOM.standard_normal(s).astype(np.float32) / 3 for s in ((8, 8), (8, 12)))
PLACES = ((P(), P()), (P("stage"), P(None, "model")), (P(None, "model"), P("stage")))


def layer(x, w):
    """Tensor parallel, once over all of the automatic axis and once over a part of it."""
    w = gshard.split(w, 1, "model")
    h = jnp.tanh(x @ w) @ w.T
    return h + gshard.split(jnp.cumsum(gshard.replicate(h), 0), 0, 2)


def region(body, **options):
    specs = {"in_specs": (P("stage"), P()), "out_specs": P("stage"), "axis_names": {"stage"}}
    return jax.shard_map(body, mesh=MESH, **specs, **options)


def scanned(f):
    return lambda x, w: lax.scan(lambda c, _: (f(c, w), None), x, length=2)[0]


def gradients(f):
    return jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), (0, 1))


CALLS = {
    "gradients of a scan": lambda f: gradients(region(scanned(f))),
    "gradients": lambda f: gradients(region(f)),
    "gradient inside": lambda f: region(lambda x, w: gradients(f)(x, w)[0]),
    "vmap": lambda f: region(lambda x, w: jax.vmap(f, (0, None))(jnp.stack([x, 2 * x]), w)[1]),
}
FAST = ("gradients",)
MESHES = {"the region's": MESH, "its automatic axes": gshard.Mesh.abstract(model=4), "none": None}


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CALLS])
def test_numbers_are_those_without_it(name):
    around = CALLS[name]
    expected = jax.jit(around(layer))(X, W)
    run = jax.jit(around(gshard.jit(layer, mesh=MESH)))
    for places in PLACES:
        given = [jax.device_put(a, NamedSharding(MESH, p)) for a, p in zip((X, W), places, strict=True)]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), run(*given), expected)


@pytest.mark.parametrize("own", [m if m != "none" else pytest.param(m, marks=pytest.mark.slow) for m in MESHES])
def test_it_runs_on_parts(own, caplog):
    def mlp(x, w):
        return jnp.tanh(x @ gshard.split(w, 1, "model")) @ gshard.split(w, 1, "model").T

    x = jax.device_put(X, NamedSharding(MESH, P("stage")))
    w = jax.device_put(W, NamedSharding(MESH, P(None, "model")))
    with caplog.at_level(logging.WARNING, logger="gshard"):
        compiled = jax.jit(region(gshard.jit(mlp, mesh=MESHES[own]))).lower(x, w).compile()
    (found,) = collectives(compiled.as_text())
    assert found.kind == "all_reduce"
    np.testing.assert_allclose(compiled(x, w), jax.jit(mlp)(X, W), rtol=1e-5, atol=1e-5)
    assert "taken as whole: f32[4,8]" in caplog.text
    assert "f32[8,12]" not in caplog.text


def test_an_outer_plan_holds_it():
    inside = gshard.jit(lambda x, w: jnp.tanh(x @ gshard.split(w, 1, "model")), mesh=gshard.Mesh.abstract(model=4))
    f = gshard.jit(region(inside), mesh=gshard.Mesh.abstract(stage=2, model=4))
    plan = f.lower(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (X, W))).plan
    (product,) = (e for e in plan.program.block.equations if e.name == "dot_general")
    assert plan.mesh.spec_of(plan.sharding(product.outputs[0]).dims) == P(None, "model")


def callback(x):
    jax.debug.callback(print, x)
    return x


EXPLICIT = jax.make_mesh((2, 4), ("stage", "model"), axis_types=(AxisType.Explicit,) * 2)
REFUSED = {
    "all axes are manual": (jnp.sin, {"axis_names": {"stage", "model"}}, "all axes of its mesh are manual"),
    "another mesh": (gshard.jit(jnp.sin, mesh=8), {}, "mesh={'model': 4}"),
    "its manual axes": (gshard.jit(jnp.sin, mesh=gshard.Mesh.abstract(stage=2)), {}, "its mesh is another one"),
    "another size": (gshard.jit(jnp.sin, mesh=gshard.Mesh.abstract(model=2)), {}, "its mesh is another one"),
    "a collective": (lambda x: lax.psum(x, "stage"), {}, "the function has effects"),
    "a callback": (callback, {}, "the function has effects"),
    "a search": (gshard.jit(jnp.sin, mesh=MESH, search=True), {}, "the plan is searched"),
    "a mark over a manual axis": (lambda x: gshard.split(x, 0, "stage"), {}, "'stage' is manual"),
    "explicit axes": (jnp.sin, {"mesh": EXPLICIT}, "its other axes are of type Explicit"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_by_name(name):
    f, options, text = REFUSED[name]
    inside = f if hasattr(f, "options") else gshard.jit(f, mesh=options.get("mesh", MESH))
    given = {"mesh": MESH, "in_specs": P("stage"), "out_specs": P("stage"), "axis_names": {"stage"}, **options}
    x = jax.device_put(X, NamedSharding(given["mesh"], P("stage")))
    with pytest.raises(gshard.GShardError, match=text):
        jax.jit(jax.shard_map(inside, **given)).lower(x)
