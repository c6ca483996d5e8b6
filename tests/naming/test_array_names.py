"""Reports name weights, gradients and modules; rows of equal layers are one, and nothing is lost in it."""

import functools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gshard
from device.models import f32
from gshard.naming.short_names import short_names, tokens_of

nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")

MESH = gshard.Mesh.abstract(data=8)
LAYERS = 3


def split(tree):
    return jax.tree.map(lambda a: gshard.split(a, 0, 8) if a.ndim else a, tree)


@functools.cache
def of_nnx():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)

        def __call__(self, x):
            return x + self.down(nnx.gelu(self.up(x)))

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(128, 32, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])

        def __call__(self, x):
            x = self.embed(x)
            for block in self.blocks:
                x = block(x)
            return self.embed.attend(x)

    model = Net(nnx.Rngs(0))
    graphdef, state = nnx.split((model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)))

    def step(state, tokens):
        model, optimizer = nnx.merge(graphdef, split(state))
        tokens = gshard.split(tokens, 0, 8)
        grads = nnx.grad(lambda model: jnp.mean(model(tokens) ** 2))(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer))

    return gshard.explain(step, state, jax.ShapeDtypeStruct((16, 8), jnp.int32), mesh=MESH)


@functools.cache
def of_linen(scanned):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            h = nn.Dense(64, name="wi_0", use_bias=False)(x)
            return x + nn.Dense(32, name="wo", use_bias=False)(nn.relu(h)), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            if scanned:
                scan = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
                x, _ = scan(name="layers")(x, None)
            else:
                for i in range(LAYERS):
                    x, _ = Block(name=f"layers_{i}")(x, None)
            return nn.Dense(8, name="out")(x)

    params = jax.eval_shape(Net().init, jax.random.key(0), f32(64, 32))

    def step(params, x):
        params = jax.tree.map(lambda w: gshard.split(w, w.ndim - 1, 8), params)
        gradients = jax.grad(lambda params: jnp.mean(Net().apply(params, gshard.split(x, 0, 8)) ** 2))(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients)

    return gshard.explain(step, params, f32(2048, 32), mesh=MESH)


@pytest.mark.parametrize("of", [of_nnx, lambda: of_linen(False), lambda: of_linen(True)])
def test_rows_of_equal_layers_leave_nothing_out(of):
    found = of()
    sent = sum(c.total_bytes for c in found.spmd.collectives)
    times = sum(c.times for c in found.spmd.collectives)
    for rows in (found.collectives, found.all_rows):
        assert (sum(row.bytes for row in rows), sum(row.times for row in rows)) == (sent, times)
    assert sum(row.arrays for row in found.collectives) <= len(found.all_rows)
    for row in found.data("v3:2x2")["collectives"]:
        if row["layers"]:
            *_, times, sent = zip(*row["layers"], strict=True)
            assert (sum(times), sum(sent)) == (row["times"], row["bytes"])


def test_weights_of_nnx_are_named_and_counted():
    found = of_nnx()
    rows = {(row.kind, row.array): row for row in found.collectives}
    for name in ("blocks[*].up.kernel", "blocks[*].down.kernel"):
        assert rows["all_gather", name].arrays == rows["reduce_scatter", f"gradient of {name}"].arrays == LAYERS
    assert rows["reduce_scatter", "gradient of embed.embedding"].arrays == 1
    assert {row.array for row in found.all_rows} >= {f"blocks[{i}].up.kernel" for i in range(LAYERS)}
    assert rows["all_gather", "blocks[*].up.kernel"].module == "blocks[*]/up", "NNX opens no scopes: of the weight"
    assert "blocks[*].up.kernel  x3" in str(found)
    assert "['kernel'].value" not in str(found)
    assert found.why("blocks[1].up.kernel") == found.why("state[0]['blocks'][1]['up']['kernel'].value")


def test_a_value_is_named_after_the_argument_it_is_added_to():
    """Weights and moments of one shape, which leave in another order than they come in."""

    def step(state, x):
        w, m = (gshard.split(a, 0, 8) for a in state)
        g = jax.grad(lambda w: jnp.sum(jnp.tanh(gshard.split(x, 0, 8) @ w) ** 2))(w)
        m = 0.9 * m + 0.1 * g
        return gshard.replicate(jnp.sin(m)), gshard.replicate(w - 0.1 * jnp.cos(m))

    found = gshard.explain(step, (f32(64, 64), f32(64, 64)), f32(512, 64), mesh=MESH)
    gathered = {row.array for row in found.all_rows if row.kind == "all_gather"}
    assert gathered == {"state[0]", "update of state[1]"}
    assert {row.array for row in found.all_rows if "reduce" in row.kind} == {"gradient of state[0]"}


