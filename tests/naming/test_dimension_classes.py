"""Classes of dimensions: what one factor runs over is one dimension, all through a program."""

import jax
import jax.numpy as jnp
import optax
import pytest

import gshard
from gshard import Layout
from gshard.core.errors import ArgumentError, ShardingError
from gshard.naming.dimension_classes import dimensions_of, of_equal_layers
from gshard.stages import dimensions


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def members(found):
    return {frozenset(f"{path}.{d}" for path, d in c.arguments) for c in found.classes if c.arguments}


def gpt(params, tokens):
    def block(x, p):
        def heads(name):
            return (x @ p[name]).reshape(*x.shape[:2], 4, 8)

        scores = jnp.einsum("bqhd,bkhd->bhqk", heads("q"), heads("k"))
        read = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), heads("v")).reshape(*x.shape[:2], 32)
        x = x + read @ p["o"]
        return x + jax.nn.gelu(x @ p["w1"]) @ p["w2"], None

    x, _ = jax.lax.scan(block, params["table"][tokens], params["blocks"])
    logits = jax.nn.log_softmax(x @ params["table"].T)
    return -jnp.take_along_axis(logits, tokens[..., None], -1).mean()


SQUARE, LAYERS = 40, 3  # 4 heads of 8 are 32 columns


@pytest.fixture
def arguments():
    blocks = {n: shape(LAYERS, SQUARE, 32) for n in "qkv"} | {"o": shape(LAYERS, 32, SQUARE)}
    blocks |= {"w1": shape(LAYERS, SQUARE, 128), "w2": shape(LAYERS, 128, SQUARE)}
    return {"table": shape(50, SQUARE), "blocks": blocks}, shape(6, 16, dtype="int32")


NAMES = {"tokens": "batch length", "params/table": "vocabulary embed", "params/blocks/w1": "layers _ hidden"}


@pytest.mark.parametrize("transformed", [lambda f: f, jax.grad, jax.checkpoint])
def test_a_few_names_name_a_transformer(transformed, arguments):
    def loss(params, tokens):
        return gpt(params, tokens)

    found = dimensions(transformed(loss), *arguments, names=NAMES)
    columns = found.arguments["params/blocks/q"].split()[-1]
    read = found.arguments["params/blocks/v"].split()[-1]
    blocks = {
        "k": f"embed {columns}", "o": f"{read} embed", "q": f"embed {columns}", "v": f"embed {read}",
        "w1": "embed hidden", "w2": "hidden embed",
    }  # fmt: skip
    weights = {f"params/blocks/{name}": f"layers {dims}" for name, dims in blocks.items()}
    assert found.arguments == {"params/table": "vocabulary embed", "tokens": "batch length", **weights}
    assert columns != read
    heads = found[columns].product[0]
    assert found[read].product[0] == heads
    assert found[heads].size == 4
    assert [found[part].size for part in found[read].product] == [4, 8]
    assert all("length,length'" in text for text in found["length"].twice)
    assert found["length"].twice
    assert not found["batch"].twice
    assert found["batch"].names == ("batch",)
    assert f"length and length' in one value: {found['length'].twice[0]}" in str(found)


def test_the_found_names_are_names_of_jit(arguments):
    """Named all, a layout of arguments cuts each as it cuts those that were named."""
    named = dimensions(gpt, *arguments, names=NAMES)
    layout = Layout(batch="data", hidden="model", embed=None, vocabulary="model")
    mesh = gshard.Mesh.abstract(data=2, model=4)
    lowered = gshard.jit(gpt, mesh=mesh, layout=layout, names=dict(named.arguments)).lower(*arguments)
    model = mesh.atoms_of["model"]
    found = dict(zip(lowered.program.names, lowered.program.block.inputs, strict=True))
    assert lowered.plan.sharding(found["params['blocks']['w2']"]).dims == ((), model, ())
    assert lowered.plan.sharding(found["params['table']"]).dims == (model, ())
    assert dimensions(gshard.jit(gpt, mesh=mesh, layout=layout, names=NAMES), *arguments).arguments == named.arguments


def test_the_closure_by_hand():
    """What is elementwise, transposed, contracted, sliced and joined; what never meets stays apart."""
    f = lambda a, b, c: (jnp.sin(a).T @ b, c[:, 1:].sum(0), jnp.concatenate([b, b * 2], 1))  # noqa: E731
    found = dimensions(f, shape(3, 4), shape(3, 5), shape(6, 7))
    assert members(found) == {frozenset({"a.0", "b.0"}), frozenset({"a.1"}), frozenset({"b.1"}), frozenset({"c.0"}),
        frozenset({"c.1"})}  # fmt: skip
    (sliced,) = (c for c in found.classes if ("c", 1) in c.arguments)
    assert (sliced.size, sliced.sizes) == (6, (7, 6))
    (joined,) = (c for c in found.classes if ("b", 1) in c.arguments)
    assert joined.sizes == (10, 5)


