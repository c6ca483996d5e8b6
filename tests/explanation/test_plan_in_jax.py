"""Plans that were searched run under jax.jit with their shardings, and advise finds the constraints that they need."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from checked_calls import near
from device.models import f32
from placed import mesh_of

DATA, BOTH = {"data": 8}, {"data": 2, "model": 4}


def step(params, x):
    def loss(params):
        return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value


def arguments():
    rng = np.random.default_rng(0)
    up, down, x = rng.normal(size=(64, 256)) / 8, rng.normal(size=(256, 64)) / 16, rng.normal(size=(64, 64))
    return {"up": jnp.float32(up), "down": jnp.float32(down)}, jnp.float32(x)


def named(function, *args, axes=DATA, **options):
    """The shardings of a quick search, on a mesh of JAX's."""
    made = gshard.jit(function, **({"mesh": axes} | options))
    found = gshard.search(made, *args, machine="h100:1x8", progress=False, budget_seconds=1e-3)
    return found.named(mesh_of(**axes))


def test_jax_jit_runs_with_the_shardings_of_the_plan_and_is_advised():
    def marked(params, x):
        params = {"up": gshard.split(params["up"], 1, "model"), "down": gshard.split(params["down"], 0, "model")}
        return step(params, gshard.split(x, 0, "data"))

    ins, outs = named(marked, *arguments(), axes=BOTH)
    specs = jax.tree.map(lambda s: s.spec, ins)
    assert specs == ({"up": P(None, "model"), "down": P("model", None)}, P("data", None))
    assert jax.tree.structure(outs) == jax.tree.structure(ins)
    jitted, given = jax.jit(step, in_shardings=ins, out_shardings=outs), arguments()
    for _ in range(3):
        near(jitted(*given), jax.jit(step)(*given))
    found = gshard.explain(jitted, *given)
    advice = found.advise(seconds=20)
    assert advice.after.sent <= advice.before.sent == found.total_bytes
    assert advice.planned is not None


@pytest.mark.parametrize("explicit", [False, True])
def test_parts_of_axes_and_uneven_dimensions_are_whole(explicit):
    def halved(params, x):
        return step({**params, "up": gshard.split(params["up"], 1, 2)}, gshard.split(x, 0, "data"))

    (params, x), outs = named(halved, *arguments(), mesh=mesh_of(**DATA, explicit=explicit))
    assert (params["up"].spec, x.spec) == (P(None, None), P("data", None))
    near(jax.jit(step, in_shardings=(params, x), out_shardings=outs)(*arguments()), jax.jit(step)(*arguments()))
    # 60 rows over 8 devices: the plan splits them inside, jax.jit takes them whole.
    ins, _ = named(lambda x, w: gshard.split(x, 0, 8) @ gshard.split(w, 1, 2), f32(60, 512), f32(512, 64))
    assert [s.spec for s in ins] == [P(None, None)] * 2


def test_static_captured_and_host_arguments_none_and_references():
    table, devices = jnp.ones((64, 256)), mesh_of(**DATA)

    def stepped(kind, x, state):
        h = gshard.split(x, 0, "data") @ table
        return jnp.tanh(h) if kind == "tanh" else h, state

    x = jnp.ones((64, 64))
    state = {"none": None, "empty": [], "w": jnp.ones(64)}
    (on_x, on_state), (on_h, _) = named(stepped, "tanh", x, state, static_argnums=0)
    assert (on_x.spec, on_h.spec, on_state.keys()) == (P("data", None), P("data", None), state.keys())
    jitted = jax.jit(stepped, static_argnums=0, in_shardings=(on_x, on_state))
    near(jitted("tanh", x, state)[0], jnp.tanh(x @ table))

    def added(state, x):
        return jax.device_put(state, jax.memory.Space.Device) * 2 + x

    on_host = jax.NamedSharding(devices, P("data"), memory_kind="pinned_host")
    ins, _ = named(added, f32(64, 64), f32(64, 64), mesh=devices, in_shardings=(on_host, P("data")))
    assert [sharding.memory_kind for sharding in ins] == ["pinned_host", "device"]
    with pytest.raises(gshard.ArgumentError, match="no shardings for references"):
        named(lambda total, x: total[...] + x, jax.new_ref(jnp.zeros(())), jnp.ones((64, 64)))
