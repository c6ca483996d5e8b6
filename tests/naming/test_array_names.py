"""Reports name weights, gradients and modules; rows of equal layers are one, and nothing is lost in it."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gshard
from device.models import f32
from gshard.naming.argument_names import argument_names, equal_layers

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
    for rows in (found.collectives, found.source.moved):
        assert (sum(row.bytes for row in rows), sum(row.times for row in rows)) == (sent, times)
    assert sum(row.arrays for row in found.collectives) <= len(found.source.moved)
    for row in found.data("v3:2x2", seconds=0)["collectives"]:
        if row["layers"]:
            *_, times, sent = zip(*row["layers"], strict=True)
            assert (sum(times), sum(sent)) == (row["times"], row["bytes"])


def test_weights_of_nnx_are_named_and_counted():
    found = of_nnx()
    rows = {(row.kind, row.array): row for row in found.collectives}
    for name in ("state/0/blocks/*/up/kernel/value", "state/0/blocks/*/down/kernel/value"):
        assert rows["all_gather", name].arrays == rows["reduce_scatter", f"gradient of {name}"].arrays == LAYERS
    assert rows["reduce_scatter", "gradient of state/0/embed/embedding/value"].arrays == 1
    assert {row.array.text for row in found.source.moved} >= {
        f"state/0/blocks/{i}/up/kernel/value" for i in range(LAYERS)
    }
    assert "state/0/blocks/*/up/kernel/value  x3" in str(found)
    assert "['kernel'].value" not in str(found)
    assert found.why("state/0/blocks/1/up/kernel/value") == found.why("state[0]['blocks'][1]['up']['kernel'].value")


def test_modules_of_linen_without_transformations():
    written = {row.module for row in of_linen(False).collectives if "kernel" in row.array}
    assert {"Net/layers_*/wi_0", "Net/layers_*/wo"} <= written
    scanned = of_linen(True)
    assert {"Net/layers/wi_0", "Net/layers/wo"} <= {row.module for row in scanned.collectives}
    inside = [row for row in scanned.collectives if row.array == "gradient of params/params/layers/wi_0/kernel"]
    assert inside, "the gradient of a stack is made slice by slice, inside of the loop"
    text = str(scanned).partition("collectives (")[2]
    assert not any(word in text for word in ("rematted", "jvp", "transpose("))


def test_haiku_has_paths_in_keys():
    hk = pytest.importorskip("haiku")

    def net(x):
        return hk.nets.MLP([64, 64, 64], name="decoder")(x)

    f = hk.without_apply_rng(hk.transform(net))
    params = jax.eval_shape(f.init, jax.random.key(0), f32(8, 64))
    step = jax.grad(lambda params, x: jnp.sum(f.apply(split(params), gshard.split(x, 0, 8)) ** 2))
    found = gshard.explain(step, params, f32(4096, 64), mesh=MESH)
    gathered = {
        (row.array.text, row.module.text)
        for row in found.source.moved
        if "/w" in row.array.text and row.kind == "all_gather"
    }
    assert gathered == {(f"params/decoder/~/linear_{i}/w", f"decoder/linear_{i}") for i in range(3)}
    rows = {(row.kind, row.array): (row.module, row.arrays) for row in found.collectives}
    assert rows["all_gather", "params/decoder/~/linear_*/w"] == ("decoder/linear_*", 3)
    assert rows["reduce_scatter", "result/decoder/~/linear_*/w"] == ("decoder/linear_*", 3)


def test_a_value_is_named_after_the_argument_it_is_added_to():
    """Weights and moments of one shape, which leave in another order than they come in."""

    def step(state, x):
        w, m = (gshard.split(a, 0, 8) for a in state)
        g = jax.grad(lambda w: jnp.sum(jnp.tanh(gshard.split(x, 0, 8) @ w) ** 2))(w)
        m = 0.9 * m + 0.1 * g
        return gshard.replicate(jnp.sin(m)), gshard.replicate(w - 0.1 * jnp.cos(m))

    found = gshard.explain(step, (f32(64, 64), f32(64, 64)), f32(512, 64), mesh=MESH)
    gathered = {row.array.text for row in found.source.moved if row.kind == "all_gather"}
    assert gathered == {"state/0", "update of state/1"}
    assert {row.array.text for row in found.source.moved if "reduce" in row.kind} == {"gradient of state/0"}


def test_gradients_that_are_results_are_named_by_their_path_and_what_is_written_is_no_gradient():
    params = {"a": {"w": f32(64, 64)}, "b": {"w": f32(64, 64)}}

    def gradients(params, x):
        p = split(params)
        return jax.grad(lambda p: jnp.sum(jnp.tanh(jnp.tanh(gshard.split(x, 0, 8) @ p["a"]["w"]) @ p["b"]["w"])))(p)

    found = gshard.explain(gradients, params, f32(512, 64), mesh=MESH)
    assert {row.array.text for row in found.source.moved if "reduce" in row.kind} == {"result/a/w", "result/b/w"}
    decode = lambda cache, new, i: gshard.replicate(  # noqa: E731
        jax.lax.dynamic_update_slice_in_dim(gshard.split(cache, 1, 8), new, i, 0)
    )
    found = gshard.explain(decode, f32(128, 64), f32(1, 64), jnp.int32(3), mesh=MESH)
    assert not any("gradient" in row.array.text for row in found.source.moved)


@pytest.mark.parametrize("partitioner", ["gshard", "xla"])
@pytest.mark.parametrize("scoped", [False, True])
def test_one_line_for_all_products_is_told_apart(scoped, partitioner):
    """As in a framework of the user's own: rows have the line that calls it, and the module of the scope or weight."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def at(*shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, jax.P(*spec)))

    def product(x, w):
        return x @ w

    def net(params, x):
        for i, layer in enumerate(params):
            with jax.named_scope(f"layer_{i}/mlp") if scoped else contextlib.nullcontext():
                h = jnp.tanh(product(x, layer["in"]))
                x = x + jnp.tanh(product(h, layer["out"]))
        return jnp.mean(x)

    params = [{"in": at(64, 256, spec=("data", "model")), "out": at(256, 64, spec=("model", "data"))} for _ in range(2)]
    found = gshard.explain(jax.jit(net), params, at(4096, 64, spec=("data",)), partitioner=partitioner)
    line = product.__code__.co_firstlineno
    first, second = (f"test_array_names.py:{line + i} via test_array_names.py:{line + 1}" for i in (6, 7))
    module = "layer_*/mlp" if scoped else "params/*"
    rows = {(row.kind, row.array): (row.module, row.arrays, row.line) for row in found.collectives}
    if partitioner == "xla":  # gshard gathers the weights
        assert rows["all_reduce", "dot_general"] == (module, 2, second)
    assert rows["all_gather", "params/*/in"][1:] == (2, first)
    assert rows["all_gather", "params/*/out"][1:] == (2, second)
    assert {f"test_array_names.py:{line + i}" for i in (6, 7)} <= found.data(seconds=0)["lines"].keys()