def test_a_product_is_taken_apart_as_it_was_made():
    """To (batch length) and back: the batch that comes out is the one that went in."""

    def f(x, w, y):
        flat = x.reshape(6 * 5, 7) @ w
        return flat.reshape(6, 5, 8) + y, flat.reshape(10, 3, 8)

    found = dimensions(f, shape(6, 5, 7), shape(7, 8), shape(6, 5, 8))
    assert members(found) == {
        frozenset({"x.0", "y.0"}), frozenset({"x.1", "y.1"}), frozenset({"x.2", "w.0"}), frozenset({"w.1", "y.2"})
    }  # fmt: skip
    (flat,) = (c for c in found.classes if c.size == 30)
    assert [found[label].arguments[0] for label in flat.product] == [("x", 0), ("x", 1)]
    assert {c.size for c in found.classes} == {6, 5, 7, 8, 30, 10, 3}


def test_loops_and_branches():
    def f(xs, ys, c):
        c, out = jax.lax.scan(lambda c, xy: (c + xy[0] @ xy[1], c.sum()), c, (xs, ys))
        c = jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c * 2, c)
        return jax.lax.cond(c[0] > 0, lambda a, b: a, lambda a, b: -a, c, out), out

    found = dimensions(f, shape(5, 3, 4), shape(5, 4), shape(3))
    assert members(found) == {frozenset({"xs.0", "ys.0"}), frozenset({"xs.1", "c.0"}), frozenset({"xs.2", "ys.1"})}


def test_what_people_say_against_each_other():
    found = dimensions(lambda x, y: gshard.name(x + y, "_ z"), shape(3, 1), shape(3, 4), names={"x": "a _", "y": "b c"})
    assert found["a"].names == ("a", "b")
    assert set(found["c"].names) == {"c", "z"}
    assert "called a and b, which are the same dimension" in str(found)
    assert found.arguments == {"x": "a _", "y": "a c"}
    with pytest.raises(KeyError, match="no class is called 'b'"):
        found["b"]


def test_names_inside_under_vmap_are_placed_and_letters_are_none_of_the_names():
    found = dimensions(jax.vmap(lambda x: gshard.name(x * 2, "rows columns"), in_axes=1), shape(3, 4, 5))
    assert found.arguments["x"].split()[::2] == ["rows", "columns"]
    assert (found["rows"].arguments, found["columns"].arguments) == ((("x", 0),), (("x", 2),))
    found = dimensions(lambda x, y: x @ y, shape(3, 4), shape(4, 5), names={"x": "_ a"})
    assert sorted(c.label for c in found.classes) == ["a", "b", "c"]
    assert found["a"].arguments == (("x", 1), ("y", 0))


def test_what_cannot_be_asked():
    with pytest.raises(ArgumentError, match="takes names for a plain function only"):
        dimensions(gshard.jit(jnp.sin, mesh=8), shape(3, 4), names={"x": "a b"})
    with pytest.raises(ShardingError, match="no argument is at 'z'"):
        dimensions(lambda x: x, shape(3, 4), names={"z": "a b"})
    assert str(dimensions(lambda x: x, jnp.float32(3))) == "dimensions of <lambda>: 0 classes"


@pytest.mark.parametrize("layers", [2, 12])
@pytest.mark.parametrize("in_lists", [True, False], ids=["lists of weights", "a list of layers"])
def test_equal_layers_have_one_class_with_their_moments(layers, in_lists):
    adam = optax.adam(1e-3)
    sizes = {"up": (24, 64), "down": (64, 24)}
    if in_lists:
        params = {name: [shape(*size)] * layers for name, size in sizes.items()}
    else:
        params = {"blocks": [{name: shape(*size) for name, size in sizes.items()} for _ in range(layers)]}
    state = {"params": params, "adam": jax.eval_shape(adam.init, params)}

    def step(state, x):
        def loss(params):
            y = x
            blocks = params.get("blocks") or [{k: params[k][i] for k in sizes} for i in range(layers)]
            for block in blocks:
                y = y + jnp.tanh(y @ block["up"]) @ block["down"]
            return (y * y).mean()

        updates, moments = adam.update(jax.grad(loss)(state["params"]), state["adam"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "adam": moments}

    found = of_equal_layers(dimensions_of(gshard.stages.trace(step, state, shape(16, 24))))
    hidden = [c for c in found.classes if c.size == 64]
    assert len(hidden) == 1
    assert len(hidden[0].arguments) == layers * 2 * 3  # up and down, each with two moments
    marked = {v for v, labels in found.labels.items() if hidden[0].label in labels}
    assert sum(v in marked for v in found.labels if v.shape in sizes.values()) >= layers * 2 * 3


def test_dimensions_of_one_layer_stay_apart():
    """Two dimensions at the same paths but for numbers, of which one array has both, are not those of two layers."""

    def f(ws, x):
        return x @ ws[0] @ ws[1] @ ws[2]

    found = of_equal_layers(dimensions_of(gshard.stages.trace(f, [shape(8, 8)] * 3, shape(4, 8))))
    labels = [found.arguments[f"ws/{i}"].split() for i in range(3)]
    assert all(a != b for a, b in labels)