KEYS = st.one_of(
    st.integers(0, 3).map(lambda i: f"[{i}]"), st.sampled_from(["['a']", "['layers_0']", "['layers_1']", ".value"])
)


@given(st.lists(st.lists(KEYS, min_size=0, max_size=5), min_size=1, max_size=12), st.integers(0, 11), st.integers(0, 2))
def test_short_names_are_different_whatever_the_tree(paths, weights, start):
    arguments = ["state", "params", "x"]
    names = dict.fromkeys(f"{arguments[(start + len(path)) % 3]}{''.join(path)}" for path in paths)
    kinds = {name: len(name) % 2 for name in names}
    found = short_names(kinds, list(names)[:weights])
    assert len({name.text for name in found.values()}) == len(names)
    assert all(name.text for name in found.values())
    for name, short in found.items():
        assert "".join(tokens_of(name)) == name
        alike = [other for other in found.values() if other.alike == short.alike]
        assert short.alike == short.text or len(alike) > 1


@pytest.mark.parametrize("partitioner", ["gshard", "xla"])
def test_weights_that_are_stacked_inside_keep_their_names(partitioner):
    """Layers that are stacked for a scan, in a state whose moments come first: rows name weights, and all layers."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def at(*shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, jax.P(*spec)))

    layers = {
        f"block_{i}": {
            "up": at(64, 256, spec=("data", "model")),
            "down": at(256, 64, spec=("model", "data")),
            "bias": at(256, spec=("model",)),
        }
        for i in range(LAYERS)
    }

    def loss(params, x):
        def layer(x, w):
            return x + jax.nn.relu(x @ w["up"] + w["bias"]) @ w["down"], None

        return jnp.mean(jax.lax.scan(layer, x, jax.tree.map(lambda *ws: jnp.stack(ws), *params.values()))[0] ** 2)

    def step(state, x):
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], jax.grad(loss)(state["params"], x))
        return {"m": m, "params": jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], m)}

    state = {"m": layers, "params": layers}
    jitted = jax.jit(step, out_shardings=jax.tree.map(lambda x: x.sharding, state), donate_argnums=0)
    found = gshard.explain(jitted, state, at(128, 64, spec=("data",)), partitioner=partitioner)
    names = {row.array for row in found.collectives}
    weights = {f"{of}block_*.{w}" for of in ("", "gradient of ") for w in ("up", "down")}
    assert weights | {"gradient of block_*.bias"} <= names, names
    assert not any("m." in name or "stack" in name for name in names)


def test_what_moves_inside_an_operator_is_named():
    q, kv = f32(2, 512, 8, 64), f32(2, 512, 2, 64)

    def ring(q, k, v):
        return gshard.attention(gshard.split(q, 1, 8), gshard.split(k, 1, 8), v, is_causal=True)

    found = gshard.explain(ring, q, kv, kv, mesh=MESH)
    inside = {row.array for row in found.collectives if row.why.startswith("inside")}
    assert inside == {"k and 1 more"}
    stacked = gshard.explain(
        lambda a, b: jnp.concatenate([gshard.split(a, 0, 8), b[1:]]), f32(64, 4), f32(65, 4), mesh=MESH
    )
    assert all(row.array for row in stacked.collectives)


@pytest.mark.parametrize("scanned", [True, False])
def test_gradients_of_micro_batches_are_those_of_weights(scanned):
    """Added up, divided and clipped before Adam's moments read them: of weights and biases, and of no moment."""

    def loss(p, x):
        return jnp.mean((jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"]) ** 2)

    def step(p, mu, nu, batches):
        p, batches = split(p), gshard.split(batches, 1, "data")
        if scanned:
            g, _ = jax.lax.scan(
                lambda g, x: (jax.tree.map(jnp.add, g, jax.grad(loss)(p, x)), None),
                jax.tree.map(jnp.zeros_like, p),
                batches,
            )
        else:
            parts = [jax.grad(loss)(p, x) for x in batches]
            g = jax.tree.map(lambda *gs: sum(gs), *parts)
        g = jax.tree.map(lambda g: g / len(batches), g)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(g)))
        g = jax.tree.map(lambda g: (g * jnp.minimum(1.0, 1 / norm)).astype(jnp.float32), g)
        mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mu, g)
        nu = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, nu, g)
        return jax.tree.map(lambda p, m, v: p - m / (jnp.sqrt(v) + 1e-8), p, mu, nu), mu, nu

    p = {"up": f32(64, 128), "bias": f32(128), "down": f32(128, 64)}
    found = gshard.explain(step, p, p, p, f32(4, 4096, 64), mesh=MESH)
    reduced = {row.array for row in found.all_rows if row.kind == "reduce_scatter"}
    assert reduced == {"gradient of p.up", "gradient of p.bias", "gradient of p.down"}