KEYS = st.one_of(
    st.integers(0, 3).map(lambda i: f"[{i}]"), st.sampled_from(["['a']", "['b/a']", "['b']", "['l0']", "['l1']", ".b"])
)


@given(st.lists(st.lists(KEYS, min_size=0, max_size=5), min_size=1, max_size=12), st.integers(0, 2))
def test_names_are_different_whatever_the_tree(paths, start):
    arguments = ["state", "params", "x"]
    names = dict.fromkeys(f"{arguments[(start + len(path)) % 3]}{''.join(path)}" for path in paths)
    found = argument_names({name: len(name) % 2 for name in names})
    assert len({name.text for name in found.values()}) == len(names)
    for name in found.values():
        alike = [other for other in found.values() if other.alike == name.alike]
        assert name.alike == name.text or len(alike) > 1


@pytest.mark.parametrize("partitioner", ["gshard", "xla"])
def test_weights_that_are_stacked_inside_keep_their_names(partitioner):
    """Layers that are stacked for a scan, in a state whose moments come first: rows name weights, and all layers."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def at(*shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, jax.P(*spec)))

    layers = {
        f"block_{i}": {
            "up": at(64, 256, spec=("data", "model")), "down": at(256, 64, spec=("model", "data")),
            "bias": at(256, spec=("model",)),
        }
        for i in range(LAYERS)
    }  # fmt: skip

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
    weights = {f"{of}state/params/block_*/{w}" for of in ("", "gradient of ") for w in ("up", "down")}
    assert weights | {"gradient of state/params/block_*/bias"} <= names, names
    assert not any("/m/" in name or "stack" in name for name in names)


def test_the_number_of_a_layer_may_stand_before_another():
    words = {(f"processor_edges_{i}_grid2mesh_mlp", "linear_0", "w"): 1 for i in range(3)}
    assert set(equal_layers(words).values()) == {("processor_edges_*_grid2mesh_mlp", "linear_0", "w")}
    blocks = {(f"conv_{i}_block_{j}", "w"): 1 for i in range(2) for j in range(3)}
    assert set(equal_layers(blocks).values()) == {(f"conv_{i}_block_*", "w") for i in range(2)}


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


def test_siblings_that_differ_inside_are_no_equal_layers():
    dense, mixed = {("w",): 1}, {("w",): 1, ("router",): 2}
    paths = {("layers", f"{i}", *p): k for i in range(4) for p, k in (mixed if i % 2 else dense).items()}
    folded = equal_layers(paths)
    assert set(folded.values()) == {("layers", "*", "w"), ("layers", "*", "router")}
    assert equal_layers({("layers", "0", "w"): 1, ("layers", "1", "w"): 2}) == {}
    staged = {("stages", f"{i}", f"layers_{j}", *w): 1 for i in range(2) for j in range(3) for w in [("mlp", "w_0")]}
    assert set(equal_layers(staged).values()) == {("stages", "*", "layers_*", "mlp", "w_0")}
    pairs = {("layers", f"{i}", f"wi_{j}", "kernel"): 1 for i in range(2) for j in range(2)}
    assert len(set(equal_layers(pairs).values())) == 2, "the gate is another weight than what it gates"
    assert equal_layers({("w_0",): 1, ("w_1",): 1}) == {}, "two weights, not two layers"


@pytest.mark.parametrize("scanned", [True, False])
def test_gradients_of_micro_batches_are_those_of_weights(scanned):
    """Added up, divided and clipped before Adam's moments read them: of weights and biases, and of no moment."""

    def loss(p, x):
        return jnp.mean((jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"]) ** 2)

    def step(p, mu, nu, batches):
        p, batches = split(p), gshard.split(batches, 1, "data")
        added = lambda g, x: (jax.tree.map(jnp.add, g, jax.grad(loss)(p, x)), None)  # noqa: E731
        if scanned:
            g, _ = jax.lax.scan(added, jax.tree.map(jnp.zeros_like, p), batches)
        else:
            g = jax.tree.map(lambda *gs: sum(gs), *(jax.grad(loss)(p, x) for x in batches))
        g = jax.tree.map(lambda g: g / len(batches), g)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(g)))
        g = jax.tree.map(lambda g: (g * jnp.minimum(1.0, 1 / norm)).astype(jnp.float32), g)
        mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mu, g)
        nu = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, nu, g)
        return jax.tree.map(lambda p, m, v: p - m / (jnp.sqrt(v) + 1e-8), p, mu, nu), mu, nu

    p = {"up": f32(64, 128), "bias": f32(128), "down": f32(128, 64)}
    found = gshard.explain(step, p, p, p, f32(4, 4096, 64), mesh=MESH)
    reduced = {row.array.text for row in found.source.moved if row.kind == "reduce_scatter"}
    assert reduced == {"gradient of p/up", "gradient of p/bias", "gradient of p/down"}
